"""Old output without the queries in it.

A program asks its terminal things, where the cursor is for example, and reads the answer.  Each
query is answered once, when it is printed (`holder.terminal_queries`).  A client that attaches
later and is shown that output again must not show the queries to its terminal: a second answer
would be typed text.
"""

from __future__ import annotations

import re

_QUERY = re.compile(rb"\x1b\[(?:\??6n|5n|>?0?c)")
_BEGINNING = re.compile(rb"\x1b(?:\[(?:\??6?|5|>?0?))?\Z")


class OldOutput:
    """Takes the queries out of output below offset `end`; what comes later passes as it is."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._held = b""  # what may be the beginning of a query

    def feed(self, offset: int, data: bytes) -> bytes:
        """Return what to show of `data`, which begins at `offset`."""
        count = self._end - offset
        if count <= 0 and not self._held:
            return data
        old = _QUERY.sub(b"", self._held + data[: max(0, count)])
        self._held = b""
        if count > len(data) and (cut := _BEGINNING.search(old)) is not None:
            old, self._held = old[: cut.start()], old[cut.start() :]
        return old + data[max(0, count) :]
