"""``criuctl log``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..streams import write_bytes
from ..tables import Column, table
from ..text import printable

_COLUMNS = (
    Column("sequence", right=True, rank=3),
    Column("time", rank=1),
    Column("who", rank=2, prose=True),
    Column("what"),
    Column("facts", prose=True),
)
_HEAD = frozenset(("sequence", "time", "incarnation", "operator", "kind", "name", "pid", "what"))


def _row(entry: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    from ...report import utc_text

    who = (
        f"{entry.get('name', '')} ({entry.get('kind', '')}, {entry.get('operator', '')})"
        if entry.get("operator")
        else ""
    )
    facts = " ".join(f"{key}={value!r}" for key, value in entry.items() if key not in _HEAD)
    return (
        str(entry["sequence"]),
        utc_text(entry["time"]) or "",
        printable(who),
        printable(entry["what"]),
        printable(facts),
    )


@page(
    examples=[
        ("The actions of all clients:", "criuctl log work"),
        (
            "The input of an agent, for a program:",
            """criuctl log agent --json | jq '.[] | select(.what == "input")'""",
        ),
        (
            "A recording, to be played by asciinema:",
            "criuctl log build --export cast > build.cast\nasciinema play build.cast",
        ),
    ],
    exits=[3, 9, 10],
    see_also=["capture", "status"],
)
@name_argument
@click.option(
    "--since",
    type=click.IntRange(min=0),
    default=0,
    metavar="SEQUENCE",
    show_default=True,
    help="Only entries after this one.",
)
@click.option(
    "--export",
    type=click.Choice(["cast"]),
    help="Print the session's output as a recording instead: cast is asciicast version 3, for "
    "asciinema.  [default: the audit log]",
)
@pass_app
def log(app: App, name: str, since: int, export: str | None) -> int:
    """Print the audit log of a session: clients that came and went, typed, sent signals, resized,
    took the write lease, made checkpoints. Text that is typed while the terminal does not echo
    (passwords, but also line editors and full-screen programs, which echo by themselves) is not
    recorded, only its length and where its effect is in the output.

    --export cast prints all that is kept of the output, with its times, the sizes of the window,
    and markers where the session was checkpointed and restored; with --json its lines are the
    elements of an array. Both work for sessions that have ended, while this host keeps their
    output.
    """
    from ...ops.logs import audit, recording

    if export:
        lines = recording(app.config, name)
        if app.json:
            app.emit([json.loads(line) for line in lines], lambda: "")
            return 0
        for line in lines:
            # a checkpoint may claim any name for the host that it comes from
            write_bytes(line.encode(errors="replace") + b"\n")
        return 0
    entries = audit(app.config, name, since)
    app.emit(entries, lambda: table(_COLUMNS, map(_row, entries)) if entries else "")
    return 0
