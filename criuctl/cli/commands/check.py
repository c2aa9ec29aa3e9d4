"""``criuctl check``: every obstacle to a dump, found before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ...errors import CriuctlError, NotFound, PlatformError, PreflightRefused
from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..text import plural, printable

if TYPE_CHECKING:
    from ...proc.tree import Process

EXIT_REFUSED = 4
LEVELS = ("error", "warning", "info")


def findings_lines(findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return findings as lines: each kind once, as ``error PID 12 fd 3: what``, and its remedy on
    the next line.
    """
    from ...report import Finding, summarised

    shown = summarised(
        Finding(**{key: f[key] for key in Finding.__struct_fields__ if key in f}) for f in findings
    )
    return [line for finding in shown for line in _lines(finding.to_dict())]


def _lines(finding: Mapping[str, Any]) -> list[str]:
    where = "" if finding.get("pid") is None else f"PID {finding['pid']}"
    if finding.get("fd") is not None:
        where += f" fd {finding['fd']}"
    lines = [f"{finding['level']:<7}  {where + ': ' if where else ''}{printable(finding['text'])}"]
    if finding.get("hint"):
        lines.append(f"{'':<9}{printable(finding['hint'])}")
    return lines


@page(
    examples=[
        ("Can process 4711 and its descendants be dumped?", "criuctl check 4711"),
        ("The same for a script:", "criuctl check 4711 --json | jq -r '.findings[].text'"),
        ("Could it also be stored there?", "criuctl check 4711 --store s3://bucket/prefix"),
    ],
    exits=[3, 4, 7, 13],
    see_also=["dump", "doctor"],
)
@click.argument(
    "target",
    shell_complete=complete.target,
    help="A PID, a session's name, unit:NAME or cgroup:PATH.",
)
@pass_app
def check(app: App, target: str) -> int:
    """Check the process tree under TARGET (its descriptors, mappings, namespaces and sockets) and
    this host's kernel, and report everything that would prevent a dump, the configuration's
    connection_rules included. Each finding names the process, the descriptor and a remedy; findings
    with one cause are one line with a count (under --json each is a separate object). For programs
    that criuctl knows, the remedy is the program's own option. Nothing is stopped or changed. With
    --store that store is checked, too: whether it exists, can be written and its key opens it;
    `criuctl doctor` checks the configured one. `criuctl help limits` lists what cannot be
    checkpointed at all.

    \b
    error    a dump would be refused or fail
    warning  a dump works, but something will not come back as it was
    info     worth knowing; shown under -v and with --json

    Exit with 0 when a dump would be tried, with 4 when there is any error.
    """
    from ...dump.connection_report import check_connections
    from ...dump.preflight import check_tree
    from ...host.registry import Registry
    from ...host.target import is_pid, resolve_target
    from ...ops.doctor import store_readiness
    from ...proc.tree import read_tree
    from ...report import Finding

    registry = Registry(app.config)
    tree: list[Process] = []
    try:
        resolved = resolve_target(target, registry.lookup, registry.session_of)
    except PreflightRefused as error:  # the other parts need not be checked
        pid = int(target) if is_pid(target) else None
        findings = [
            Finding(
                "error", error.code, error.message.removeprefix(f"PID {pid}: "), error.hint, pid=pid
            )
        ]
    else:
        with suppress(CriuctlError):  # the check reports it
            tree = read_tree(resolved.root.pid)
        findings = check_tree(resolved, app.config)
        # these are findings already
        with app.reporting() as reporter, suppress(NotFound, PlatformError):
            findings += check_connections(app.config, resolved, reporter=reporter)
    if app.store is not None:
        findings += store_readiness(app.config)
    found = [f.to_dict() for f in sorted(findings, key=lambda f: LEVELS.index(f.level))]
    errors = sum(f["level"] == "error" for f in found)
    warnings = sum(f["level"] == "warning" for f in found)

    def human() -> str:
        lines = findings_lines(f for f in found if f["level"] != "info" or app.verbose)
        verdict = "cannot be dumped" if errors else "can be dumped"
        counts = f"{plural(errors, 'error')}, {plural(warnings, 'warning')}"
        what = target
        if tree:
            what += f" ({tree[0].command}, {plural(len(tree), 'process', 'processes')})"
        return "\n".join([*lines, f"{printable(what)} {verdict}: {counts}"])

    app.emit({"ok": not errors, "findings": found}, human, brief=lambda: "")
    return EXIT_REFUSED if errors else 0
