"""Schedules of snapshots: their definitions, and the timers that run them.

A definition is ``STATE_DIR/schedules/NAME.json``; its timer (`timers`) only names it, and each run
reads it again (`schedule_run`). The last run's result, or its current process, is next to it in
``NAME.last.json`` (no schedule's name has a dot).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
from ..session.names import check_name
from .scheduling import batch, timers

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
    folder = folder_of(config)
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
        made = Schedule(
            **{**_values(schedule), "backend": backend.kind, "created": iso(datetime.now(UTC))}
        )
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
    found = _read(folder_of(config) / f"{name}.json") if _NAME.fullmatch(name) else None
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
        text = f"{folder_of(config) / name}.json is no definition of a schedule: {error}"
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
        path.stem for path in folder_of(config).glob("*.json") if _NAME.fullmatch(path.stem)
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
    folder = folder_of(config)
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
        body |= {"next": iso(at) if at else None, "last": _last(folder, schedule.name)}
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
    folder = folder_of(config)
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


def folder_of(config: Config) -> Path:
    """Return the folder of the definitions."""
    return Path(config.state_dir) / "schedules"


def iso(moment: datetime) -> str:
    """Return a time as the records of schedules have it (UTC, seconds)."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
