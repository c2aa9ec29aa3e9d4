"""Control groups: which a process is in, and putting a restored one back into them.

Putting a process into a group that exists is one write.  Groups that are gone are made anew by CRIU
(`groupyard`), but for those of systemd, for whom a group without a unit is nothing.

Where systemd runs, whoever restores is in a unit, a login's or a service's, and whatever is in it
may end with it.  A session does not: its holder has a scope of its own.  What comes back without a
holder is let out of the unit by `leave_unit`.  A service is no service any more then, but keeps the
name of one in its group: journald goes by that, so `journalctl -u` goes on as well.
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
    """Hierarchy (its controllers or name; "" is version 2) -> path of the group that `pid` is
    in.
    """
    found = {}
    for line in read_lines(pid, "cgroup"):
        _number, hierarchy, path = line.split(":", 2)
        found[hierarchy] = path
    return found


def mount_points(*, whole: bool = False) -> dict[str, str]:
    """Hierarchy -> where it is mounted here; `whole`: from its root on."""
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
    """Those of these groups (hierarchy, path) that are not there."""
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
    """Whether it is of somebody who makes his groups himself: systemd's, or criuctl's own."""
    return os.path.isdir(_SYSTEMD) or any(
        part == "criuctl" or part.startswith("criuctl-") for part in group[1].split("/")
    )


def put_back(wanted: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Move each process (our PID -> its groups) back; returns the groups that are not there any
    more.
    """
    ours = of_process(os.getpid())
    mounted = mount_points()
    missing: set[str] = set()
    for pid, groups in wanted.items():
        for hierarchy, path in groups.items():
            if (
                ours.get(hierarchy) == path
                or hierarchy not in mounted
                or path.startswith(f"/{_SERVICES}/")
            ):
                continue
            try:
                # outside of the root of the cgroup namespace that it was seen from, or anywhere
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
    """The service of the system that a process in these groups belongs to, by systemd's rules; ""
    if to none.
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
    """Let those of these processes that are in our own systemd unit leave it; elsewhere nothing is
    done.

    Each process comes with the service that it was once part of, or "".
    """
    if not os.path.isdir(_SYSTEMD):
        return
    ours, mounted = of_process(os.getpid()), mount_points()
    for hierarchy in (h for h in _KEEPERS if h in ours and h in mounted):
        _drop_empty(os.path.join(mounted[hierarchy], _SERVICES))
        for pid, service in pids.items():
            folder = os.path.join(
                mounted[hierarchy], os.path.join(_SERVICES, service) if service else _TREES
            )
            with suppress(OSError, NoSuchProcess):  # not ours to write: then it ends with the unit
                if of_process(pid).get(hierarchy) == ours[hierarchy]:
                    _enter(folder, pid)


def _enter(folder: str, pid: int) -> None:
    for last in (False, True):
        os.makedirs(folder, 0o755, exist_ok=True)
        try:
            with open(os.path.join(folder, "cgroup.procs"), "w") as file:
                file.write(str(pid))
            return
        except FileNotFoundError:  # another restore has removed it, as nobody was in it yet
            if last:
                raise


def _drop_empty(folder: str) -> None:
    """Remove the groups in a group of ours, as far as nobody is in them."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    os.rmdir(entry.path)
