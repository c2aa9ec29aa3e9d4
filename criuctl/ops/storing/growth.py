"""The bytes that each session adds to a store; pure functions of a list of checkpoints.

A checkpoint's summary has its plain bytes (``memory``, ``files``) and the bytes that it added to
the store (``stored``). So *growth* counts what dumps have added, including what was removed and
collected since. The present content of a store is counted object by object in
`criuctl.ops.stores`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from ...host.retention import moment

if TYPE_CHECKING:
    from ...checkpoint.summary import CheckpointSummary

RECENT = 10  # checkpoints from which the present growth is computed, or those of a day if more
_DAY = 86400.0


class Growth(Struct, frozen=True):
    """One session's share of a store; bytes are counted as its checkpoints added them."""

    session: str
    checkpoints: int
    newest: str  # when the newest was made
    plain: int  # bytes of all of them, as if each were kept whole
    stored: int
    recent: int  # the mean of the last ones, without the session's first
    # at the pace of the last ones; None for a session whose checkpoints span less than a day
    per_day: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object with all keys."""
        return asdict(self)


def plain_bytes(summary: CheckpointSummary) -> int:
    """Return the bytes that the checkpoint would take, kept whole and not compressed."""
    return sum(summary.bytes.get(kind, 0) for kind in ("memory", "files"))


def growth(checkpoints: Iterable[CheckpointSummary]) -> list[Growth]:
    """Return each session's growth, the fastest growing session first."""
    by_session = groupby(
        sorted(checkpoints, key=lambda c: (c.session, moment(c), c.number, c.id)),
        key=lambda c: c.session,
    )
    found = [_of(session, list(group)) for session, group in by_session]
    return sorted(found, key=lambda one: (-(one.per_day or 0), -one.stored, one.session))


def _of(session: str, ordered: list[CheckpointSummary]) -> Growth:
    added = [c.bytes.get("stored", 0) for c in ordered]
    last = added[1:][-RECENT:]
    return Growth(
        session,
        len(ordered),
        ordered[-1].created,
        sum(map(plain_bytes, ordered)),
        sum(added),
        round(sum(last) / len(last)) if last else 0,
        _per_day(ordered, added),
    )


def _per_day(ordered: list[CheckpointSummary], added: list[int]) -> int | None:
    """Return the growth in a day, from the last ten checkpoints or, if these are of less than a
    day, from as many as a day has. A shorter span says nothing of a day.
    """
    newest = moment(ordered[-1])
    for begin in range(max(len(ordered) - 1 - RECENT, 0), -1, -1):
        span = (newest - moment(ordered[begin])).total_seconds()
        if span >= _DAY:
            return round(sum(added[begin + 1 :]) / span * _DAY)
    return None
