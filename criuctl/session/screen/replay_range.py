"""How much of a session's log has to be replayed to know its screen; small enough for a holder."""

from __future__ import annotations

import re

REPLAY = 512 << 10  # bytes of the log that a redraw looks at
REPLAY_MAX = 2 << 20  # ... or more, if a full-screen program began that long ago
_BEFORE = 64 << 10  # bytes before a full-screen program, for what is on the main screen
_PLACE = re.compile(rb"\x1b\[[0-9;]*[Hf]")


def first_whole(data: bytes, *, full_screen: bool) -> int:
    """Return where to begin in output that begins anywhere, perhaps in the middle of a sequence.

    That is where a full-screen program goes to a place, or else the first whole line or sequence.
    """
    if full_screen and (match := _PLACE.search(data)) is not None:
        return match.start()
    if data.startswith(b"\x1b"):
        return 0
    places = (data.find(b"\n") + 1, data.find(b"\x1b"))
    return min((place for place in places if place > 0), default=0)


def before(base: int, since: int) -> int:
    """Return the offset from which the main screen is known behind a program that began `since`."""
    return max(base, since - _BEFORE)


def beginning(base: int, end: int, since: int | None, cleared: int | None = None) -> int:
    """Return the offset from which the log has to be replayed to know the screen at `end`.

    `base` is the oldest offset in the log, `since` where a full-screen program that still runs
    began, `cleared` where the screen was last cleared.
    """
    start, oldest = max(base, end - REPLAY), max(base, end - REPLAY_MAX)
    if since is None or since >= start:
        return start
    if since >= oldest:
        return before(base, since)
    return cleared if cleared is not None and oldest <= cleared <= start else oldest
