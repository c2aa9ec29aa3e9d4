"""Dumps of several trees, some at a time, all of them left running, for cron.

Each target is a separate dump, in its own process (`batch`), with its own locks, preflight and
outcome; a failure of one is its outcome and the others are still tried. Only a signal, or the
deadline, stops the whole: then the dumps under way are interrupted, and they and the rest have
timed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..config import Config
from ..dump.job import DumpRequest
from ..dump.story import dump
from ..errors import CriuctlError, DumpFailed
from ..host.hook_facts import snapshot_failed
from ..report import Reporter
from .scheduling import batch
from .scheduling.subjects import Subject


class SnapshotOutcome(Struct, frozen=True):
    """The outcome for one target: the answer of its dump, or an error, never both."""

    target: str
    result: dict[str, Any] | None = None  # keys of a dump's JSON
    degraded: bool = False  # stored, but something optional failed
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return ``target`` with the keys of a dump's result, or with ``error``."""
        if self.error is not None:
            return {"target": self.target, "error": self.error.to_dict()}
        return {"target": self.target, **(self.result or {})}


def snapshot(
    config: Config,
    subjects: Sequence[Subject],
    *,
    reporter: Reporter,
    jobs: int = batch.JOBS,
    until: float | None = None,
    late: str = "the deadline has passed",
    leave_running: bool = True,
    max_freeze: float | None = None,
    with_workspace: bool = False,
) -> Iterator[SnapshotOutcome]:
    """Dump each, `jobs` at a time, and leave it running (or not); yield each outcome as soon as it
    is known.

    `until` is the deadline on the monotonic clock, and `late` the error text for those that were
    not done by then.
    """
    for subject in subjects:
        if subject.error is not None:
            snapshot_failed(config, reporter, subject.name, subject.error)
            yield SnapshotOutcome(subject.name, error=subject.error)
    work = [
        (
            subject.name,
            _dump(
                config,
                subject,
                DumpRequest(
                    leave_running=leave_running,
                    max_freeze=max_freeze,
                    keep_tracking=leave_running,
                    with_workspace=with_workspace,
                ),
            ),
        )
        for subject in subjects
        if subject.error is None
    ]
    for outcome in batch.each(
        work, reporter=reporter, jobs=jobs, until=until, broken=DumpFailed, late=late
    ):
        if outcome.answer is not None:
            yield SnapshotOutcome(outcome.key, outcome.answer["result"], outcome.answer["degraded"])
            continue
        assert outcome.error is not None
        if not outcome.own_error:
            snapshot_failed(config, reporter, outcome.key, outcome.error)
        yield SnapshotOutcome(outcome.key, error=outcome.error)


def _dump(
    config: Config, subject: Subject, request: DumpRequest
) -> Callable[[Reporter], dict[str, Any]]:
    def work(reporter: Reporter) -> dict[str, Any]:
        labels = dict(subject.labels) if subject.tree else {}
        try:
            asked = replace(request, labels=labels)
            result = dump(config, subject.name, request=asked, reporter=reporter)
        except CriuctlError as error:
            # here, so that no other dump waits for its hooks
            snapshot_failed(config, reporter, subject.name, error)
            raise
        return {"result": result.to_dict(), "degraded": result.degraded}

    return work


def lock_of(config: Config, targets: Sequence[str], labels: Sequence[str]) -> str:
    """Return the name of the lock that prevents the same snapshots from being taken twice at the
    same time.
    """
    what = "\0".join([config.state_dir, config.store, *sorted(targets), "", *sorted(labels)])
    return f"snapshot/{sha256(what.encode(errors='surrogateescape')).hexdigest()[:32]}"
