"""Control groups: those that a process is in, and putting a restored one back into them.

Putting a process into a group that exists is one write.  Groups that are gone are made again by
CRIU (`recreation`), except those of systemd, for which a group without a unit does not exist.

On a systemd host the program that restores is in a unit, of a login or a service, and what is in it
may end with it.  A session does not: its holder has a scope of its own.  What comes back without a
holder is moved out of the unit by `leave_unit`.  A service is no service any more then, but keeps
the name of one in its group: journald uses that, so `journalctl -u` goes on as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ..errors import NoSuchProcess
from ..proc.mounts import read_mounts
from ..proc.procfs import read_lines

_SYSTEMD = "/run/systemd/system"
_TREES = "criuctl/trees"  # the group of what comes back without a holder
# and that of the groups of former services, see cg_path_get_unit() of systemd
_SERVICES = "criuctl-trees.slice"
_KEEPERS = ("", "name=systemd")  # hierarchies in which systemd keeps its units


def of_process(pid: int) -> dict[str, str]:
    """Return hierarchy (its controllers or name; "" is version 2) -> path of the group that `pid`
    is in.
    """
    found = {}
    for line in read_lines(pid, "cgroup"):
        _number, hierarchy, path = line.split(":", 2)
        found[hierarchy] = path
    return found


def mount_points(*, whole: bool = False) -> dict[str, str]:
    """Return hierarchy -> where it is mounted here; `whole`: only mounts from its root."""
    found: dict[str, str] = {}
    for mount in read_mounts():
        if whole and mount.root != "/":
            continue
        if mount.kind == "cgroup2":
            found.setdefault("", mount.point)
        elif mount.kind == "cgroup":
            names = [
                o
                for o in mount.settings
                if o not in ("rw", "ro", "xattr", "clone_children") and "=" not in o
            ]
            names += [o for o in mount.settings if o.startswith("name=")]
            found.setdefault(",".join(names), mount.point)
    return found


def gone(groups: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those of these groups (hierarchy, path) that do not exist."""
    mounted = mount_points(whole=True)
    return [
        (hierarchy, path)
        for hierarchy, path in groups
        if path != "/"
        and not (
            hierarchy in mounted
            and os.path.isdir(os.path.join(mounted[hierarchy], path.lstrip("/")))
        )
    ]


def has_owner(group: tuple[str, str]) -> bool:
    """Return whether a manager makes the group itself: systemd, or criuctl."""
    return os.path.isdir(_SYSTEMD) or any(
        part == "criuctl" or part.startswith("criuctl-") for part in group[1].split("/")
    )


def put_back(wanted: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Move each process (PID on this host -> its groups) back; return the groups that do not exist
    any more.
    """
    own = of_process(os.getpid())
    mounted = mount_points()
    missing: set[str] = set()
    for pid, groups in wanted.items():
        for hierarchy, path in groups.items():
            if (
                own.get(hierarchy) == path
                or hierarchy not in mounted
                or path.startswith(f"/{_SERVICES}/")
            ):
                continue
            try:
                # outside the root of the cgroup namespace that it was seen from, or anywhere
                if ".." in path.split("/"):
                    raise FileNotFoundError(path)
                with open(
                    os.path.join(mounted[hierarchy], path.lstrip("/"), "cgroup.procs"), "w"
                ) as file:
                    file.write(str(pid))
            except OSError:
                missing.add(f"{hierarchy or 'unified'}:{path}")
    return sorted(missing)


def service_of(groups: Mapping[str, str]) -> str:
    """Return the service of the system that a process in these groups belongs to, by systemd's
    rules; "" if to none.
    """
    for hierarchy in _KEEPERS:
        parts = [
            part
            for part in groups.get(hierarchy, "").split("/")
            if part and not part.endswith(".slice")
        ]
        if parts and parts[0].endswith(".service") and not parts[0].startswith("user@"):
            return parts[0]
    return ""


def leave_unit(pids: Mapping[int, str]) -> None:
    """Move those of these processes that are in criuctl's own systemd unit out of it; elsewhere
    nothing is done.

    Each process comes with the service that it was once part of, or "".
    """
    if not os.path.isdir(_SYSTEMD):
        return
    own, mounted = of_process(os.getpid()), mount_points()
    for hierarchy in (h for h in _KEEPERS if h in own and h in mounted):
        _drop_empty(os.path.join(mounted[hierarchy], _SERVICES))
        for pid, service in pids.items():
            folder = os.path.join(
                mounted[hierarchy], os.path.join(_SERVICES, service) if service else _TREES
            )
            # not writable for criuctl: then it ends with the unit
            with suppress(OSError, NoSuchProcess):
                if of_process(pid).get(hierarchy) == own[hierarchy]:
                    _enter(folder, pid)


def _enter(folder: str, pid: int) -> None:
    for last in (False, True):
        os.makedirs(folder, 0o755, exist_ok=True)
        try:
            with open(os.path.join(folder, "cgroup.procs"), "w") as file:
                file.write(str(pid))
            return
        except FileNotFoundError:  # another restore has removed it, because it was still empty
            if last:
                raise


def _drop_empty(folder: str) -> None:
    """Remove the empty groups in a group of criuctl's."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    os.rmdir(entry.path)
