"""What the event of each operation says: about which sessions, and with what outcome.

For `events.recorded` and `recorded_each`. A function ``of_...`` takes an operation's arguments and
returns the facts that are known when it begins. The others take its result and return the facts of
each event that it makes: one for each session, or one for all. Operations on one session whose
result has the usual JSON need none of these: see `events.outcome`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...session.names import valid_name
from .events import DEGRADED, Facts, failure, known_session
from .worst_exit_code import worst

_IN_DOUBT = 12  # the exit code
_NAMES = 50  # sessions in an event about many names


def of_session(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """Return the session of ``f(config, SESSION, ...)``, which may be a name or a record."""
    session = getattr(args[1], "name", args[1]) if len(args) > 1 else kwargs.get("name")
    return known_session(args[0], {"session": session}) if isinstance(session, str) else {}


def of_schedule(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Facts:
    """Return the schedule of ``f(config, SCHEDULE, ...)``, which may be a name or a definition."""
    schedule = getattr(args[1], "name", args[1])
    return {"schedule": schedule} if valid_name(schedule) else {}


def of_name(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Facts:
    """Return the name of ``f(config, NAME, ...)``, without what this host knows of it."""
    return {"session": args[1]} if valid_name(args[1]) else {}


def of_maintenance(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Facts:
    """Return the facts of ``begin(config, HOW, ...)``."""
    return {"how": args[1]}


def started(_args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """Return the facts of ``run(config, argv, name=)``."""
    name = kwargs.get("name")
    return {"session": name} if name and valid_name(name) else {}


def begun(session: Any) -> list[Facts]:
    """Describe a new session."""
    return [
        {"session": session.name, "session_id": session.id, "incarnation": 1, "pid": session.pid}
    ]


def imported(done: Any) -> list[Facts]:
    """Describe a checkpoint that came from a file; there is no event if the store had it."""
    return [_of_summary(done.summary) | {"bytes": dict(done.summary.bytes)}] if done.done else []


def nothing_more(_result: Any) -> list[Facts]:
    """Describe nothing: the event itself is all."""
    return [{}]


def killed(body: Mapping[str, Any]) -> list[Facts]:
    """Describe a session that was ended."""
    return [{"session": body["session"], "processes": body["killed"]}]


def fenced(processes: int) -> list[Facts]:
    """Describe a session that was stopped because another host has it; there is no event if nothing
    ran here.
    """
    return [{"processes": processes}] if processes else []


def settled(answers: Iterable[Mapping[str, Any]]) -> list[Facts]:
    """Describe moves that were interrupted."""
    return [
        {
            "session": a["session"],
            "checkpoint": a["checkpoint"],
            "to": a["host"],
            "came_to": a["outcome"],
        }
        | ({"exit_code": _IN_DOUBT, "error": "in-doubt"} if a["error"] else {})
        for a in answers
    ]


def removed(removals: Iterable[Any]) -> list[Facts]:
    """Describe checkpoints that were removed, or refused."""
    return [
        _of_summary(r.summary) | (failure(r.error) if r.error is not None else {}) for r in removals
    ]


def forgotten(done: Any) -> list[Facts]:
    """Describe sessions that were forgotten, or refused; also a run that found none, because cron
    started it.
    """
    made: list[Facts] = [
        {"session": one.session}
        | (failure(one.error) if one.error is not None else {"freed_bytes": one.bytes})
        for one in done
    ]
    return made or [{}]


def pinned(pinnings: Iterable[Any]) -> list[Facts]:
    """Describe checkpoints that were pinned, or unpinned."""
    return [_of_summary(p.checkpoint) for p in pinnings]


def _of_summary(summary: Any) -> Facts:
    if summary is None:
        return {}
    facts: Facts = {
        "session": summary.session or None,
        "checkpoint": summary.id,
        "number": summary.number,
    }
    return facts | {"session_id": summary.session_id or None, "incarnation": summary.incarnation}


def scheduled(done: tuple[Any, int]) -> list[Facts]:
    """Describe one run of a schedule."""
    ran, code = done
    errors = [outcome.error for outcome in ran.outcomes if outcome.error is not None]
    states = Counter(
        "failed" if outcome.error is not None else "stored" for outcome in ran.outcomes
    )
    facts: Facts = {
        "sessions": [outcome.target for outcome in ran.outcomes][:_NAMES],
        "states": dict(states),
    }
    error = next(
        (e.code for e in [*errors, ran.error] if e is not None and e.exit_code == code), None
    )
    return [facts | {"removed": ran.pruned, "exit_code": code, "error": error}]


def maintained(items: Sequence[Any]) -> list[Facts]:
    """Describe what maintenance has stored, or brought back."""
    code = worst(
        item.error["exit_code"] if item.error else DEGRADED if item.degraded else 0
        for item in items
    )
    error = next(
        (item.error["code"] for item in items if item.error and item.error["exit_code"] == code),
        None,
    )
    names = [item.session for item in items][:_NAMES]
    return [
        {
            "sessions": names,
            "states": dict(Counter(item.state for item in items)),
            "exit_code": code,
            "error": error,
        }
    ]


def abandoned(items: Sequence[Any]) -> list[Facts]:
    """Describe what was abandoned."""
    return [{"sessions": [item.session for item in items][:_NAMES]}]


def recovered(items: Sequence[Any]) -> list[Facts]:
    """Describe what a boot has brought back; there is no event if there was nothing."""
    return maintained(items) if items else []


def supervised(good: bool) -> list[Facts]:
    """Describe the end of a supervisor."""
    return [{"exit_code": 0 if good else DEGRADED}]


def pruned(done: Any) -> list[Facts]:
    """Describe a run of the keep rules; also one that found nothing to do, because cron started it
    and its run is of interest.
    """
    sessions = sorted({summary.session for summary in done.removed})
    facts: Facts = {
        "removed": len(done.removed),
        "kept": sum(d.keep for d in done.decisions),
        "sessions": sessions[:_NAMES],
    }
    return [facts | {"exit_code": DEGRADED if done.unreadable or done.errors else 0}]


def collected(done: Any) -> list[Facts]:
    """Describe a collection."""
    facts = {
        "freed_bytes": done.freed_bytes,
        "copied_bytes": done.copied_bytes,
        "packs_deleted": done.deleted,
    }
    degraded = done.refused or done.refused_others or done.lost
    return [
        facts | {"exit_code": DEGRADED if degraded else 0, "warnings": len(done.warnings) or None}
    ]
