"""A session's own control group: to freeze its processes, to find them, to end them.

It exists as long as the holder.  Version 2 is preferred, also where both versions are mounted: its
freezer is in the core and lets frozen processes be traced and killed.  Else the freezer hierarchy
of version 1 is used.  Where neither can be written (a plain user, a container) there is no group,
and `processes` walks the tree to find and stop processes.  The group is made below the holder's own
group if that is a systemd scope that was delegated to it, else below ``criuctl``.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from ...proc.mounts import read_mounts

_ROOT = "/sys/fs/cgroup"
_FREEZE_SECONDS = 1.0
_BUSY_SECONDS = 8.0  # while all that is not frozen yet waits for a processor


class SessionGroup:
    """One group; `version` is 1 or 2."""

    def __init__(self, path: str, version: int) -> None:
        self.path, self.version = path, version

    @property
    def procs(self) -> str:
        """Return the path of the file by which a process enters the group."""
        return os.path.join(self.path, "cgroup.procs")

    @property
    def method(self) -> str:
        """Return the freezer's name in the protocol."""
        return f"freezer-v{self.version}"

    def add(self, pid: int) -> bool:
        """Move a process here; False if it is gone or this user may not move it."""
        try:
            with open(self.procs, "w") as file:
                file.write(str(pid))
        except OSError:
            return False
        return True

    def pids(self) -> list[int]:
        """Return the PIDs of the processes here."""
        try:
            with open(self.procs) as file:
                return [int(line) for line in file if line.strip() != "0"]
        except OSError:
            return []

    def has(self, pid: int) -> bool:
        """Return whether a process is here or in a group below."""
        return any(
            pid in SessionGroup(folder, self.version).pids()
            for folder, _folders, _files in os.walk(self.path)
        )

    def freeze(self, patience: float = _FREEZE_SECONDS, busy: float = _BUSY_SECONDS) -> bool:
        """Freeze all; return whether every process stands still within `patience` seconds.

        A process freezes when it is scheduled, which may take seconds on a busy host: while one is
        runnable the wait lasts up to `busy` seconds.
        """
        name, frozen = ("cgroup.freeze", "1") if self.version == 2 else ("freezer.state", "FROZEN")
        try:
            with open(os.path.join(self.path, name), "w") as file:
                file.write(frozen)
        except OSError:
            return False
        return self._wait_frozen(patience, busy)

    def thaw(self) -> None:
        """Undo `freeze`."""
        name, thawed = ("cgroup.freeze", "0") if self.version == 2 else ("freezer.state", "THAWED")
        with suppress(OSError), open(os.path.join(self.path, name), "w") as file:
            file.write(thawed)

    def remove(self, patience: float = 1.0) -> bool:
        """Remove the group; False if a process is still in it after `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                os.rmdir(self.path)
            except FileNotFoundError:
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                select.select([], [], [], 0.005)
            else:
                return True

    def _frozen(self) -> bool:
        try:
            if self.version == 1:
                with open(os.path.join(self.path, "freezer.state")) as file:
                    return file.read().strip() == "FROZEN"
            with open(os.path.join(self.path, "cgroup.events")) as file:
                return "frozen 1" in file.read()
        except OSError:
            return False

    def _wait_frozen(self, patience: float, busy: float) -> bool:
        """Wait until all are frozen; one that waits for a disk may take too long."""
        began = time.monotonic()
        pause = 0.001
        while not self._frozen():
            if (passed := time.monotonic() - began) >= patience:
                if passed >= busy or not self._runnable():
                    return False
                pause = 0.01
            select.select([], [], [], pause)
        return True

    def _runnable(self) -> bool:
        """Return whether a thread of the group, or of one below, runs or waits for a processor."""
        for folder, _folders, _files in os.walk(self.path):
            for pid in SessionGroup(folder, self.version).pids():
                with suppress(OSError):  # it has ended
                    for tid in os.listdir(f"/proc/{pid}/task"):
                        with suppress(OSError), open(f"/proc/{pid}/task/{tid}/stat", "rb") as stat:
                            if stat.read().rpartition(b")")[2].split()[0] == b"R":
                                return True
        return False


def existing(path: str) -> SessionGroup | None:
    """Return the group at `path`, which a holder has made; None if it is gone."""
    for version, file in ((1, "freezer.state"), (2, "cgroup.freeze")):
        if os.path.exists(os.path.join(path, file)):
            return SessionGroup(path, version)
    return None


def create(name: str) -> SessionGroup | None:
    """Make the group `name`; None if no freezer can be used."""
    for mount, version in _hierarchies():
        parent = _parent(mount, version)
        path = os.path.join(parent, name)
        try:
            os.makedirs(path, 0o755, exist_ok=True)
        except OSError:
            continue
        state = os.path.join(path, "cgroup.freeze" if version == 2 else "freezer.state")
        if os.access(state, os.W_OK) and os.access(os.path.join(path, "cgroup.procs"), os.W_OK):
            return SessionGroup(path, version)
        with suppress(OSError):
            os.rmdir(path)
    return None


def _hierarchies() -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for mount in read_mounts():
        if mount.kind == "cgroup2":
            found.append((mount.point, 2))
        elif mount.kind == "cgroup" and "freezer" in mount.settings:
            found.append((mount.point, 1))
    return sorted(found, key=lambda entry: -entry[1])


def _parent(mount: str, version: int) -> str:
    """Return the folder below which sessions' groups are made."""
    own = ""
    with open("/proc/self/cgroup") as file:
        for line in file:
            _number, controllers, path = line.rstrip("\n").split(":", 2)
            if (version == 2 and not controllers) or (
                version == 1 and "freezer" in controllers.split(",")
            ):
                own = path
    if os.path.basename(own).startswith("criuctl-") and own.endswith(".scope"):
        return os.path.join(mount, own.lstrip("/"))
    return os.path.join(mount, "criuctl")


def leave_launchers() -> None:
    """Leave the launcher's groups.

    Else ending them (those of a cron job, of a container's exec) would end the holder.  In a
    systemd scope of its own there is nothing to leave; elsewhere other programs kill by the freezer
    of version 1 and by version 2.
    """
    for mount, version in _hierarchies():
        parent = _parent(mount, version)
        if parent != os.path.join(mount, "criuctl"):
            continue
        with suppress(OSError):
            os.makedirs(os.path.join(parent, "holders"), 0o755, exist_ok=True)
            with open(os.path.join(parent, "holders", "cgroup.procs"), "w") as file:
                file.write("0")
