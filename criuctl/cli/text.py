"""Words and numbers for people: sizes, ages and trees as text; tables are in `tables`.

Text from a checkpoint or a process (commands, paths, labels) may hold control characters, and a
store may hold checkpoints of other people. `printable` escapes all of it before a terminal gets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..quoting import harmless, printable

__all__ = [
    "age",
    "duration",
    "facts",
    "harmless",
    "labels",
    "plural",
    "printable",
    "process_tree",
    "size",
    "span",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(number: int | float) -> str:
    """Return bytes in the largest unit that leaves at least one digit before the point: ``1.5
    MiB``.
    """
    value = float(number)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{int(value)} B"
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.1f} {unit}"


def duration(milliseconds: float | None) -> str:
    """Return a span of time with two or three significant digits: ``87 ms``, ``1.42 s``, ``3 min 5
    s``.
    """
    if milliseconds is None:
        return "-"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def age(created: str, now: datetime | None = None) -> str:
    """Return the age of the RFC 3339 time `created`; the text itself if it is not such a time."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return printable(created)
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = int(((now or datetime.now(UTC)) - then).total_seconds())
    return "in the future" if seconds < 0 else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """Return a number of seconds in the largest unit that gives at least two."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return number and noun: ``1 process``, ``2 processes``."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def labels(values: Mapping[str, str]) -> str:
    """Return labels as ``a=1 b=2``, sorted."""
    return " ".join(f"{printable(k)}={printable(v)}" for k, v in sorted(values.items()))


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return ``name value`` lines with aligned values."""
    pairs = [(printable(name), printable(value)) for name, value in rows]
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def process_tree(processes: Sequence[Mapping[str, Any]]) -> str:
    """Draw the processes like ``pstree -p -a``: children indented under their parents.

    Processes without a parent in the list are roots. Records come from a manifest, so a loop of
    parents must not hang the drawing: a process that no root reaches is drawn as a root.
    """
    by_pid = {p["pid"]: p for p in processes}
    children: dict[int, list[Mapping[str, Any]]] = {}
    roots = []
    for p in processes:
        if p.get("ppid") in by_pid and p.get("ppid") != p["pid"]:
            children.setdefault(p["ppid"], []).append(p)
        else:
            roots.append(p)
    lines: list[str] = []
    drawn: set[int] = set()

    def describe(p: Mapping[str, Any]) -> str:
        words = p.get("argv") or [p.get("command", "?")]
        line = f"{p['pid']} {' '.join(printable(w) for w in words)}"
        threads = p.get("threads", 1)
        count = len(threads) if isinstance(threads, list) else threads
        return f"{line}  [{count} threads]" if isinstance(count, int) and count > 1 else line

    def draw(root: Mapping[str, Any]) -> None:
        # A stack instead of recursion: a chain of a thousand processes is a valid tree.
        stack: list[tuple[Mapping[str, Any], str, str]] = [(root, "", "")]
        while stack:
            p, lead, below = stack.pop()
            if p["pid"] in drawn:
                continue
            drawn.add(p["pid"])
            lines.append(lead + describe(p))
            kids = children.get(p["pid"], [])
            for i, kid in reversed(list(enumerate(kids))):
                last = i == len(kids) - 1
                stack.append(
                    (kid, below + ("`- " if last else "|- "), below + ("   " if last else "|  "))
                )

    for root in roots:
        draw(root)
    for p in processes:
        if p["pid"] not in drawn:
            draw(p)
    return "\n".join(lines)
