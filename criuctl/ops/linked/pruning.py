"""Which group checkpoints a prune removes, and which checkpoints of sessions the others need.

A group is decided on as a session is, by the same rules. Its newest checkpoint stays, unless its
removal is requested. Those of members that a group checkpoint names stay with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import groupby

from ...checkpoint.groups import GroupCheckpoint
from ...checkpoint.summary import CheckpointSummary
from ...host.retention import Decision, Rules, decide

_NEWEST = "newest of its group"


def decided(
    found: Iterable[GroupCheckpoint],
    rules_of: Callable[[str], Rules | None],
    now: datetime,
    *,
    newest_too: bool,
) -> list[Decision]:
    """Return the decision on each group checkpoint, newest first in each group; without rules all
    of a group stay.
    """
    made: list[Decision] = []
    for group, each in groupby(found, key=lambda one: one.group):
        summaries = [_summary(one) for one in each]
        rules = rules_of(group)
        if not rules:
            made += [Decision(one, ("no policy",)) for one in reversed(summaries)]
            continue
        kept = {} if newest_too else {summaries[-1].id: _NEWEST}
        made += decide(summaries, rules, now, protected=kept)
    return made


def held(found: Iterable[GroupCheckpoint], decisions: Iterable[Decision]) -> dict[str, str]:
    """Return checkpoint id -> why it stays, for the members of group checkpoints that stay."""
    kept = {decision.checkpoint.id for decision in decisions if decision.keep}
    return {
        member.checkpoint: f"part of group checkpoint {one.ref}"
        for one in found
        if one.id in kept
        for member in one.members
    }


def _summary(one: GroupCheckpoint) -> CheckpointSummary:
    return CheckpointSummary(
        id=one.id,
        session=one.group,
        session_id="",
        number=one.number,
        incarnation=0,
        created=one.created,
        host=one.host,
        labels=dict(one.labels),
    )
