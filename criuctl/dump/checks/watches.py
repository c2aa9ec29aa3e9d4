"""Check descriptors that watch something: inotify, fanotify, epoll, folders (dnotify).

The kernel shows watched files as handles, and the targets of an epoll as descriptor numbers that
may be closed.  CRIU looks for their meaning (criu/fsnotify.c, check_open_handle; criu/eventpoll.c),
and refuses what it does not find.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

from ...errors import CriuctlError
from ...proc.descriptors import Descriptor
from ...proc.mounts import Mount
from ...proc.namespaces import is_namespace_init
from ...proc.procfs import read_lines
from ...proc.syscalls import borrowed, is_watched, open_by_handle, same_file
from ...proc.tree import Process
from ...report import Finding
from .deleted import others_control
from .namespaces import at_top
from .open_paths import mount_of
from .scene import Scene

_IN_MEMORY = ("tmpfs", "devtmpfs")  # their inode numbers mean nothing at a restore
_SEARCHED = (  # criu/irmap.c: where CRIU searches for what no handle leads to
    *(
        "/etc",
        "/var/spool",
        "/var/log",
        "/usr/share/dbus-1/services",
        "/usr/share/dbus-1/system-services",
    ),
    *("/var/lib/polkit-1/localauthority", "/usr/share/polkit-1/actions", "/lib/udev"),
)
Searched = Callable[[str], set[tuple[int, int]]]
_FIELD = re.compile(r"([\w-]+):\s*(\w+)")
_DROP = "Have the program drop the watch before the dump."


def check_watches(scene: Scene) -> Iterator[Finding]:
    """Report events that are lost, and watches that CRIU cannot save."""
    epolls: list[tuple[Process, Descriptor]] = []
    searched = cache(_searched)  # once, for all marks that lead nowhere
    for process, d in scene.descriptors():
        if d.kind in ("inotify", "fanotify"):
            yield from _notify(scene, process, d, searched)
        elif (
            d.kind == "dir"
            and not d.flags & os.O_PATH
            and _asked(process, d, lambda own: fcntl.fcntl(own, fcntl.F_GETOWN))
        ):
            yield Finding(
                "warning",
                "dnotify",
                f"changes in {d.target} are reported by a signal (F_NOTIFY); they no longer are "
                "after a restore",
                "Have the program use inotify, or ask for it again.",
                pid=process.pid,
                fd=d.fd,
            )
        elif d.kind == "epoll" and not any(
            d.extra == other.extra and same_file((holder.pid, other.fd), (process.pid, d.fd))
            for holder, other in epolls
        ):
            epolls.append((process, d))
            yield from _epoll(scene, process, d)


def _error(process: Process, d: Descriptor, code: str, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint, pid=process.pid, fd=d.fd)


def _notify(scene: Scene, process: Process, d: Descriptor, searched: Searched) -> Iterator[Finding]:
    if unread := _unread(process, d):
        yield Finding(
            "warning",
            "events-lost",
            f"{unread} bytes of events ({d.kind}) that the program has not read are lost at a "
            "restore",
            "It passes by itself: try again.",
            pid=process.pid,
            fd=d.fd,
        )
    if any(line.startswith("fanotify sdev:") for line in d.extra):
        yield _error(
            process,
            d,
            "watch-of-file-system",
            "a whole file system is watched (FAN_MARK_FILESYSTEM); CRIU would restore the "
            "descriptor without that",
            "Have the program watch the mount or folders, or end it before the dump.",
        )
    marks = [mark for mark in map(_fields, d.extra) if "ino" in mark]
    top = _top(scene) if marks else None
    if top is None:
        return
    reasons: Counter[tuple[str, str]] = Counter()
    for mark in marks:
        # Try twice: the file may be renamed during the search.
        if _unreachable(scene, top, mark, searched) and (
            why := _unreachable(scene, top, mark, searched)
        ):
            reasons[why] += _watches(process, d, mark)
    for (code, where), number in (+reasons).items():
        yield _error(
            process, d, code, f"{number} watch(es) ({d.kind}) {where}; CRIU cannot save that", _DROP
        )


def _unread(process: Process, d: Descriptor) -> int:
    """Return the number of bytes that a read would give; nothing is consumed."""
    return _asked(
        process,
        d,
        lambda own: int.from_bytes(fcntl.ioctl(own, termios.FIONREAD, bytes(4)), sys.byteorder),
    )


def _asked(process: Process, d: Descriptor, question: Callable[[int], int]) -> int:
    """Return the answer of `question` about a duplicate; 0 if the process has ended, or closed
    it.
    """
    try:
        with borrowed(process.pid, d.fd) as own:
            return question(own)
    except OSError:
        return 0


def _watches(process: Process, d: Descriptor, mark: dict[str, str]) -> bool:
    """Return whether it still watches that: a watch goes with its file, which may be replaced
    during the search.
    """
    try:
        now = map(_fields, read_lines(process.pid, f"fdinfo/{d.fd}"))
    except CriuctlError:
        return False
    return any(
        all(other.get(name) == mark.get(name) for name in ("wd", "sdev", "ino")) for other in now
    )


def _fields(line: str) -> dict[str, str]:
    return dict(_FIELD.findall(line))


def _device(field: str) -> int:
    number = int(field, 16)
    return os.makedev(number >> 20, number & 0xFFFFF)


def _top(scene: Scene) -> str | None:
    """Return the path that leads from criuctl to the tree's mount namespace; None if there is
    none.
    """
    if not scene.foreign("mnt"):
        return ""
    top = f"/proc/{at_top(scene)}/root"
    return top if os.readlink(top) == "/" else None


def _unreachable(
    scene: Scene, top: str, mark: dict[str, str], searched: Searched
) -> tuple[str, str] | None:
    """Return a code and the reason why CRIU does not find what is watched.

    None: it finds it, or that cannot be determined.
    """
    device, inode = _device(mark["sdev"]), int(mark["ino"], 16)
    found: Mount | None = None
    is_link = False
    for mount in scene.mounts.values():
        if mount.device != device:
            continue
        root = scene.root_of(mount.id)
        root = top if root is None else root
        try:
            path = _path(root + mount.point, mount, mark)
        except PermissionError:
            return None
        except (OSError, KeyError):
            continue
        found = mount
        with suppress(OSError):
            status = os.lstat(root + path)
            is_link |= stat.S_ISLNK(status.st_mode) and status.st_ino == inode
            if os.stat(root + path).st_ino == inode:
                return None
    if found is not None:
        # For other files CRIU has the handle, which a restore can open only if CRIU makes all
        # mounts again.
        lost = not (_mounts_are_saved(scene) or (device, inode) in _kept(scene))
        if not lost and scene.foreign("mnt") and _made_by_criuctl(scene, device, inode):
            return (
                "watch-of-deleted",
                "on a deleted file of a folder in which others than root can write, in mounts of "
                "the tree's own",
            )
        if is_link and (lost or found.kind in _IN_MEMORY):
            return "watch-of-link", "on a symbolic link itself (IN_DONT_FOLLOW)"
        if found.kind in _IN_MEMORY:
            return "watch-of-deleted", f"on a deleted or hidden file of a {found.kind}"
        return (
            (
                "watch-of-deleted",
                ("on a deleted or hidden file that no process of the tree has open"),
            )
            if lost
            else None
        )
    if (device, inode) in searched(top):
        return None
    kinds = {mount.kind for mount in scene.mounts.values() if mount.device == device}
    where = (
        f"a file system ({', '.join(kinds)}) that finds no file again"
        if kinds
        else "a file system that is not mounted (any more)"
    )
    return "watch-without-path", f"on {where}"


def _mounts_are_saved(scene: Scene) -> bool:
    return scene.foreign("mnt") and scene.foreign("pid") and is_namespace_init(scene.root.pid)


def _made_by_criuctl(scene: Scene, device: int, inode: int) -> bool:
    """Return whether it is a deleted file that criuctl hands to CRIU.

    CRIU finds such a file for a watch only if it sees criuctl's /proc.
    """
    names = {
        d.target
        for _, d in scene.descriptors()
        if d.nlink == 0 and (d.device, d.inode) == (device, inode)
    }
    return any(others_control(scene, os.path.dirname(name)) for name in names)


def _kept(scene: Scene) -> set[tuple[int, int]]:
    """Return device and inode of all files of the tree: a deleted one comes back, and its watches
    with it.
    """
    kept = {(d.device, d.inode) for _, d in scene.descriptors()}
    kept |= {(os.makedev(m.major, m.minor), m.inode) for _, m in scene.mappings()}
    for process in scene.living:
        for name in ("cwd", "root", "exe"):
            with suppress(OSError):
                status = os.stat(f"/proc/{process.pid}/{name}")
                kept.add((status.st_dev, status.st_ino))
    return kept


def _path(point: str, mount: Mount, mark: dict[str, str]) -> str:
    """Return the path of what is watched, by its handle.

    Raises `OSError`, `KeyError` if there is no way from this mount.
    """
    base = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if mount_of(f"/proc/self/fd/{base}") != mount.id:
            raise FileNotFoundError(point)  # something is mounted over it
        fd = open_by_handle(base, int(mark["fhandle-type"], 16), bytes.fromhex(mark["f_handle"]))
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    finally:
        os.close(base)


def _searched(top: str) -> set[tuple[int, int]]:
    """Return device and inode of every file where CRIU searches."""
    paths = [f"{top}/.", *(f"{top}{path}" for path in _SEARCHED)]
    for path in _SEARCHED:
        for folder, folders, files in os.walk(top + path):
            paths += (f"{folder}/{name}" for name in (*folders, *files))
    found = set()
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            found.add((status.st_dev, status.st_ino))
    return found


def _epoll(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    """Check that the targets of an epoll are open in the first process that has the epoll."""
    opened = {other.fd: other for other in scene.opened[process.pid]}
    seen: Counter[int] = Counter()
    lost = []
    for mark in map(_fields, d.extra):
        if not {"tfd", "ino", "sdev"} <= mark.keys():
            continue
        number, what = int(mark["tfd"]), (int(mark["ino"], 16), _device(mark["sdev"]))
        nth, seen[number] = seen[number], seen[number] + 1
        now = opened.get(number)
        if now is None or (now.inode, now.device) != what:
            with suppress(OSError):  # it watches something else now
                if not _has(scene, process, d, number, nth, what):
                    lost.append(number)
    if lost:
        yield _error(
            process,
            d,
            "epoll-target",
            f"the epoll watches what {process} has closed, and another process has open (once its "
            f"descriptor {lost[0]}"
            + (f", and {len(lost) - 1} more)" if len(lost) > 1 else ")")
            + "; CRIU cannot save that",
            "Have the program take it off the epoll (EPOLL_CTL_DEL) before it closes what others "
            "have as well.",
        )


def _has(
    scene: Scene, process: Process, d: Descriptor, number: int, nth: int, what: tuple[int, int]
) -> bool:
    """Return whether the process has the epoll's target, under any number, and no earlier process
    has it; `OSError`.
    """
    if _is(process, d, number, nth, number):
        return True
    for other in scene.opened[process.pid]:
        if (other.inode, other.device) == what and _is(process, d, number, nth, other.fd):
            own = process.pid, other.fd
            break
    else:
        # raises if it no longer watches that: it was closed meanwhile
        is_watched(process.pid, d.fd, number, nth, d.fd)
        return False
    before = scene.tree[: scene.tree.index(process)]
    held = ((earlier.pid, each) for earlier in before for each in scene.opened.get(earlier.pid, ()))
    return not any(
        (each.inode, each.device) == what and same_file((pid, each.fd), own) for pid, each in held
    )


def _is(process: Process, d: Descriptor, number: int, nth: int, fd: int) -> bool:
    try:
        return is_watched(process.pid, d.fd, number, nth, fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return False  # it has no such descriptor
        raise
