"""Waiting for a text in the output of a session.

The text is the output without control sequences (``Build \\x1b[32mOK`` is found as ``Build OK``),
with a line end for each carriage return, because a progress bar or a line editor begins its line
again with it.  The echo of what was typed is one character, `ECHO`, which no pattern for a
program's answer matches by accident.  The holder knows where echoes are (`holder.echoes`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ...errors import SessionGone, TimedOut, WrongState
from ..screen.plain_text import strip
from .wire import Output

ECHO = "\ufffc"  # OBJECT REPLACEMENT CHARACTER
_WINDOW = 64 << 10  # bytes of earlier output in which a match may begin


class Reader(Protocol):
    """What is asked of a session; `session.Session` is one."""

    def status(self) -> dict[str, Any]: ...
    def read(self, start: int | str = "start", end: int | None = None) -> Output: ...
    def wait_output(self, offset: int, timeout: float | None = None) -> int: ...


class Matched(Protocol):
    """What a search has found; `re.Match` is one."""

    def __getitem__(self, group: int, /) -> Any: ...
    def groups(self) -> tuple[Any, ...]: ...


M = TypeVar("M", bound=Matched)
Find = Callable[[str], M | None]
"""Looks for a pattern in a text."""


class Search(Generic[M]):
    """Looks for a pattern in output that comes piece by piece."""

    def __init__(self, find: Find[M]) -> None:
        self._find = find
        self._data, self._start = bytearray(), 0  # the newest output, and its offset

    def add(self, offset: int, data: bytes, echoes: Iterable[Sequence[int]] = ()) -> M | None:
        """Add output at `offset`; return the match, if there is one now."""
        if offset != self._start + len(self._data):
            self._data, self._start = bytearray(), offset
        self._data += data
        shown = strip(_without(bytes(self._data), self._start, echoes))[0]
        match = self._find(shown.decode(errors="replace").replace("\r", "\n"))
        if match is None and len(self._data) > _WINDOW:
            # At the beginning of a line: a cut in a control sequence would leave its rest as text.
            cut = self._data.rfind(b"\n", 0, len(self._data) - _WINDOW) + 1
            cut = cut or len(self._data) - _WINDOW
            del self._data[:cut]
            self._start += cut
        return match


def compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern; that of a text has ``^`` and ``$`` at each line."""
    return re.compile(pattern, re.MULTILINE) if isinstance(pattern, str) else pattern


def wait_for(
    session: Reader, pattern: str, find: Find[M], since: int | str, timeout: float | None
) -> tuple[M, int]:
    """Wait until `find` finds something, which is called `pattern`, in the output from `since` on;
    return that, and the offset behind the output in which it was found.

    `since` is an offset, "start", "now", or "input": the end of the output when any operator typed
    last.  `TimedOut`; `SessionGone` if the session ends first.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    search = Search(find)
    if since in ("now", "input"):
        since = int(session.status()["offset" if since == "now" else "input_offset"])
    while True:
        piece = session.read(since)
        since = piece.end
        # Asked for afterwards: all echoes in this piece are known by now.
        status = session.status()
        if match := search.add(piece.offset, piece.data, status.get("echoes", ())):
            return match, since
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            session.wait_output(since, left)
        except TimedOut as error:
            raise TimedOut(f"{pattern!r} did not come in {timeout:g} s") from error
        except WrongState as error:
            status = session.status()
            if int(status["offset"]) <= since:
                raise SessionGone(
                    f"session {status['session']!r} ended before {pattern!r} came"
                ) from error


def _without(data: bytes, start: int, echoes: Iterable[Sequence[int]]) -> bytes:
    """Return `data`, whose first byte has the offset `start`, with `ECHO` for each echo."""
    pieces, at = list[bytes](), start
    for begin, end in sorted((int(one[0]), int(one[1])) for one in echoes):
        begin, end = max(begin, at), min(end, start + len(data))
        if begin < end:
            pieces += [data[at - start : begin - start], ECHO.encode()]
            at = end
    return b"".join([*pieces, data[at - start :]])
