"""Dumps of several trees, one after the other, all of them left running: what cron calls.

Each target is a dump of its own with its own locks, preflight and outcome; a failure of one is recorded in
its outcome and the next is tried.  Only what concerns them all stops the whole: a signal, or a bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..errors import CriuctlError
from ..report import Reporter
from .describe import DumpResult
from .dump import dump
from .hooking import snapshot_failed
from .registry import Registry


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """What became of one target: a result or an error, never both."""

    target: str
    result: DumpResult | None = None
    error: CriuctlError | None = None

    @property
    def degraded(self) -> bool:
        """Stored, but something optional failed."""
        return self.result is not None and self.result.degraded

    def to_dict(self) -> dict[str, Any]:
        """``target`` with the keys of a dump's result, or with ``error``."""
        if self.error is not None:
            return {"target": self.target, "error": self.error.to_dict()}
        assert self.result is not None
        return {"target": self.target, **self.result.to_dict()}


def snapshot(config: Config, targets: Sequence[str], all_: bool, *, reporter: Reporter) -> Iterator[SnapshotOutcome]:
    """Dump each target (every session that runs on this host, with `all_`), leaving it running.

    Yields each outcome as soon as it is known.
    """
    wanted = [record.name for record in Registry(config).all() if record.alive()] if all_ else list(dict.fromkeys(targets))
    for target in wanted:
        reporter.warnings = []  # each outcome tells its own
        try:
            result = dump(config, target, reporter=reporter, leave_running=True, labels={})
        except CriuctlError as error:
            snapshot_failed(config, reporter, target, error)
            yield SnapshotOutcome(target, error=error)
        else:
            yield SnapshotOutcome(target, result=result)
