"""After the commit the checkpoint exists, so nothing that fails from then on is a failed dump.

RULE: once CRIU has been answered yes, a failure of criuctl's own (a folder that became read-only, a
full disk, a store that does not answer, a holder that hangs) is a warning, and the exit code is
that of "done, but something optional failed".  Otherwise a script would dump again what has ended,
or treat the checkpoint as missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from ..errors import CriuctlError, of_the_host
from ..hooks import Hooks
from ..report import Reporter


class AfterCommit:
    """A context around a whole dump: an error that leaves it after `begins` becomes a warning."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._hooks: Hooks | None = None
        self._begun = False
        self.degraded = False

    def begins(self, hooks: Hooks | None = None) -> None:
        """Note that the checkpoint exists."""
        self._hooks = hooks
        self._begun = True
        if hooks is not None:
            hooks.done = True

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Do one piece of the work after the commit; report its failure as the warning `what`."""
        try:
            yield
        except (CriuctlError, OSError) as error:
            self._failed(what, error)

    def _failed(self, what: str, error: CriuctlError | OSError) -> None:
        cause = of_the_host(error) or error if isinstance(error, OSError) else error
        hint = cause.hint if isinstance(cause, CriuctlError) else ""
        self._reporter.warning(f"{what}: {cause}", hint)
        self.degraded = True
        if self._hooks is not None:
            self._hooks.degraded = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not self._begun or not isinstance(error, CriuctlError | OSError):
            return False
        self._failed("the checkpoint is complete, but cleaning up failed", error)
        return True
