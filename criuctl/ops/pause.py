"""Pausing and resuming a session: ``criuctl pause``, ``halt`` and ``resume``, and the page.

The holder does it (`criuctl.session.holder.tree_operations`); this module records it as an event of
this host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from ..config import Config
from ..host import rights
from ..host.journal import events, operation_facts
from .authority import check_holder
from .sessions import connect


class Steered(Struct, frozen=True):
    """The result of pausing or resuming."""

    session: str
    state: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    changed: bool = True  # whether the state was different before

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of the commands."""
        return {"session": self.session, "state": self.state, **self.facts}


def _steered(done: Steered) -> list[events.Facts]:
    return events.outcome(done) if done.changed else []


@events.recorded("pause", _steered, about=operation_facts.of_session)
def pause(config: Config, name: str) -> Steered:
    """Freeze every process."""
    rights.check(config, "pause", name)
    with connect(config, name) as session:
        was = session.hello["status"]["state"]
        answer = session.pause()
    return Steered(name, "paused", _of(answer, "method", "processes"), was != "paused")


@events.recorded("halt", _steered, about=operation_facts.of_session)
def halt(config: Config, name: str) -> Steered:
    """Freeze every process, drop input that no person typed, and let only persons write."""
    rights.check(config, "halt", name)
    with connect(config, name) as session:
        was = session.hello["status"]["halted"]
        answer = session.halt()
    return Steered(
        name,
        "paused",
        _of(answer, "method", "processes", "dropped"),
        not was or answer["dropped"] > 0,
    )


@events.recorded("resume", _steered, about=operation_facts.of_session)
def resume(config: Config, name: str, *, agents_stay_out: bool = False) -> Steered:
    """Undo `pause` and `halt`; with `agents_stay_out`, agents and services only observe then."""
    rights.check(config, "resume --agent-stays-out" if agents_stay_out else "resume", name)
    with connect(config, name, role="admin" if agents_stay_out else "write") as session:
        if agents_stay_out:
            check_holder(session, name)
        was = session.hello["status"]["state"]
        session.resume(agents_stay_out=agents_stay_out)
    facts = {"agents_stay_out": True} if agents_stay_out else {}
    return Steered(name, "running", facts, changed=was != "running" or agents_stay_out)


def _of(answer: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: answer[key] for key in keys}
