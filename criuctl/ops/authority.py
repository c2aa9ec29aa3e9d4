"""Who may write into a session: the write lease, and the roles of operators.

The holder has the rules (`session.holder.operators`); here is what `criuctl lease` and `criuctl
role` ask of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import LeaseHeld, NotFound, UsageError, WrongState
from ..quoting import quoted
from ..session.client import caller
from ..session.protocol import KINDS, MAX_HOLD
from .sessions import connect
from .typing import patiently

if TYPE_CHECKING:
    from ..session.client.session import Session


def check_holder(session: Session, name: str) -> None:
    """Refuse a holder of an older version, which would ignore what it does not know."""
    if "hold" not in session.hello["features"]:
        raise WrongState(
            f"the holder of session {name!r} is of an older version",
            hint=f"Dump and restore the session first: `criuctl dump {quoted(name)}`.",
        )


# -- the lease


def request(config: Config, name: str, hold: float) -> dict[str, Any]:
    """Get the write lease for `hold` seconds, in which the caller's later commands type under it.

    `LeaseHeld` if another operator keeps it.
    """
    with connect(config, name, role="write") as session:
        check_holder(session, name)
        _check_hold(hold)
        lease = patiently(lambda: session.lease_request(hold=hold))
        return {"session": name, "lease": lease, "from": None}


def take(config: Config, name: str, hold: float) -> dict[str, Any]:
    """Take the write lease from its holder for `hold` seconds.

    A human takes it from any operator; `Forbidden` for others.
    """
    role = "admin" if caller.kind() == "human" else "write"
    with connect(config, name, role=role) as session:
        check_holder(session, name)
        _check_hold(hold)
        answer = session.lease_take(hold=hold)
        lease = session.heartbeat()
        return {"session": name, "lease": lease, "from": answer["from"]}


def give_up(config: Config, name: str) -> dict[str, Any]:
    """Give the write lease up; `LeaseHeld` if it is another operator's."""
    with connect(config, name, role="write") as session:
        session.lease_yield()
        lease = session.heartbeat()
        if lease is not None and not _same(lease):
            raise LeaseHeld(
                f"the lease of session {name!r} is that of {lease['kind']} {lease['name']!r}",
                hint=f"`criuctl lease take {quoted(name)}` takes it.",
                holder=lease,
            )
        return {"session": name, "lease": lease}


def _same(lease: Mapping[str, Any]) -> bool:
    return (lease["kind"], lease["name"]) == (caller.kind(), caller.name())


def _check_hold(hold: float) -> None:
    if not 1 <= hold <= MAX_HOLD:
        raise UsageError(f"a lease is held for 1 s to {MAX_HOLD / 3600:g} h, not for {hold:g} s")


# -- roles


def set_role(config: Config, name: str, operator: str, role: str) -> dict[str, Any]:
    """Let an operator have at most `role`, now and whenever it connects.

    `operator` is ``KIND:NAME``; a NAME alone means the agent and the service of that name, ``*``
    all of them; ``op-7`` is an operator that is connected now.
    """
    with connect(config, name, role="admin") as session:
        if operator.endswith("*"):
            check_holder(session, name)
        chosen = _chosen(session.hello["status"]["operators"], operator)
        for kind, who in chosen:
            session.set_role(kind, who, role)
        limited = session.status()["operators"]
    return {
        "session": name,
        "role": role,
        "operators": [{"kind": kind, "name": who} for kind, who in chosen],
        "connected": [
            {key: one[key] for key in ("operator", "kind", "name", "role")}
            for one in limited
            if any(one["kind"] == kind and who in (one["name"], "*") for kind, who in chosen)
        ],
    }


def _chosen(connected: list[dict[str, Any]], operator: str) -> list[tuple[str, str]]:
    """Return (kind, name) of the operators that the word `operator` means."""
    if re.fullmatch(r"op-[0-9]+", operator):
        found = [one for one in connected if one["operator"] == operator]
        if not found:
            raise NotFound(
                f"no operator {operator!r} is connected", hint="`criuctl status NAME` lists them."
            )
        return [(found[0]["kind"], found[0]["name"])]
    kind, colon, who = operator.partition(":")
    if colon and kind in KINDS:
        chosen = [(kind, who)]
    else:
        chosen = [("agent", operator), ("service", operator)]
    if not 0 < len(chosen[0][1]) <= 64:
        raise UsageError(
            f"{operator!r} is no operator", hint="Write [KIND:]NAME, for example agent:builder."
        )
    return chosen
