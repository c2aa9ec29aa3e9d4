"""Check mounts that only the tree's mount namespace has.

A restore gives the tree a copy of the host's mounts (`criuctl.namespaces.plan`).  Mounts that only
the tree has are not made again, and paths on them lead to what the host has there.  If the root is
PID 1, CRIU makes them again, on the host's root folder, and fills each tmpfs; other files are still
judged by what this host has at their paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...criu import binary
from ...errors import NoSuchProcess, PlatformError
from ...files import shown_workspaces, socket_names
from ...files.carried_binaries import SOURCE
from ...namespaces.plan import mount_tops, saved_devices
from ...proc.descriptors import Descriptor
from ...proc.mounts import Mount, read_mounts
from ...proc.namespaces import is_namespace_init
from ...proc.procfs import read_link
from ...proc.socketfiles import bound_file
from ...proc.tree import Process
from ...report import Finding
from ...session import names
from .containers import own_root
from .namespaces import at_top
from .open_paths import mount_of
from .scene import Scene
from .unsaved_mounts import unsaved

# the kernel's own: the same on every host
_ANYWHERE = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "mqueue", "devpts"})
_SHOWN = 6  # mount points that a finding lists
_AS_FIRST = (
    "as PID 1 of a PID namespace (`unshare --pid --fork --mount-proc`), whose mounts are saved"
)


def check_mounts(scene: Scene) -> Iterator[Finding]:
    """Report what a restore would not find: the tree's root folder, its mounts, and files on
    them.
    """
    if not scene.foreign("mnt"):
        return
    root, view, host = scene.root, _View.of(at_top(scene)), read_mounts()
    base, inside = view.base, view.mounts()
    root_mount, host_mount = _at(base, inside), _at("/", host)
    if (
        root_mount is not None
        and host_mount is not None
        and base == "/"
        and (root_mount.device, root_mount.root) != (host_mount.device, host_mount.root)
    ):
        yield own_root(root, root_mount)
        return
    if scene.foreign("pid") and is_namespace_init(root.pid):
        yield from _made_again(scene, view, host)
        return
    own = {mount.id: mount for mount in _own(scene, view, host)}
    hidden = next((path for path in _criu(scene) if not os.path.exists(view.seen(path))), None)
    if hidden is not None and base == "/":
        text = f"{root} does not see {hidden} in its mount namespace, where CRIU has to work"
        yield Finding(
            "error",
            "criu-hidden",
            text,
            f"Start it so that it sees that, or start it {_AS_FIRST}.",
            pid=root.pid,
        )
    if not own:
        return
    yield from _used(scene, view, own)
    points = sorted(
        {
            mount.point
            for mount in own.values()
            if not socket_names.is_shown(mount.root, mount.point)
        }
    )
    if not points:
        return
    more = f" and {len(points) - _SHOWN} more" if len(points) > _SHOWN else ""
    yield Finding(
        "warning",
        "own-mounts",
        f"mounts that only {root} and its mount namespace have are not made again, a restore "
        f"shows what the host has there: {', '.join(points[:_SHOWN])}{more}",
        f"Mount them on the host, too, before the program is started, or start it {_AS_FIRST}.",
        pid=root.pid,
    )


def _made_again(scene: Scene, home: _View, host: list[Mount]) -> Iterator[Finding]:
    """Check the mounts of a root that is PID 1, in each mount namespace of the tree: CRIU makes
    them again.
    """
    saved = saved_devices(scene.root.pid)
    tops = mount_tops(scene.root.pid)
    views = {
        namespace: home if pid == scene.root.pid else _View.of(pid)
        for namespace, pid in tops.items()
    }
    every = [mount for view in views.values() for mount in view.mounts()]
    for namespace, view in views.items():
        yield from _mounted_terminals(scene, view)
        yield from unsaved(tops[namespace], view.mounts(), every, host)
        own = {mount.id: mount for mount in _own(scene, view, host) if mount.device not in saved}
        yield from _used(scene, view, own, within=namespace)


def _mounted_terminals(scene: Scene, view: _View) -> Iterator[Finding]:
    """Report mounted terminals of the host's devpts.

    CRIU mounts before it makes the tree's terminals, and finds the others by their number.
    """
    here = _stat("/dev/pts")
    known = {str(t.number): t for t in scene.terminals if here is not None and t.dev == here.st_dev}
    for mount in view.mounts():
        if (
            mount.kind != "devpts"
            or here is None
            or mount.device != here.st_dev
            or not mount.root[1:].isdigit()
        ):
            continue
        terminal = known.get(mount.root[1:])
        if terminal is not None and terminal.master_inside:
            pid, fd = terminal.masters[0]
            text = (
                f"a terminal of the tree is mounted at {mount.point}; a restore could not do that "
                "without a devpts of its own"
            )
            hint = (
                "Unmount it, or have the tree mount a devpts (`mount -t devpts devpts /dev/pts`) "
                "before it makes terminals."
            )
            yield Finding("error", "terminal-mounted", text, hint, pid=pid, fd=fd)
        elif terminal is None or not terminal.holders:
            text = (
                f"this host's terminal {mount.root[1:]} is mounted at {mount.point}, and no "
                "process of the tree has it open"
            )
            hint = (
                f"Unmount {mount.point} before the dump, or have a process of the tree keep the "
                "terminal open."
            )
            yield Finding(
                "error",
                "terminal-mounted",
                f"{text}; a restore would show another one there",
                hint,
                pid=view.pid,
            )


def _criu(scene: Scene) -> Iterable[str]:
    try:
        return (word for word in binary.find(scene.config).argv if word.startswith("/"))
    except PlatformError:
        return ()  # another finding


class _View(NamedTuple):
    """A mount namespace, as a process in it sees it."""

    pid: int
    # the folder below which its mounts are known: "/", unless every process there is in a chroot
    base: str

    @classmethod
    def of(cls, pid: int) -> _View:
        """Return the view of `pid`; `NoSuchProcess`."""
        return cls(pid, read_link(pid, "root"))

    def mounts(self) -> list[Mount]:
        """Return the mounts that the process sees, by their paths in the namespace."""
        return [m._replace(point=_joined(self.base, m.point)) for m in read_mounts(self.pid)]

    def seen(self, path: str) -> str:
        """Return the path that leads from criuctl to a path of the namespace."""
        return f"/proc/{self.pid}/root{path if self.base == '/' else path.removeprefix(self.base)}"


def _joined(base: str, path: str) -> str:
    return path if base == "/" else base if path == "/" else base + path


def _at(point: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount that is visible there: the last one that was mounted."""
    return next((mount for mount in reversed(mounts) if mount.point == point), None)


def _own(scene: Scene, view: _View, host: list[Mount]) -> Iterator[Mount]:
    """Yield mounts of the tree that this host does not have, in the same or a similar form."""
    # the session's folder, which its holder mounts for each incarnation
    session = Path(scene.config.run_dir or names.DEFAULT_RUN_DIR) / "session"
    known = {(m.device, m.root, m.point): "ro" in m.options for m in host}
    for mount in view.mounts():
        if mount.kind in _ANYWHERE or mount.source == SOURCE or mount.point == str(session):
            continue
        read_only = known.get((mount.device, mount.root, mount.point))
        if read_only is None:
            there, here = _stat(view.seen(mount.point)), _stat(mount.point)
            if there is not None and here is not None and _same(there, here):
                # A folder mounted onto itself, to be read-only or not, as systemd and bwrap do.
                read_only = _is_read_only(mount.point)
        if shown_workspaces.shown_at(view.seen(mount.point), mount):
            continue
        if read_only is None or (not read_only and "ro" in mount.options):
            yield mount


def _is_read_only(path: str) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _stat(path: str, *, follow: bool = True) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError:
        return None


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    if stat.S_ISCHR(one.st_mode) and stat.S_ISCHR(other.st_mode):
        return one.st_rdev == other.st_rdev
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _used(
    scene: Scene, view: _View, own: dict[int, Mount], *, within: int = 0
) -> Iterator[Finding]:
    """Report what processes use (open, mapped, working folder) on such mounts, if the host has
    something else there.

    `within`: the mount namespace, if its mounts are made again; then only files are checked.
    """
    made_again = bool(within)
    found: dict[int, list[tuple[Process, Descriptor | None, str]]] = {}
    reported: set[str] = set()
    for process, d, path, link in _held(scene, view, own, within):
        mount = own.get(mount_of(link) or 0)
        # other mounts are not asked: they may not answer
        there = _stat(link) if mount is not None else None
        if mount is None or there is None or path in reported:
            continue
        gone = (d is not None and d.deleted) or there.st_nlink == 0
        if (
            (there.st_nlink == 0 or not stat.S_ISREG(there.st_mode))
            if made_again
            else _travels(scene, d, path)
        ):
            continue
        reported.add(path)
        if gone or stat.S_ISSOCK(there.st_mode):
            folder = os.path.dirname(path)
            here, there = _stat(folder), _stat(view.seen(folder))
            if here is not None and (not made_again or (there is not None and _same(there, here))):
                # a deleted file, or a bound socket, comes back where its folder is
                continue
        elif (here := _stat(path, follow=not stat.S_ISLNK(there.st_mode))) is not None and _same(
            there, here
        ):
            continue
        found.setdefault(mount.id, []).append((process, d, path))
    for number, users in found.items():
        mount, (process, d, path) = own[number], users[0]
        more = f" (and {len(users) - 1} more)" if len(users) > 1 else ""
        yield Finding(
            "error",
            "own-mount",
            f"{path}{more} is on a mount ({mount.kind}) that only the tree's mount namespace "
            f"has, at {mount.point}; a restore looks at what the host has there",
            "Mount it on the host, too, before the program is started, or have the program leave "
            f"{mount.point}"
            + (
                "."
                if made_again
                else f"; or start it {_AS_FIRST}; or take it along (--with-files)."
            ),
            pid=process.pid,
            fd=None if d is None else d.fd,
        )


def _held(
    scene: Scene, view: _View, own: dict[int, Mount], within: int
) -> Iterator[tuple[Process, Descriptor | None, str, str]]:
    """Yield process, descriptor, path in the mount namespace, and a link of /proc that leads
    there.
    """
    every = tuple(f"{mount.point.rstrip('/')}/" for mount in own.values())
    for process in scene.living:
        # Paths belong to the namespace of the process.
        points = every if within in (0, scene.namespaces[process.pid]["mnt"]) else ()
        for d in scene.opened[process.pid]:
            if d.mnt_id in own and d.kind in ("file", "dir", "symlink", "pipe"):
                yield process, d, d.target, f"/proc/{process.pid}/fd/{d.fd}"
            elif (
                d.kind == "socket"
                and (bound := bound_file(process.pid, d.fd)) is not None
                and bound.startswith(points)
            ):
                yield process, d, bound, view.seen(bound)
        for what in ("cwd", "root", "exe"):
            link = f"/proc/{process.pid}/{what}"
            with suppress(NoSuchProcess):
                yield process, None, read_link(process.pid, what).removesuffix(" (deleted)"), link
        for path in {
            m.path
            for m in scene.mapped[process.pid]
            if m.inode and not m.deleted and m.path.startswith(points)
        }:
            yield process, None, path, view.seen(path)


def _travels(scene: Scene, d: Descriptor | None, path: str) -> bool:
    """Return whether it is taken along: named by --with-files, or written to, with ``files:
    carry``.
    """
    if scene.named(path):
        return True
    return scene.config.files == "carry" and d is not None and d.kind == "file" and d.writable
