"""Snapshots by schedule: definitions, and one run of one of them.

A definition is ``STATE_DIR/schedules/NAME.json``; its timer (`timers`) only names it, and `run`
reads it each time. The last run's result, or its current process, is next to it in
``NAME.last.json`` (no schedule's name has a dot).

A run takes the snapshots of its sessions and configured trees, some at a time, and then, where the
definition has keep rules, prunes the sessions that were dumped. Two runs of a schedule never
overlap: the second ends at once with `Conflict`, because the first one's checkpoints are as new as
its own would be. `batch` implements that, the jitter and the deadline.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from ..config import Config
from ..errors import Conflict, CriuctlError, InvalidName, NotFound, PlatformError, UsageError
from ..host.journal import events, operation_facts
from ..host.registry import boot_id, exclusive, write_record
from ..host.retention import LONGEST, Rules
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..report import Reporter
from ..session.names import check_name
from .scheduling import batch, timers
from .scheduling.subjects import chosen
from .snapshot import SnapshotOutcome, snapshot

# valid as the name of a cron file, with criuctl's prefix
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
SHORTEST = 60.0  # seconds between two runs
PLACES = timers.Places()
_RECORDED = {"began", "ended", "result", "exit_code"}  # keys that the record of a run has at least


class Schedule(Struct, frozen=True):
    """A definition."""

    name: str
    every: float = 0.0  # seconds, or
    at: str = ""  # a calendar
    sessions: tuple[str, ...] = ()  # these, or
    all: bool = False  # every running one, or
    labels: Mapping[str, str] = field(default_factory=dict)  # those that have all of these
    jitter: float = 0.0
    deadline: float = 0.0
    jobs: int = batch.JOBS  # snapshots at once
    store: str | None = None
    config: str | None = None  # an additional configuration file
    keep: Mapping[str, Any] = field(default_factory=dict)  # as a policy of `retention`
    backend: str = ""
    created: str = ""

    def trigger(
        self, program: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
    ) -> timers.Trigger:
        """Return the trigger for the back end."""
        config = ("--config", self.config) if self.config else ()
        argv = (*program, *config, "schedule", "run", self.name)
        return timers.Trigger(
            self.name, self.every, self.at, self.jitter, self.deadline, argv, variables or {}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON."""
        return asdict(self)


@events.recorded("schedule-add", operation_facts.nothing_more, about=operation_facts.of_schedule)
def add(
    config: Config, schedule: Schedule, program: tuple[str, ...], variables: Mapping[str, str]
) -> Schedule:
    """Write the definition and its timer; after a failure nothing of it is left."""
    _check(schedule)
    trigger = schedule.trigger(program, variables)
    for text in (*trigger.argv, *variables.values(), schedule.at):
        if not text.isprintable():
            raise UsageError(f"{text!r} has characters that cannot stand in a unit or a crontab")
    backend = timers.here(PLACES)
    backend.check(trigger)
    folder = _folder(config)
    with exclusive(
        config, f"schedules/{config.state_dir}", "another criuctl adds or removes schedules"
    ):
        if (folder / f"{schedule.name}.json").exists():
            raise Conflict(
                f"there is a schedule {schedule.name!r} already",
                hint=(
                    f"`criuctl schedule remove {quoted(schedule.name)}` removes it; `criuctl "
                    "schedule list` shows all."
                ),
            )
        made = Schedule(**{**_values(schedule), "backend": backend.kind, "created": _now()})
        try:
            write_record(folder, made.name, made.to_dict())
            backend.install(trigger)
        except BaseException as error:
            (folder / f"{made.name}.json").unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise PlatformError(
                    f"{folder} cannot be written: {error.strerror}", hint="Run criuctl as root."
                ) from error
            raise
    return made


def _values(schedule: Schedule) -> dict[str, Any]:
    return asdict(schedule)


def _check(schedule: Schedule) -> None:
    if _NAME.fullmatch(schedule.name) is None:
        raise InvalidName(
            f"{schedule.name!r} cannot be a schedule's name",
            hint="Use 1 to 48 letters, digits, '_' or '-', beginning with a letter or digit.",
        )
    if bool(schedule.every) == bool(schedule.at):
        raise UsageError(
            "a schedule needs either a period or a calendar", hint="--every 1h, or --at daily."
        )
    if schedule.every and not SHORTEST <= schedule.every <= LONGEST:
        raise UsageError(f"a period must be between 1m and 366d, not {schedule.every:g} s")
    for what, seconds in (("jitter", schedule.jitter), ("deadline", schedule.deadline)):
        if not 0 <= seconds <= LONGEST:
            raise UsageError(f"the {what} must be at most 366d, not {seconds:g} s")
    if schedule.every and schedule.jitter >= schedule.every:
        raise UsageError("the jitter must be shorter than the period")
    if schedule.jobs < 1:
        raise UsageError(f"at least one job is needed, not {schedule.jobs}")
    if (bool(schedule.sessions), schedule.all, bool(schedule.labels)).count(True) != 1:
        raise UsageError("name the sessions: SESSIONs, or --all, or --label K=V")
    for name in schedule.sessions:
        check_name(name)
    Rules.make(schedule.keep, "the keep rules")


def get(config: Config, name: str) -> Schedule:
    """Return the definition of `name`; raise `NotFound`."""
    found = _read(_folder(config) / f"{name}.json") if _NAME.fullmatch(name) else None
    if found is None:
        raise _unknown(name)
    try:
        schedule = Schedule(
            **{key: value for key, value in found.items() if key in Schedule.__struct_fields__}
        )
        timers.backends(PLACES)[schedule.backend]
        schedule = Schedule(
            **{
                **_values(schedule),
                "name": name,
                "sessions": tuple(schedule.sessions),
                "labels": dict(schedule.labels),
            }
        )
        _check(schedule)
    except (TypeError, KeyError, ValueError, AttributeError, UsageError) as error:
        text = f"{_folder(config) / name}.json is no definition of a schedule: {error}"
        raise UsageError(text, hint="Remove the schedule, and add it again.") from error
    return schedule


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"there is no schedule {name!r}", hint="`criuctl schedule list` shows those there are."
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="Remove the schedule, and add it again."
        ) from error
    return loaded if isinstance(loaded, dict) else {}


def names(config: Config) -> list[str]:
    """Return the names of all schedules."""
    return sorted(
        path.stem for path in _folder(config).glob("*.json") if _NAME.fullmatch(path.stem)
    )


def listed(
    config: Config,
    wanted: Sequence[str] | None = None,
    *,
    unreadable: list[CriuctlError] | None = None,
) -> list[dict[str, Any]]:
    """Return every schedule, or those `wanted`, with its files, its next run and the result of the
    last one.

    A definition that cannot be understood is left out, and its error appended to `unreadable`;
    without that it is raised.
    """
    folder = _folder(config)
    schedules = []
    for name in names(config) if wanted is None else wanted:
        try:
            schedules.append(get(config, name))
        except CriuctlError as error:
            if unreadable is None:
                raise
            unreadable.append(error)
    following: dict[str, datetime] = {}
    for kind, backend in timers.backends(PLACES).items():
        triggers = [s.trigger() for s in schedules if s.backend == kind]
        following |= backend.next_runs(triggers) if triggers else {}
    rows = []
    for schedule in schedules:
        files = timers.backends(PLACES)[schedule.backend].files(schedule.name)
        missing = [str(path) for path in files if not path.exists()]
        at = following.get(schedule.name) if not missing else None
        body = schedule.to_dict() | {"files": [str(path) for path in files], "missing": missing}
        body |= {"next": _iso(at) if at else None, "last": _last(folder, schedule.name)}
        rows.append(body)
    return rows


def _last(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the result of the last run, if it can be read. A run without a result whose process is
    gone was killed.
    """
    try:
        record = _read(folder / f"{name}.last.json")
        if record is None or not record.keys() >= _RECORDED:
            return None
        if (process := record.pop("process", None)) is not None:
            boot, pid, start = process
            if boot != boot_id() or not ProcessIdentity(pid, start).alive():
                record["result"] = "killed"
    except (UsageError, TypeError, ValueError):
        return None
    return record


@events.recorded("schedule-remove", operation_facts.nothing_more, about=operation_facts.of_schedule)
def remove(config: Config, name: str) -> None:
    """Remove its timer and its definition; raise `NotFound` if there is neither."""
    if _NAME.fullmatch(name) is None:
        raise _unknown(name)
    folder = _folder(config)
    with exclusive(
        config, f"schedules/{config.state_dir}", "another criuctl adds or removes schedules"
    ):
        try:
            known = (folder / f"{name}.json").exists()
            # A file that is not a schedule of this state folder may belong to another one: leave
            # it.
            if not known:
                raise _unknown(name)
            for backend in timers.backends(PLACES).values():
                backend.remove(name)
            for path in (folder / f"{name}.json", folder / f"{name}.last.json"):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise PlatformError(
                f"{error.filename or folder} cannot be removed: {error.strerror}",
                hint="Run criuctl as root.",
            ) from error


# -- one run


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
        if (_folder(config) / f"{name}.json").exists():  # it may have been removed meanwhile
            write_record(_folder(config), f"{name}.last", summary)
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
        from .prune import prune

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


def _folder(config: Config) -> Path:
    return Path(config.state_dir) / "schedules"


def _now() -> str:
    return _iso(datetime.now(UTC))


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
