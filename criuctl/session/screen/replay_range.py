"""How much of a session's log has to be replayed to know its screen; small enough for a holder."""

from __future__ import annotations

REPLAY = 512 << 10  # bytes of the log that a redraw looks at
_REPLAY_MAX = 2 << 20  # ... or more, if a full-screen program began that long ago


def beginning(base: int, end: int, since: int | None) -> int:
    """Return the offset from which the log has to be replayed to know the screen at `end`.

    `base` is the oldest offset in the log, `since` where a full-screen program that still runs
    began.
    """
    start = max(base, end - REPLAY)
    if since is not None and base <= since < start:
        start = since if end - since <= _REPLAY_MAX else max(base, end - _REPLAY_MAX)
    return start
