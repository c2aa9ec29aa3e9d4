"""A session as a recording that asciinema plays: asciicast version 3, one JSON value a line.

It is made from the output log and the times in `timeline`, so nothing has to be recorded
beforehand, and all output that is kept can be played.  Markers show where the session was
checkpointed and where it was restored; the time in between is shown as `GAP` seconds, however long
it was.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any

GAP = 2.0  # longest pause that a checkpoint leaves in the recording
_MARKED = {
    "checkpoint": "checkpoint",
    "checkpointed": "checkpointed",
    "restored": "restored",
    "paused": "paused",
    "halted": "halted",
}

Record = tuple[float, int, str, dict[str, Any]]


def cast(
    status: dict[str, Any],
    data: bytes,
    base: int,
    records: Sequence[Record],
    *,
    size: tuple[int, int] | None = None,
) -> Iterator[str]:
    """Yield the lines of the recording of `data`, which begins at offset `base`.

    `size` is (columns, rows) at its beginning.
    """
    end = base + len(data)
    begun = next(
        (when for when, offset, event, _ in reversed(records) if not event and offset <= base), None
    )
    if begun is None:
        begun = records[0][0] if records else float(status.get("created") or 0)
    columns, rows = size or _first_size(status, records)
    yield json.dumps(_header(status, begun, columns, rows))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    now, position, dark = begun, base, False
    pieces = [record for record in records if base <= record[1] <= end]
    for (when, offset, event, facts), following in zip(
        pieces, _next_offsets(pieces, end), strict=True
    ):
        interval = max(0.0, when - now)
        if dark:
            interval = min(interval, GAP)
        now = max(now, when)
        if event:
            if offset > position:  # what came just before it
                yield _line(interval, "o", decoder.decode(data[position - base : offset - base]))
                position, interval = offset, 0.0
            yield from _event(interval, event, facts)
            dark = event == "checkpointed" or (dark and event != "restored")
            continue
        stop = min(max(following, offset), end)
        if stop > position:
            yield _line(interval, "o", decoder.decode(data[position - base : stop - base]))
            position = stop
        dark = False
    if position < end:
        yield _line(0.0, "o", decoder.decode(data[position - base :]))
    if status.get("exit_code") is not None and not any(
        event == "exit" for _, _, event, _ in pieces
    ):
        yield _line(0.0, "x", str(status["exit_code"]))


def _header(status: dict[str, Any], begun: float, columns: int, rows: int) -> dict[str, Any]:
    """Return the first line of a recording."""
    term = {"cols": columns, "rows": rows, "type": "xterm-256color"}
    header: dict[str, Any] = {"version": 3, "term": term, "timestamp": int(begun)}
    if status.get("command"):
        header["command"] = " ".join(status["command"])
    return header | {"title": status["session"]}


def _next_offsets(pieces: Sequence[Record], end: int) -> list[int]:
    """Return for each record where the output of the next one begins."""
    found, following = [], end
    for _, offset, event, _ in reversed(pieces):
        found.append(following)
        if not event:
            following = offset
    return found[::-1]


def _event(interval: float, event: str, facts: dict[str, Any]) -> Iterator[str]:
    if event == "resize":
        yield _line(interval, "r", f"{facts.get('cols')}x{facts.get('rows')}")
    elif event == "exit" and facts.get("exit_code") is not None:
        yield _line(interval, "x", str(facts.get("exit_code")))
    elif event in _MARKED:
        text = _MARKED[event]
        if event == "restored":
            text += f", from {facts['host']}" if facts.get("host") else ""
        elif facts.get("checkpoint"):
            text += f" {str(facts['checkpoint'])[:12]}"
        yield _line(interval, "m", text)


def _line(interval: float, code: str, text: str) -> str:
    return json.dumps([round(interval, 3), code, text], ensure_ascii=False)


def _first_size(status: dict[str, Any], records: Sequence[Record]) -> tuple[int, int]:
    """Return the size at the beginning: it was not recorded, so that of the first change."""
    for _, _, event, facts in records:
        if event == "resize" and facts.get("cols") and facts.get("rows"):
            return int(facts["cols"]), int(facts["rows"])
    return int(status.get("cols") or 80), int(status.get("rows") or 24)
