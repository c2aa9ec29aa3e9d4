"""The facts that the hooks of a dump, a restore and a snapshot get; the phases are in
`criuctl.hooks.contract`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.manifest import Manifest
from ..config import Config
from ..errors import CriuctlError
from ..hooks import Hooks
from ..hooks.runner import error_body
from ..proc.tree import read_process
from ..report import Reporter
from .registry import SessionRecord
from .target import is_pid


def of_dump(
    config: Config,
    reporter: Reporter,
    session: SessionRecord,
    pid: int,
    *,
    labels: Mapping[str, str],
    leave_running: bool,
) -> Hooks:
    """Return the hooks of a dump of the tree under `pid`."""
    facts = {
        "session": session.name,
        "incarnation": session.incarnation,
        "checkpoint": None,
        "pid": pid,
        "inner_pid": read_process(pid).ns_pid,
        "store": config.store,
        "labels": dict(labels),
        "leave_running": leave_running,
    }
    return Hooks(config, reporter, facts)


def of_restore(config: Config, reporter: Reporter, manifest: Manifest, name: str) -> Hooks:
    """Return the hooks of a restore of `manifest` as session `name`.

    They get what hooks of their name recorded at the dump.
    """
    facts = {
        "session": name,
        "incarnation": None,
        "checkpoint": manifest.id,
        "pid": None,
        "inner_pid": manifest.root.ns_pid if manifest.root is not None else None,
        "store": config.store,
        "labels": dict(manifest.labels),
        "leave_running": None,
        "recorded": [dict(result) for result in manifest.hooks],
    }
    return Hooks(config, reporter, facts)


def about_connections(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the connections of a checkpoint in the form for hooks."""
    return [c.to_dict() for c in manifest.connections if not c.waits]


def snapshot_failed(config: Config, reporter: Reporter, target: str, error: CriuctlError) -> None:
    """Run the hooks for one target of a snapshot that could not be dumped."""
    known = None if is_pid(target) else target
    facts: dict[str, Any] = {
        "session": known,
        "incarnation": None,
        "checkpoint": None,
        "pid": int(target) if known is None else None,
        "inner_pid": None,
        "store": config.store,
        "labels": {},
        "leave_running": True,
    }
    Hooks(config, reporter, facts).run("snapshot-failed", target=target, error=error_body(error))
