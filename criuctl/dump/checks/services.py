"""Check how the service manager reacts when a tree ends at its dump."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...errors import CriuctlError
from ...proc import command
from ...proc.procfs import unit_of
from ...quoting import quoted
from ...report import Finding
from .scene import Scene

_BOOTED = "/run/systemd/system"  # there where systemd is the service manager (sd_booted(3))
_TIMEOUT = 5.0  # seconds for systemctl
_STARTED_AGAIN = frozenset({"always", "on-failure", "on-abnormal", "on-abort"})  # after SIGKILL


def check_service(scene: Scene) -> Iterator[Finding]:
    """Report the main process of a unit that is restarted when it ends: after the restore it would
    run twice.
    """
    if scene.leave_running or not os.path.isdir(_BOOTED):
        return
    root = scene.root.pid
    unit = unit_of(root)
    if not unit.endswith(".service"):
        return
    try:
        answer = command.run(
            ["systemctl", "show", "--property=MainPID,Restart", "--", unit], timeout=_TIMEOUT
        ).text
    except CriuctlError:
        return  # no systemctl, or no answer from systemd: nothing is known of the unit
    properties = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if properties.get("MainPID") == str(root) and properties.get("Restart") in _STARTED_AGAIN:
        yield Finding(
            "warning",
            "started-again",
            f"{unit} has Restart={properties['Restart']}: systemd starts it again as soon as the "
            "dump has ended it",
            f"Before the dump: `systemctl edit --runtime {quoted(unit)}`, with the lines "
            "[Service] and Restart=no.",
            pid=root,
        )
