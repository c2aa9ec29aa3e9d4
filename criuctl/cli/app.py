"""The global options of one invocation, and the one place that prints its result.

`App` is filled by the global options (see `pages`), and click's context passes it to every command.
A command gets the configuration and a reporter from it, and hands it the result. `App` decides
whether that becomes JSON, a table on a terminal or plain text. Only results go to standard output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import click

from .streams import jsonable, tell, write_result
from .tables import Column, on_terminal, table
from .text import harmless

if TYPE_CHECKING:
    from ..config import Config
    from ..report import Reporter

PROGRAM = "criuctl"
DEGRADED = 11  # done, but something that policy calls optional failed


class App:
    """The global options of one invocation."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self.verbose = 0
        self.quiet = False
        self.store: str | None = None
        self.config_file: str | None = None
        # the one JSON value is printed: later errors go to standard error
        self.answered = False
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        """The configuration: files, then variables, then options; read on first use."""
        if self._config is None:
            from .. import config

            found = config.load(self.config_file)
            if self.store is not None:
                found = found.with_options(store=self.store, store_named=True)
            if not found.store.startswith("/"):
                from ..store import settled

                found = settled(found)
            self._config = found
        return self._config

    def own_program(self) -> list[str]:
        """Return this criuctl with the global options that say where things are, as a command."""
        from ..ops.scheduling.timers import own_program

        program = [*own_program(sys.argv[0], sys.executable)]
        program += ["--store", self.store] if self.store else []
        return program + (
            ["--config", os.path.abspath(self.config_file)] if self.config_file else []
        )

    def store_coming(self) -> AbstractContextManager[None]:
        """Load the S3 client in the background, for a command that loads much else before it opens
        the store.
        """
        from ..store import coming

        return coming(self.config.store, self.config)

    @contextmanager
    def reporting(self, *, bars: bool = True) -> Iterator[Reporter]:
        """Yield a reporter for one operation; its progress bars are removed when the block
        is left.

        Operations on several things at once have no `bars`: a terminal has no room for all of them.
        """
        from .output import make_reporter

        reporter = make_reporter(json=self.json, verbose=self.verbose, quiet=self.quiet, bars=bars)
        try:
            yield reporter
        finally:
            reporter.close()

    def emit(
        self,
        value: Any,
        human: Callable[[], str],
        brief: Callable[[], str] | None = None,
        *,
        raw: bool = False,
    ) -> None:
        """Print a result: `value` as JSON under --json, otherwise the text of `brief` under -q, or
        of `human`.

        Empty text prints nothing. Control characters are escaped unless the text is `raw`, such as
        a session's output.
        """
        if self.json:
            import json

            write_result(json.dumps(value, indent=2 if on_terminal() else None, default=jsonable))
            self.answered = True
            return
        text = brief() if self.quiet and brief is not None else human()
        if text:
            write_result(text if raw else harmless(text))

    def emit_table(
        self,
        value: Any,
        columns: Sequence[Column],
        rows: Iterable[Sequence[str]],
        *,
        empty: str,
        brief: Callable[[], str] | None = None,
    ) -> None:
        """Print a list: a table for people (without rows, `empty` goes to standard error)."""
        if self.json or (self.quiet and brief is not None):
            self.emit(value, lambda: "", brief)
            return
        lines = list(rows)
        if not lines:
            tell(empty)
        else:
            heading, below, rest = table(columns, lines).partition("\n")
            write_result((_bold(heading) if on_terminal() else heading) + below + rest)


pass_app = click.make_pass_decorator(App, ensure=True)


def takes_colours() -> bool:
    """Return whether the terminal and its user want more than plain text."""
    return os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def _bold(text: str) -> str:
    """Return text in bold, unless the terminal or its user wants none of it."""
    return f"\x1b[1m{text}\x1b[m" if takes_colours() else text
