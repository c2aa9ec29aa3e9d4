"""``criuctl show``."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..tables import Column, table
from ..text import (
    age,
    duration,
    facts,
    labels,
    plural,
    printable,
    process_tree,
    size,
)

Body = Mapping[str, Any]


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _name(body: Body) -> str:
    return (
        f"{printable(body['session'])}@{body['number']}" if body["id"] else printable(body["store"])
    )


def _origin(origin: Any) -> Iterator[tuple[str, str]]:
    """Return the store that it was imported from; that text comes from outside."""
    if isinstance(origin, Mapping):
        session, number, store = (
            printable(origin.get(name, "?")) for name in ("session", "number", "store")
        )
        yield "imported", f"it was {session}@{number} of store {store[:12]}"


def _gpu(gpu: Any) -> Iterator[tuple[str, str]]:
    if gpu:
        names = ", ".join(
            f"{printable(d['name'])} ({printable(d['uuid'])})" for d in gpu["devices"]
        )
        amount = size(sum(p["memory"] for p in gpu["processes"]))
        yield (
            "gpu",
            (
                f"{amount} of {plural(len(gpu['processes']), 'process', 'processes')} on "
                f"{names or 'a device'}"
            ),
        )
        yield "gpu driver", f"NVIDIA {printable(gpu['driver'])}"


def _writer(writer: dict[str, str] | None) -> Iterator[tuple[str, str]]:
    if writer is not None:
        label = f" {printable(writer['label'])}" if writer["label"] else ""
        yield "stored by", f"the write-only host{label} ({writer['fingerprint']})"


def _header(body: Body) -> str:
    machine, amounts, timings = body["machine"], body["bytes"], body["timings"]
    rows = [
        ("checkpoint", f"{_name(body)}{'  (pinned)' if body['pinned'] else ''}"),
        ("id", body["id"]),
        ("created", f"{printable(body['created'])} ({age(body['created'])})"),
        ("incarnation", str(body["incarnation"])),
        ("parent", body["parent"] or "none"),
        *_origin(body["origin"]),
        ("labels", labels(body["labels"]) or "none"),
        (
            "host",
            f"{printable(body['host'])}, Linux {printable(machine.get('kernel', '?'))}, "
            f"{printable(machine.get('arch', '?'))}",
        ),
        *_writer(body["writer"]),
        ("cpu", printable(machine.get("cpu_model", "?"))),
        (
            "dumped by",
            (
                f"criuctl {printable(body['criuctl'])}, CRIU "
                f"{printable(body['criu'].get('version', '?'))}"
            ),
        ),
        *_gpu(body.get("gpu")),
        (
            "memory",
            (
                f"{size(amounts.get('memory', 0))} in "
                f"{plural(len(body['memory']), 'address space')} and shared segments"
            ),
        ),
        ("files", f"{size(amounts.get('files', 0))} taken along"),
        (
            "stored",
            (
                f"{size(amounts.get('stored', 0))} for {size(amounts.get('new', 0))} that the "
                "store did not have"
            ),
        ),
        (
            "frozen",
            f"{duration(timings.get('frozen_ms'))} of {duration(timings.get('total_ms'))} in all",
        ),
    ]
    return facts(row for row in rows if row[0] in _OF_IMAGES or body["id"])


# the keys for CRIU's images outside any store
_OF_IMAGES = ("checkpoint", "created", "labels", "memory")


def _tree(body: Body) -> str:
    return process_tree(body["processes"])


def _namespaces(body: Body) -> str:
    return facts(
        (kind, f"{printable(n.get('mode', '?'))}  {printable(n.get('name') or '')}")
        for kind, n in body["namespaces"].items()
    )


def _connections(body: Body, *, all_: bool = True) -> str:
    from .connections import COLUMNS, rows

    shown = rows(c for c in body["connections"] if all_ or c["external"])
    return table(COLUMNS, shown) if shown else "none" if all_ else "none to outside the tree"


def _files(body: Body, *, all_: bool = True) -> str:
    columns = (
        Column("path", prose=True),
        Column("size", right=True, rank=3),
        Column("held by", rank=2, prose=True),
        Column("how", rank=4),
        Column("kept", rank=1),
    )
    rows = []
    for f in body["files"]:
        if all_ or f["carried"] or f["kind"] == "written":
            holders = ", ".join(f"{pid}:{fd}" for pid, fd in f["holders"])
            kept = "contents" if f["carried"] else "size and hash" if f["digest"] else "size"
            rows.append(
                (printable(f["path"]), size(f["size"]), holders, printable(f["kind"]), kept)
            )
    more = len(body["files"]) - len(rows)
    shown = table(columns, rows) if rows else "none that are written"
    if body["workspace"] is not None:
        shown += f"\n\n{_workspace(body['workspace'])}"
    return f"{shown}\nand {more} that are only read or mapped (see --files)" if more else shown


def _workspace(workspace: Mapping[str, Any]) -> str:
    """Return the workspace, and its files if they were read: mode, size and time of each."""
    amount = f"{plural(workspace['files'], 'file')}, {size(workspace['bytes'])}"
    lines = [f"workspace {printable(workspace['path'])}: {amount}"]
    columns = (
        Column("mode"),
        Column("size", right=True),
        Column("modified"),
        Column("path", prose=True),
    )
    rows = []
    for entry in workspace.get("entries", ()):
        then = datetime.fromtimestamp(entry["mtime_ns"] // 10**9, UTC)
        target = f" -> {printable(entry['target'])}" if entry["target"] else ""
        inner = os.path.relpath(entry["path"], workspace["path"])
        rows.append(
            (
                stat.filemode(entry["mode"]),
                size(entry["size"]) if stat.S_ISREG(entry["mode"]) else "",
                then.strftime("%Y-%m-%d %H:%M:%S"),
                f"{printable(inner)}{target}",
            )
        )
    return "\n".join([*lines, *([table(columns, rows)] if rows else [])])


def _maps(body: Body) -> str:
    columns = (
        Column("of"),
        Column("address", right=True),
        Column("size", right=True),
        Column("pages", prose=True),
    )
    rows = []
    for space in body["memory"]:
        whose = (
            f"PID {space['id']}"
            if space["kind"] == "task"
            else f"{printable(space['kind'])} {space['id']}"
        )
        rows += [
            (
                whose,
                f"{entry['address']:x}",
                size(entry["bytes"]),
                printable(" ".join(entry["flags"])),
            )
            for entry in space.get("maps", ())
        ]
    return table(columns, rows) if rows else "no memory"


def _predicates(body: Body) -> str:
    return facts(
        (f"{p['kind']}:{printable(p['argument'])}", f"{p['state']}  {printable(p['why'])}")
        for p in body["predicates"]
    )


def _env(body: Body) -> str:
    commands = {
        p["pid"]: " ".join(printable(word) for word in p["argv"] or [p["command"]])
        for p in body["processes"]
    }
    parts = []
    for one in body["environments"]:
        lines = [
            f"{printable(v['name'])}={'***' if v['value'] is None else printable(v['value'])}"
            for v in one["variables"]
        ]
        parts.append(
            "\n".join(
                [
                    f"{one['pid']} {commands[one['pid']]}",
                    *(f"  {line}" for line in lines or ["nothing"]),
                ]
            )
        )
    return "\n".join(parts) or "none"


def _terminals(body: Body) -> str:
    columns = (
        Column("terminal"),
        Column("size", rank=1),
        Column("held by", rank=2, prose=True),
        Column("leader", rank=4),
        Column("master", rank=5),
        Column("state", rank=3, prose=True),
    )
    rows = []
    for t in body["terminals"]:
        words = [
            "line by line" if t["canonical"] else "raw",
            "echo" if t["echo"] else "no echo",
            "stopped" if t["stopped"] else "",
        ]
        typed = size(t["input"]["size"]) if t["input"] is not None else ""
        words.append(f"{typed} typed and not read" if typed else "")
        holders = ", ".join(f"{pid}:{fd}" for pid, fd in t["holders"])
        leader = str(t["leader"] or ("outside" if t["led_outside"] else "none"))
        room = f"{t['columns']}x{t['rows']}"
        rows.append(
            (
                printable(t["path"] or "?"),
                room,
                holders,
                leader,
                printable(t["master"]),
                ", ".join(filter(None, words)),
            )
        )
    return table(columns, rows) if rows else "none"


_SECTIONS: Mapping[str, Callable[[Body], str]] = {
    "tree": _tree,
    "files": _files,
    "connections": _connections,
    "maps": _maps,
    "env": _env,
    "terminals": _terminals,
}


def _everything(body: Body) -> str:
    parts = [_header(body), "processes\n" + _indent(_tree(body))]
    if body["namespaces"]:
        parts.append("namespaces\n" + _indent(_namespaces(body)))
    parts.append("connections\n" + _indent(_connections(body, all_=False)))
    parts.append("files\n" + _indent(_files(body, all_=False)))
    if body["predicates"]:
        parts.append("requires\n" + _indent(_predicates(body)))
    if body["warnings"]:
        parts.append("warnings\n" + "\n".join(f"  {printable(w)}" for w in body["warnings"]))
    return "\n\n".join(parts)


def _only(body: Body, sections: Sequence[str]) -> str:
    if not sections:
        return _everything(body)
    if len(sections) == 1:
        return _SECTIONS[sections[0]](body)
    return "\n\n".join(f"{name}\n{_indent(_SECTIONS[name](body))}" for name in sections)


@page(
    examples=[
        ("All about the newest checkpoint of web:", "criuctl show web"),
        ("Its processes only, of the third checkpoint:", "criuctl show web@3 --tree"),
        (
            "Was it started with a proxy, and which?",
            "criuctl show web --env --values | grep -i proxy",
        ),
        ("The contents of an exported file, or a podman archive:", "criuctl show ./web.criuctl"),
        ("For a script:", "criuctl show web --json | jq .processes[].argv"),
    ],
    exits=[3, 7, 8],
    see_also=["list", "restore", "verify"],
)
@click.argument(
    "ref",
    shell_complete=complete.checkpoint_ref,
    help="NAME, NAME@N, the begin of a checkpoint's id, or, with a slash in it, a file or folder.",
)
@click.option("--tree", is_flag=True, help="Show the process tree only.")
@click.option(
    "--files",
    is_flag=True,
    help="Show all files only: those the tree has open or mapped, those taken along, and those of "
    "the workspace (snapshot --with-workspace).",
)
@click.option(
    "--connections", is_flag=True, help="Show all connections only, those inside the tree too."
)
@click.option("--maps", is_flag=True, help="Show which memory is stored, address by address.")
@click.option(
    "--env",
    is_flag=True,
    help="Show the variables that each process was started with, without their values.",
)
@click.option(
    "--values",
    is_flag=True,
    help="With --env: their values, too. There may be passwords among them.",
)
@click.option(
    "--terminals",
    is_flag=True,
    help="Show the terminals only: holders, modes, unread input.",
)
@pass_app
def show(app: App, /, ref: str, **only: bool) -> int:
    """Show the contents of a checkpoint: where and when it was taken, its processes, sizes,
    namespaces, connections and files. Only the manifest is read, and the memory only for --env;
    `criuctl verify` reads all.

    A REF with a slash is a path outside any store: a file of criuctl export (its key is found as by
    import), a folder of CRIU's images, or a podman checkpoint archive. criuctl shows what the
    images of the latter two contain; it cannot restore them.

    With --json everything is printed, whatever sections are requested; it has memory maps with
    --maps, and environments (`environments`: `pid`, `variables` with `name` and `value`) with
    --env, where a value is null unless --values is given. The environment of a process is read from
    its memory: as it was started, not what it has set since.
    """
    from ...ops.inspect import show as show_checkpoint

    sections = [name for name in _SECTIONS if only[name]]
    if only["values"] and not only["env"]:
        raise click.UsageError("--values goes with --env")
    body = show_checkpoint(
        app.config,
        ref,
        maps=only["maps"],
        env=only["env"],
        values=only["values"],
        files=only["files"],
    ).to_dict()
    app.emit(body, lambda: _only(body, sections), brief=lambda: str(body["id"]))
    return 0
