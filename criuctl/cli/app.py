"""What one invocation was asked globally, and the one way by which its result leaves.

`App` is filled by the global options (see `pages`) and given to every command by click's context.
A command asks it for the configuration and for a reporter, and hands it the result; whether that
becomes JSON, a table on a terminal or plain text is decided here.  Results go to standard output
and nothing else does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .streams import jsonable, tell, write_result
from .text import Column, harmless

if TYPE_CHECKING:
    from ..config import Config
    from ..report import Reporter

DEGRADED = 11  # done, but something that policy calls optional failed


def _settled(config: Config) -> Config:
    """With a store that is the same one for who reads its name elsewhere later: a hook, the
    recovery after a boot.
    """
    if config.store.startswith("/"):
        return config
    from ..store import from_anywhere

    # what is wrong with it is told by the command that opens it
    with suppress(UsageError, FileNotFoundError):
        return config.with_options(store=from_anywhere(config.store))
    return config


class App:
    """The global options of one invocation."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self.verbose = 0
        self.quiet = False
        self.store: str | None = None
        self.config_file: str | None = None
        # the one JSON value is on standard output: what goes wrong from then on is told elsewhere
        self.answered = False
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        """Files, then variables, then options; read when first asked for."""
        if self._config is None:
            from .. import config

            self._config = _settled(config.load(self.config_file).with_options(store=self.store))
        return self._config

    def store_coming(self) -> AbstractContextManager[None]:
        """For a command that loads much of its own before it opens the store: an S3 client is
        loaded beside that.
        """
        from ..store import coming

        return coming(self.config.store, self.config)

    @contextmanager
    def reporting(self, *, bars: bool = True) -> Iterator[Reporter]:
        """A reporter for one operation; its progress bars are off the terminal when the block is
        left.

        Operations on several things at once have no `bars`: one terminal has not room for all of
        theirs.
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
        """Print a result: `value` as JSON under --json, else the text of `brief` under -q, else of
        `human`.

        Empty text prints nothing.  Control characters are escaped unless the text is `raw`, as what
        a session has printed.
        """
        if self.json:
            import json

            write_result(json.dumps(value, indent=2 if _on_terminal() else None, default=jsonable))
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
        """Print a list: a table for people (with `empty` said on standard error if there are no
        rows).
        """
        if self.json or (self.quiet and brief is not None):
            self.emit(value, lambda: "", brief)
            return
        lines = list(rows)
        if not lines:
            tell(empty)
        elif _on_terminal():
            from .output import print_table

            print_table(columns, lines)
        else:
            from .text import table

            write_result(table(columns, lines))


pass_app = click.make_pass_decorator(App, ensure=True)


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
