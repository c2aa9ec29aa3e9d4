"""Groups: sessions that belong together, and are stored and brought back as one.

The members of a group are the sessions with the label ``group`` of that value, which ``criuctl run
--group`` sets and a restore keeps. A copy loses it, or with all its group gets another one
(`group_fork`). A group checkpoint names the checkpoint that each member has of one and the same
moment (`criuctl.checkpoint.groups`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..checkpoint.groups import GroupCheckpoint
from ..config import Config
from ..errors import CriuctlError, DataError, NoSuchCheckpoint, NotFound, UsageError
from ..host.group_label import LABEL
from ..report import Reporter
from ..session.names import check_name
from .inspect import check_right, opened, remove
from .kill import kill
from .sessions import sessions

_LIVES = ("running", "paused")


def grouped(labels: Mapping[str, str], group: str | None) -> dict[str, str]:
    """Return the labels of a session that is in `group`, if it is in one; raise `UsageError` if
    they name a group too, `InvalidName`.
    """
    if group is None:
        return dict(labels)
    if LABEL in labels:
        raise UsageError(f"a group sets the label {LABEL!r}, which is among the labels too")
    return {**labels, LABEL: check_name(group)}


def members(config: Config, group: str) -> list[dict[str, Any]]:
    """Return the sessions of this host that are in the group, whatever their state, as `sessions`
    does; raise `NotFound` if there are none.
    """
    check_name(group)
    found = [s for s in sessions(config) if s["labels"].get(LABEL) == group]
    if not found:
        raise NotFound(
            f"no session of this host is in a group {group!r}",
            hint="`criuctl run --group` puts one into it.",
        )
    return found


def living(config: Config, group: str) -> list[dict[str, Any]]:
    """Return the members that run; raise `NotFound` if none does."""
    found = [session for session in members(config, group) if session["state"] in _LIVES]
    if not found:
        raise NotFound(f"no session of group {group!r} runs")
    return found


class GroupListing(Struct, frozen=True):
    """The group checkpoints of a store, and the errors of those that cannot be read."""

    checkpoints: list[GroupCheckpoint]
    unreadable: list[DataError]


def list_groups(config: Config, group: str) -> GroupListing:
    """Return the checkpoints of the group, oldest first; raise `NoSuchCheckpoint` if it has
    none.
    """
    check_name(group)
    unreadable: list[DataError] = []
    with opened(config) as (_, repository):
        found = repository.groups.list(group, unreadable)
    if not found and not unreadable:
        raise NoSuchCheckpoint(f"the store holds no checkpoint of a group named {group!r}")
    return GroupListing(found, unreadable)


def described(one: GroupCheckpoint) -> dict[str, Any]:
    """Return the JSON of a group checkpoint."""
    return {
        "group": one.group,
        "checkpoint": one.id,
        "number": one.number,
        "created": one.created,
        "host": one.host,
        "frozen_ms": one.frozen_ms,
        "members": [
            {"session": m.session, "checkpoint": m.checkpoint, "number": m.number}
            for m in one.members
        ],
    }


class Killed(Struct, frozen=True):
    """A member that was ended, or the error."""

    session: str
    body: dict[str, Any] | None = None
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``kill``, or ``error``."""
        if self.error is not None:
            return {"session": self.session, "error": self.error.to_dict()}
        return self.body or {}


def kill_group(config: Config, group: str, grace: float) -> list[Killed]:
    """End every member that runs; one that cannot be ended does not keep the others."""
    done = []
    for session in living(config, group):
        try:
            done.append(Killed(session["session"], kill(config, session["session"], grace)))
        except CriuctlError as error:
            done.append(Killed(session["session"], error=error))
    return done


class Removed(Struct, frozen=True):
    """A group checkpoint that was removed, and its members' checkpoints that were not."""

    checkpoint: GroupCheckpoint
    kept: list[tuple[str, CriuctlError]]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``rm --group``."""
        kept = [{"checkpoint": ref, "error": error.to_dict()} for ref, error in self.kept]
        return {**described(self.checkpoint), "kept": kept}


def remove_group(config: Config, ref: str, *, reporter: Reporter) -> Removed:
    """Remove a group checkpoint, then those of its members that nothing else keeps."""
    with opened(config) as (_, repository):
        one = repository.groups.resolve(ref)
        for member in one.members:
            check_right(repository, "rm", repository.resolve(member.checkpoint))
        repository.groups.remove(one)
    reporter.step("group-removed")
    removals = remove(config, [m.checkpoint for m in one.members], reporter=reporter)
    return Removed(one, [(r.ref, r.error) for r in removals if r.error is not None])
