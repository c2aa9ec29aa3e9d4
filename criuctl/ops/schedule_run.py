"""One run of a schedule.

A run takes the snapshots of its sessions and configured trees, some at a time, and then, where the
definition has keep rules, prunes the sessions that were dumped. Two runs of a schedule never
overlap: the second ends at once with `Conflict`, because the first one's checkpoints are as new as
its own would be. `batch` implements that, the jitter and the deadline.

The result, or the process while the run goes on, is recorded next to the definition for
``schedule list``; a run whose record cannot be written ends as it would have, with a warning.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from ..config import Config
from ..errors import CriuctlError
from ..host.journal import events, operation_facts
from ..host.registry import boot_id, write_record
from ..host.retention import Rules
from ..proc.tree import ProcessIdentity
from ..report import Reporter
from .prune import prune
from .schedules import Schedule, folder_of, iso
from .scheduling import batch
from .scheduling.subjects import chosen
from .snapshot import SnapshotOutcome, snapshot


class Ran(Struct):
    """The result of one run."""

    schedule: str
    began: str
    ended: str = ""
    outcomes: list[SnapshotOutcome] = field(default_factory=list)
    pruned: int | None = None  # checkpoints removed; None: no rules
    # of pruning, and of the record
    warnings: list[str] = field(default_factory=list)
    error: CriuctlError | None = None  # of pruning

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``schedule run``."""
        return {
            "schedule": self.schedule,
            "began": self.began,
            "ended": self.ended,
            "snapshots": [outcome.to_dict() for outcome in self.outcomes],
            "pruned": self.pruned,
            "warnings": self.warnings,
            "error": self.error.to_dict() if self.error else None,
        }

    def beginning(self) -> dict[str, Any]:
        """Return the record for ``schedule list`` until the run has ended."""
        me = ProcessIdentity.of(os.getpid())
        body = self.summary(0) | {"ended": None, "result": "running", "exit_code": None}
        return body | {"process": [boot_id(), me.pid, me.start_time]}

    def summary(self, code: int, interrupted: bool = False) -> dict[str, Any]:
        """Return the record for ``schedule list`` afterwards."""
        failed = [
            {"target": outcome.target, "code": outcome.error.code, "message": outcome.error.message}
            for outcome in self.outcomes
            if outcome.error is not None
        ]
        if self.error is not None:
            failed.append(
                {"target": "prune", "code": self.error.code, "message": self.error.message}
            )
        result = (
            "interrupted"
            if interrupted
            else "failed"
            if failed
            else "ok"
            if code == 0
            else "warnings"
        )
        stored = sum(outcome.error is None for outcome in self.outcomes)
        return {
            "began": self.began,
            "ended": self.ended or _now(),
            "result": result,
            "exit_code": code,
            "stored": stored,
            "pruned": self.pruned,
            "failed": failed,
        }


@events.recorded("schedule-run", operation_facts.scheduled, about=operation_facts.of_schedule)
def run(
    config: Config,
    schedule: Schedule,
    *,
    delay: bool = False,
    reporter: Reporter,
    report: Callable[[SnapshotOutcome], object],
    judge: Callable[[Ran], int],
) -> tuple[Ran, int]:
    """Run `schedule` now, and record the result. `report` is called for each session, `judge`
    returns the exit code.

    `delay` first waits a random part of the jitter.
    """
    busy = f"the schedule {schedule.name!r} runs already"
    with batch.alone(config, f"schedule/{schedule.name}/{config.state_dir}", busy):
        batch.spread(schedule.jitter if delay else 0)
        ran = Ran(schedule.name, _now())
        # without it, only the list does not show the run
        _note(config, ran.beginning(), schedule.name)
        try:
            _take(config, schedule, ran, reporter, report)
            ran.ended = _now()
            code = judge(ran)
        except KeyboardInterrupt as error:
            code = 128 + getattr(error, "number", signal.SIGINT)
            _note(config, ran.summary(code, interrupted=True), schedule.name)
            raise
        except CriuctlError as error:
            ran.error = error
            _note(config, ran.summary(error.exit_code), schedule.name)
            raise
        if trouble := _note(config, ran.summary(code), schedule.name):
            ran.warnings.append(f"how this run ended is not in `criuctl schedule list`: {trouble}")
            code = judge(ran)
        return ran, code


def _note(config: Config, summary: dict[str, Any], name: str) -> str:
    """Record the run for ``schedule list``. Return the reason of a failure, or "": the snapshots
    are stored and reported anyway.
    """
    try:
        if (folder_of(config) / f"{name}.json").exists():  # it may have been removed meanwhile
            write_record(folder_of(config), f"{name}.last", summary)
    except OSError as error:
        return error.strerror or str(error)
    except CriuctlError as error:
        return error.message
    return ""


def _take(
    config: Config,
    schedule: Schedule,
    ran: Ran,
    reporter: Reporter,
    report: Callable[[SnapshotOutcome], object],
) -> None:
    subjects = chosen(config, schedule.sessions, every=schedule.all, labels=schedule.labels)
    until = batch.ends_at(schedule.deadline)
    late = f"the schedule's deadline of {schedule.deadline:g} s has passed"
    for outcome in snapshot(
        config, subjects, reporter=reporter, jobs=schedule.jobs, until=until, late=late
    ):
        ran.outcomes.append(outcome)
        report(outcome)
    if not schedule.keep:
        return
    dumped = [outcome.result["session"] for outcome in ran.outcomes if outcome.result is not None]
    ran.pruned = 0
    if not dumped:
        return
    work = [("prune", _prune(config, schedule, dumped))]
    for pruned in batch.each(work, reporter=reporter, until=until, late=late):
        ran.error = pruned.error
        if pruned.answer is not None:
            ran.pruned = pruned.answer["removed"]
            ran.warnings += pruned.answer["warnings"]


def _prune(config: Config, schedule: Schedule, dumped: Sequence[str]) -> batch.Work:
    def work(reporter: Reporter) -> dict[str, Any]:
        done = prune(
            config,
            dumped,
            Rules.make(schedule.keep, f"schedule {schedule.name!r}"),
            reporter=reporter,
        )
        return {
            "removed": len(done.removed),
            "warnings": [e.message for e in [*done.unreadable, *done.errors.values()]],
        }

    return work


def _now() -> str:
    return iso(datetime.now(UTC))
