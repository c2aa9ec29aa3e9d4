"""``criuctl diff``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import click

from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..tables import Column, table
from ..text import duration, plural, printable, size

Body = Mapping[str, Any]

_MEMORY = (
    Column("of"),
    Column("region", prose=True),
    Column("address", right=True, rank=5),
    Column("before", right=True, rank=4),
    Column("after", right=True, rank=3),
    Column("changed", right=True),
    Column("new", right=True, rank=1),
    Column("gone", right=True, rank=2),
)


def _name(side: Body) -> str:
    return f"{printable(side['session'])}@{side['number']}"


def _between(before: Body, after: Body) -> str:
    try:
        seconds = (
            datetime.fromisoformat(after["created"]) - datetime.fromisoformat(before["created"])
        ).total_seconds()
    except (TypeError, ValueError):
        return ""
    return f"{duration(abs(seconds) * 1000)} {'later' if seconds >= 0 else 'earlier'}"


def _header(body: Body) -> str:
    before, after = body["before"], body["after"]
    facts = ["the same checkpoint" if before["id"] == after["id"] else _between(before, after)]
    if before["incarnation"] != after["incarnation"]:
        facts.append(f"incarnation {before['incarnation']} -> {after['incarnation']}")
    if before["session_id"] != after["session_id"]:
        facts.append("another session")
    lines = [f"{_name(before)} -> {_name(after)}: {', '.join(fact for fact in facts if fact)}"]
    lines += [
        f"  {row['what']}: {_value(row['before'])} -> {_value(row['after'])}"
        for row in body["about"]
    ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(printable(word) for word in value)
    if isinstance(value, Mapping):
        return " ".join(f"{printable(k)}={printable(v)}" for k, v in value.items() if v is not None)
    return "none" if value is None or value == "" else printable(value)


def _process(p: Body) -> str:
    words = p["argv"] or [p["command"]]
    return f"{p['ns_pid']} {' '.join(printable(word) for word in words)}"


def _descriptor(d: Body) -> str:
    at = "" if d["offset"] is None else f" at {d['offset']}"
    return f"{d['pid']}:{d['fd']} {d['kind']} {printable(d['what'])} {d['mode']}".rstrip() + at


def _connection(c: Body) -> str:
    way = (
        f"{printable(c['local'])} -> {printable(c['peer'])}" if c["peer"] else printable(c["local"])
    )
    return (
        f"{c['pid']}:{c['fd']} {printable(c['protocol'] or 'unix')} {way} {printable(c['state'])}"
    )


def _file(f: Body) -> str:
    return f"{printable(f['path'])} ({printable(f['kind'])}, {size(f['size'])})"


_PARTS: Mapping[str, Callable[[Body], str]] = {
    "processes": _process,
    "descriptors": _descriptor,
    "connections": _connection,
    "files": _file,
}


def _changes(change: Body) -> str:
    changes = []
    for name in change["fields"]:
        if name == "contents":
            count = change.get("changed_bytes")
            what = "may differ" if change["contents"] == "unknown" else "changed"
            changes.append(
                f"contents {what}" if count is None else f"contents {what} ({size(count)})"
            )
        elif name == "mtime_ns":
            changes.append("touched")
        elif name == "mode" and isinstance(change["before"][name], int):
            changes.append(
                f"mode {change['before'][name] & 0o7777:o} -> {change['after'][name] & 0o7777:o}"
            )
        else:
            changes.append(
                f"{name} {_value(change['before'][name])} -> {_value(change['after'][name])}"
            )
    return ", ".join(changes)


def _part(title: str, part: Body, what: Callable[[Body], str]) -> str:
    counts = [f"{len(part[kind])} {kind}" for kind in ("added", "removed", "changed") if part[kind]]
    lines = [
        ", ".join(
            (
                f"{title}: {counts[0]}" if counts else f"{title}: none changed",
                *counts[1:],
                f"{part['same']} the same",
            )
        )
    ]
    lines += [f"  + {what(one)}" for one in part["added"]]
    lines += [f"  - {what(one)}" for one in part["removed"]]
    lines += [f"  ~ {what(change['after'])}: {_changes(change)}" for change in part["changed"]]
    return "\n".join(lines)


def _memory_rows(memory: Body) -> Iterable[tuple[str, ...]]:
    for space in memory["spaces"]:
        number = space["after_id"] if space["after_id"] is not None else space["before_id"]
        whose = (
            f"PID {number}" if space["kind"] == "task" else f"{printable(space['kind'])} {number}"
        )
        if None in (space["before_id"], space["after_id"]):
            yield (whose, "all of it", "", *_amounts(space))
            continue
        for region in space["regions"]:
            yield (whose, printable(region["name"]), f"{region['start']:x}", *_amounts(region))


def _amounts(of: Body) -> list[str]:
    return [
        size(of[name]) if of[name] else ""
        for name in ("before", "after", "changed", "added", "removed")
    ]


def _memory(memory: Body) -> str:
    amounts = [
        f"{size(memory[name])} {word}"
        for name, word in (("changed", "changed"), ("added", "new"), ("removed", "gone"))
    ]
    unit = "pages" if memory["exact"] else "windows of 256 KiB"
    head = (
        f"memory: {size(memory['before'])} -> {size(memory['after'])}; {', '.join(amounts)}, by "
        f"{unit}"
    )
    rows = list(_memory_rows(memory))
    return f"{head}\n{table(_MEMORY, rows, indent='  ')}" if rows else head


def _for_people(body: Body) -> str:
    if body["same"]:
        count = plural(body["processes"]["same"], "process", "processes")
        return f"{_header(body)}\nno difference: {count}, {size(body['memory']['after'])} of memory"
    parts = [_part(title, body[title], what) for title, what in _PARTS.items()]
    return "\n".join([_header(body), *parts, _memory(body["memory"])])


@page(
    examples=[
        ("Show the changes between the last two snapshots:", "criuctl diff web@-2 web"),
        ("How many pages exactly?", "criuctl diff web@1 web@2 --exact"),
        (
            "Check in a script whether nothing has changed:",
            "criuctl diff web@1 web@2 --json | jq -e .same",
        ),
        (
            "The files that changed:",
            "criuctl diff web@1 web --json | jq -r '.files.changed[].after.path'",
        ),
    ],
    exits=[3, 7, 8],
    see_also=["show", "list", "restore"],
)
@click.argument(
    "before",
    metavar="REF",
    shell_complete=complete.checkpoint_ref,
    help="NAME, NAME@N, or the begin of an id.",
)
@click.argument(
    "after",
    metavar="REF",
    shell_complete=complete.checkpoint_ref,
    help="The same; this checkpoint is compared with the first.",
)
@click.option(
    "--exact",
    is_flag=True,
    help=(
        "Read the memory where it differs and count pages; without it every window that differs "
        "counts."
    ),
)
@pass_app
def diff(app: App, before: str, after: str, exact: bool) -> int:
    """Show the differences between two checkpoints, of one session or of two: processes,
    descriptors and their offsets, connections, files, and memory by region. Nothing is restored,
    and memory is compared by the names of its chunks without being read. Exit with 0 whether they
    differ or not.

    Processes are paired by PID and command line, then by their place in the tree; PIDs are those
    that the tree itself sees. Numbers that every restore changes (inodes, start times) do not count
    as differences. Descriptors are compared for processes that both checkpoints have.

    \b
    In the JSON:
    before, after  session, session_id, id, number, incarnation, created,
                   labels
    same           whether there is no difference but in `about`
    about          [{what, before, after}]: host, kernel, versions, ...
    processes, descriptors, connections, files
                   each {added: [], removed: [], changed: [{before, after,
                   fields}], same: N}; of a changed file also contents
                   (same, changed, unknown) and changed_bytes
    memory         before, after, changed, added, removed (bytes), exact,
                   spaces: [{kind, before_id, after_id, the same sums,
                   regions: [{start, end, name, the same sums}]}]
    """
    from ...ops.diff import diff as compare

    with app.reporting() as reporter:
        body = compare(app.config, before, after, exact=exact, reporter=reporter).to_dict()
    app.emit(
        body,
        lambda: _for_people(body),
        brief=lambda: "" if body["same"] else f"{_name(body['before'])} {_name(body['after'])}",
    )
    return 0
