"""What a comparison of two checkpoints says, bounded and marked as data."""

from __future__ import annotations

from typing import Any

from ..quoting import quoted
from . import bounds
from .bounds import DATA

_PARTS = ("processes", "descriptors", "connections", "files")
_MOST = 40  # entries of each kind


def bounded(body: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the JSON of ``criuctl diff``: all counts, and as much of the entries as fits."""
    sides = ("session", "id", "number", "incarnation", "created")
    answer: dict[str, Any] = {
        side: {key: body[side].get(key) for key in sides} for side in ("before", "after")
    }
    answer["same"] = body["same"]
    memory = ("before", "after", "changed", "added", "removed", "exact")
    answer["memory"] = {key: body["memory"][key] for key in memory}
    data: dict[str, Any] = {"about": _plain(body["about"][:_MOST])}
    room, missing = limit, 0
    for part in _PARTS:
        found = body[part]
        kinds = ("added", "removed", "changed")
        answer[part] = {kind: len(found[kind]) for kind in kinds} | {"same": found["same"]}
        shown: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for kind in kinds:
            for entry in found[kind]:
                plain = _plain(entry)
                room -= len(str(plain))
                if room < 0 or len(shown[kind]) >= _MOST:
                    missing += 1
                else:
                    shown[kind].append(plain)
        data[part] = shown
    if missing:
        before, after = (body[side]["id"] for side in ("before", "after"))
        how = f"criuctl diff {quoted(before)} {quoted(after)} --json prints all"
        answer["left_out"] = {"entries": missing, "how_to_read_it": how}
    return answer | {DATA: data}


def _plain(value: Any) -> Any:
    """Return a JSON value whose texts are short and harmless."""
    if isinstance(value, dict):
        return {bounds.short(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value[:_MOST]]
    return bounds.short(value) if isinstance(value, str) else value
