"""Sessions by name: their states, and a connection to one.

The state of a session comes from three sources; the first one found wins: its holder, if one
answers; the files that its holder left in the run folder; the registry, which also has trees that
were dumped or restored without a terminal. `describe` and `sessions` merge them into the one shape
that `ls` and `status` print.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import InvalidName, NoSuchProcess, NotFound, NotHeld, SessionGone, UsageError
from ..host.registry import Registry, SessionRecord
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..report import utc_text
from ..session import names
from ..session.client import caller
from ..session.sessions import all_states, state_of
from . import acting

if TYPE_CHECKING:
    from ..session.client.session import Session

_MOST_SECONDS = 31536000.0


def check_seconds(seconds: float | None) -> None:
    """Raise `UsageError` for a time that is negative, or no number."""
    if seconds is not None and not 0 <= seconds <= _MOST_SECONDS:
        raise UsageError(f"{seconds!r} is no time: 0 s to a year can be waited")


# -- talking


def connect(
    config: Config,
    name: str,
    *,
    kind: str | None = None,
    role: str = "write",
    operator: str = "",
    resume: tuple[str, str] | None = None,
) -> Session:
    """Connect to the holder of session `name`. `NotFound` says why there is none, `NotHeld` that it
    runs without one.

    `kind` is what this client is; None: what this command line is (`session.client.caller`).
    On behalf of an actor (`acting`), that one decides kind and operator, and limits the role.
    """
    from ..session.client.session import Session

    actor = acting.current()
    if actor is not None:
        kind, operator = actor.kind, actor.name

    def open_(role: str, resume: tuple[str, str] | None) -> Session:
        return Session.connect(
            name,
            kind=kind or caller.kind(),
            config=config,
            role=role,
            operator=operator,
            resume=resume,
        )

    try:
        names.check_name(name)
    except InvalidName as error:
        raise NotFound(f"no session can be named {name!r}", hint=error.hint) from error
    try:
        if actor is not None:
            return actor.connect(name, role, resume, open_)
        return open_(caller.capped(role), resume)
    except SessionGone as error:
        state, record = state_of(config, name), Registry(config).get(name)
        if state is None and record is None:
            raise SessionGone(f"no session {name!r} is known to this host") from error
        known = known_of(state, record)
        if known["moved_to"]:
            hint = f"`criuctl attach {quoted(known['moved_to'])}`"
            raise SessionGone(
                why_not(known), hint=hint, moved_to=known["moved_to"], home=known["home"]
            ) from error
        if known["state"] == "running":
            hint = (
                "Sessions that `criuctl run` has started have one."
                f" `criuctl dump`, `wait {quoted(name)} --exit` and `kill` need none."
            )
            raise NotHeld(why_not(known), hint=hint) from error
        raise ended_error(known) from error


# -- looking


def sessions(config: Config) -> list[dict[str, Any]]:
    """Return every session that this host knows, by name. No holder is asked, so nothing
    can hang.
    """
    states = {state["session"]: state for state in all_states(config)}
    records = {record.name: record for record in Registry(config).all()}
    return [
        known_of(states.get(name), records.get(name))
        for name in sorted(states.keys() | records.keys())
    ]


def describe(config: Config, name: str) -> dict[str, Any]:
    """Return all facts about one session; its holder's answer wins. Raise `NotFound`."""
    try:
        with connect(config, name, role="observe") as session:
            status = session.hello["status"]
            others = [o for o in status["operators"] if o["operator"] != session.operator]
            origin = _forked_from(Registry(config).get(name), status["id"])
            return shown({**status, "operators": others, "forked_from": origin})
    except SessionGone:
        state, record = state_of(config, name), Registry(config).get(name)
        if state is None and record is None:
            raise NotFound(
                f"no session {name!r} is known to this host",
                hint="`criuctl ls` shows those that are.",
            ) from None
        return known_of(state, record)


def status(config: Config, name: str) -> dict[str, Any]:
    """Return `describe`, with the last checkpoint as an object: id, number, age_s, store; and
    whether writes are tracked since then.
    """
    from ..host import latest_checkpoints
    from ..tracking import keeping

    body = describe(config, name)
    body["tracking"] = "none"
    with suppress(NoSuchProcess):  # it has just ended
        if body["pid"] and keeping.tracked(config, ProcessIdentity.of(body["pid"])):
            body["tracking"] = "write-protect"
    body["checkpoint"] = latest_checkpoints.described(
        config, name, body["id"], body.get("checkpoint") or None, time.time()
    )
    return body


def ended(config: Config, name: str) -> bool:
    """Return whether there is no live session of this name, so that one may be started."""
    known = next(
        (body for body in sessions(config) if body["session"] == names.check_name(name)), None
    )
    return known is None or known["state"] in ("exited", "lost")


def shown(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a holder's status as `criuctl status --json` prints it."""
    body = dict(status)
    body["home"] = body.get("home") or body.get("host")
    if body["state"] not in ("running", "paused"):
        body["pid"] = None
    for key in ("since", "created"):
        body[key] = utc_text(body.get(key))
    body["operators"] = [
        {**operator, "since": utc_text(operator.get("since"))}
        for operator in body.get("operators") or ()
    ]
    body["holder"] = True
    first = ("session", "state", "home", "pid", "incarnation", "exit_code", "since", "operators")
    return {key: body[key] for key in first} | {
        key: value for key, value in body.items() if key not in first
    }


def known_of(state: Mapping[str, Any] | None, record: SessionRecord | None) -> dict[str, Any]:
    """Return the status from the records that were left: the state file if it is of the same, or of
    a later, life than the registry's record.
    """
    if state is not None and not state["holder_alive"] and record is not None:
        ended = record.hidden and state["state"] == "exited" and record.id == state["id"]
        later = (
            record.state == "checkpointed"
            and state["state"] != "lost"
            and record.updated >= state["since"]
        )
        if (record.alive() and not ended) or later:
            state = None
    if state is not None and _never_came(state, record):
        why = "its restore was interrupted"
        state = {**state, "state": "lost", "reason": why, "checkpoint": None}
    if state is not None:
        body = {
            "session": state["session"],
            "state": state["state"],
            "home": os.uname().nodename,
            "pid": state["pid"] if state["state"] in ("running", "paused") else None,
            "incarnation": state["incarnation"],
            "exit_code": state["exit_code"],
            "exit_signal": state.get("exit_signal"),
            "reason": state.get("reason") or (record.reason if record is not None else "") or None,
            "since": utc_text(state["since"]),
            "id": state["id"],
            "created": utc_text(state.get("created")),
            "command": state["command"],
            "labels": state["labels"],
            "checkpoint": state.get("checkpoint") or None,
            "holder": state["holder_alive"],
        }
    else:
        assert record is not None
        alive = record.alive()
        body = {
            "session": record.name,
            "state": "running"
            if alive
            else "checkpointed"
            if record.state == "checkpointed"
            else "lost",
            "home": os.uname().nodename,
            "pid": record.pid if alive else None,
            "incarnation": record.incarnation,
            "exit_code": None,
            "exit_signal": None,
            "reason": record.reason
            or ("it cannot be seen from inside of a session" if record.hidden else None),
            "since": utc_text(_began(record) if alive and not record.hidden else record.updated),
            "id": record.id,
            "created": None,
            "command": _command(record.pid) if alive and not record.hidden else [],
            "labels": {},
            "checkpoint": record.checkpoint or None,
            "holder": False,
        }
    body["operators"] = []
    body["forked_from"] = _forked_from(record, body["id"])
    moved_to = (
        (state or {}).get("moved_to") or (record.moved_to if record is not None else "")
    ) or None
    if body["state"] == "checkpointed" and moved_to:
        known = record.home if record is not None and record.moved_to else ""
        body["home"] = (state or {}).get("home") or known or _host_of(moved_to)
    body["moved_to"] = moved_to if body["state"] == "checkpointed" else None
    return body


def _never_came(state: Mapping[str, Any], record: SessionRecord | None) -> bool:
    """Return whether a killed restore of a copy has left this: a dump and a move record more, and
    what was dumped before is not in its first incarnation.
    """
    if state["state"] != "checkpointed" or state["holder_alive"] or state["moved_to"]:
        return False
    return record is None or (
        (record.id, record.state, record.incarnation) == (state["id"], "running", 1)
        and not record.alive()
    )


def _forked_from(record: SessionRecord | None, id: str) -> str | None:
    """Return the session that the session with this id is a fork of."""
    return record.forked_from or None if record is not None and record.id == id else None


def _began(record: SessionRecord) -> float:
    """Return when the tree began to run here, in Unix seconds: its root's start, by the kernel."""
    started = record.start_time / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _host_of(url: str) -> str:
    """Return the host of an ``ssh://`` address, without user and port."""
    from urllib.parse import urlsplit

    return urlsplit(url).hostname or url


def _command(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words]


def ended_error(known: Mapping[str, Any]) -> SessionGone:
    """Return the error of a session that has ended here, with what can be done about it."""
    name = quoted(known["session"])
    hints: list[str] = []
    if known["state"] in ("exited", "lost") and not known["moved_to"]:
        if known.get("checkpoint"):
            hints.append(f"`criuctl restore {name}` brings back its newest checkpoint.")
        if known["state"] == "exited":
            hints.append(f"`criuctl capture {name}` shows its last screen.")
        hints.append(f"`criuctl run --name {name} -- COMMAND` begins a new one.")
    return SessionGone(why_not(known), hint=" ".join(hints))


def why_not(known: Mapping[str, Any]) -> str:
    """Return why there is no holder to connect to, as text."""
    name, state = known["session"], known["state"]
    if known["moved_to"]:
        return f"session {name!r} has moved to {known['home']}"
    if state == "checkpointed":
        return (
            f"session {name!r} is checkpointed and its terminal has no holder; `criuctl restore "
            f"{quoted(name)}` brings it back"
        )
    if state == "exited":
        code = known["exit_code"]
        return f"session {name!r} has ended" + (
            f" with exit code {code}" if code is not None else ""
        )
    if state == "running":
        return f"session {name!r} runs as PID {known['pid']}, and criuctl holds no terminal of it"
    ended = (
        "its holder ended without a word"
        if known["created"]
        else "it ended, and without a holder its exit status is unknown"
    )
    return f"session {name!r} is lost: {known.get('reason') or ended}"
