"""The terminals of a tree: which it uses, which processes hold them, and where their other ends
are.

A terminal is identified by its device number (`rdev`) and by the file system of its node (`dev`):
``/dev/pts`` may be mounted more than once, with a terminal number 0 in each. That pair is also
CRIU's name of an external terminal, ``tty[RDEV:DEV]`` in hexadecimal.

The *master* of a pseudo-terminal is in the tree when one of its processes has the ``ptmx``
descriptor of the same index and mount (a terminal multiplexer, a test harness). Otherwise a process
outside holds it (sshd, a terminal emulator, criuctl's holder): then the tree cannot be dumped as a
whole and a restore has to give the slave side a new master.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from .descriptors import Descriptor
from .procfs import all_pids
from .syscalls import pidfd_getfd
from .tree import Process

_PTMX = os.makedev(5, 2)
_DEV_TTY = os.makedev(5, 0)  # /dev/tty: an alias of the controlling terminal, not a terminal
_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431
_TIOCGDEV = 0x80045432  # returns the device of a descriptor, however it was opened
_PTS_MAJORS = range(136, 144)

Kind = Literal["pts", "console", "serial", "other"]


class Terminal(NamedTuple):
    """One terminal that processes of the tree have open or are controlled by."""

    kind: Kind
    path: str  # "" if it is only known as a controlling terminal
    rdev: int
    dev: int  # st_dev of its node; 0 if it is only known as a controlling terminal
    number: int | None  # N of /dev/pts/N
    holders: tuple[tuple[int, int], ...]  # (PID, fd) of the slave side
    controls: tuple[int, ...]  # PIDs whose controlling terminal it is
    masters: tuple[tuple[int, int], ...]  # (PID, fd) of its master inside the tree
    # the PID of the tree's session leader that has it as controlling terminal
    session_leader: int | None
    hung_up: bool = False  # its master is closed: reads and writes fail
    # (PID, fd, st_dev) of descriptors of this terminal opened as /dev/tty
    aliases: tuple[tuple[int, int, int], ...] = ()

    @property
    def master_inside(self) -> bool:
        """Whether the tree itself holds the master side."""
        return bool(self.masters)

    @property
    def external_key(self) -> str:
        """CRIU's name of it as an external resource."""
        return f"tty[{self.rdev:x}:{self.dev:x}]"


def alias_keys(
    tree: Iterable[Process], descriptors: Mapping[int, Sequence[Descriptor]]
) -> set[str]:
    """Return CRIU's names of ``/dev/tty``, for the processes that have it open or may open it
    soon.
    """
    found = {
        d.device
        for opened in descriptors.values()
        for d in opened
        if d.kind == "tty" and d.rdev == _DEV_TTY
    }
    for process in tree:
        if process.tty_nr:
            with suppress(OSError):
                node = os.stat(f"/proc/{process.pid}/root/dev/tty")
                found |= {node.st_dev} if node.st_rdev == _DEV_TTY else set()
    return {f"tty[{_DEV_TTY:x}:{device:x}]" for device in found}


def _meant(pid: int, fd: int, controlling: int) -> int:
    """Return the device that a descriptor opened as ``/dev/tty`` refers to; 0 if it has hung up.

    Usually the controlling terminal; a process that has started a new session since still has the
    old terminal open.
    """
    try:
        pidfd = os.pidfd_open(pid)
        try:
            opened = pidfd_getfd(pidfd, fd)
        finally:
            os.close(pidfd)
    except OSError:
        return controlling  # gone meanwhile, or no permission to look
    try:
        (number,) = struct.unpack("I", fcntl.ioctl(opened, _TIOCGDEV, bytes(4)))
    except OSError:
        return 0
    finally:
        os.close(opened)
    return decode_tty_nr(number)


def decode_tty_nr(tty_nr: int) -> int:
    """Return the device number (as `os.makedev`) in field tty_nr of /proc/PID/stat; 0 for none."""
    if not tty_nr:
        return 0
    return os.makedev((tty_nr >> 8) & 0xFFF, (tty_nr & 0xFF) | ((tty_nr >> 12) & 0xFFF00))


def open_pair(root: str = "") -> tuple[int, int, str]:
    """Open a new pseudo-terminal: return its master, slave and path, close-on-exec.

    `root`: the root folder to open it under, ``/proc/PID/root``, in the mount namespace of that
    process. `OSError` names the resource that has run out.
    """
    try:
        master = os.open(f"{root}/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC, "no pseudo-terminal is left on this host", "/dev/ptmx"
        ) from error
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, bytes(4))
        (number,) = struct.unpack("I", fcntl.ioctl(master, _TIOCGPTN, bytes(4)))
        path = f"/dev/pts/{number}"
        return master, os.open(root + path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC), path
    except OSError:
        os.close(master)
        raise


def pts_index(rdev: int) -> int | None:
    """Return N of /dev/pts/N for the device number of a Unix98 slave, else None."""
    if os.major(rdev) not in _PTS_MAJORS:
        return None
    return (
        (os.major(rdev) - _PTS_MAJORS.start) * 256 + os.minor(rdev)
        if os.minor(rdev) < 256
        else os.minor(rdev)
    )


def master_index(descriptor: Descriptor) -> int | None:
    """Return N of the /dev/pts/N whose master this descriptor is, else None."""
    if descriptor.kind != "tty" or descriptor.rdev != _PTMX:
        return None
    for line in descriptor.extra:
        key, _, value = line.partition(":")
        if key == "tty-index":
            return int(value)
    return None


def _mounted(pid: int, master: Descriptor) -> int | None:
    """Return ``st_dev`` of the ``/dev/pts`` mount of this master; its ptmx is in it or next to it.

    None if that mount is not visible.
    """
    folder = os.path.dirname(master.target)
    if os.path.basename(folder) == "pts":
        return master.device
    try:
        return os.stat(f"/proc/{pid}/root{folder}/pts").st_dev
    except OSError:
        return None


def terminals(
    tree: Sequence[Process], descriptors: Mapping[int, Sequence[Descriptor]]
) -> list[Terminal]:
    """Return the terminals of the tree, sorted by device.

    `descriptors`: those of each PID of the tree.
    """
    slaves: dict[tuple[int, int], list[tuple[int, int]]] = {}
    paths: dict[tuple[int, int], str] = {}
    masters: dict[int, list[tuple[int, int, int | None]]] = {}
    aliases: dict[int, list[tuple[int, int, int]]] = {}
    hung_up: set[tuple[int, int]] = set()
    controlling = {process.pid: decode_tty_nr(process.tty_nr) for process in tree}
    for pid, opened in descriptors.items():
        for descriptor in opened:
            if descriptor.kind != "tty":
                continue
            if descriptor.rdev == _DEV_TTY:
                if device := _meant(pid, descriptor.fd, controlling.get(pid, 0)):
                    aliases.setdefault(device, []).append((pid, descriptor.fd, descriptor.device))
                continue
            if descriptor.rdev == _PTMX:
                index = master_index(descriptor)
                if index is not None:
                    masters.setdefault(index, []).append(
                        (pid, descriptor.fd, _mounted(pid, descriptor))
                    )
                continue
            key = (descriptor.rdev, descriptor.device)
            slaves.setdefault(key, []).append((pid, descriptor.fd))
            if descriptor.deleted:
                hung_up.add(key)  # the node is removed with the master
            paths.setdefault(key, descriptor.target)
    controlled: dict[int, list[Process]] = {}
    for process in tree:
        if process.tty_nr:
            controlled.setdefault(decode_tty_nr(process.tty_nr), []).append(process)
    known = {rdev for rdev, _dev in slaves}
    # The kernel shows the terminal that controls a session without its mount: it is the one that
    # the session has open, if any.
    session = {process.pid: process.sid for process in tree}
    of_session: dict[tuple[int, int | None], set[int]] = {}
    for (rdev, dev), held in slaves.items():
        for pid, _fd in held:
            of_session.setdefault((rdev, session.get(pid)), set()).add(dev)

    def means(pid: int, rdev: int, dev: int) -> bool:
        return dev in of_session.get((rdev, session.get(pid)), {dev})

    keys = [*slaves, *((rdev, 0) for rdev in {**controlled, **aliases} if rdev not in known)]
    found = []
    for key in sorted(keys):
        rdev, dev = key
        index = pts_index(rdev)
        under = [process for process in controlled.get(rdev, ()) if means(process.pid, rdev, dev)]
        ours = masters.get(index, ()) if index is not None else ()
        found.append(
            Terminal(
                kind=_kind(rdev),
                path=paths.get(key, ""),
                rdev=rdev,
                dev=dev,
                number=index,
                holders=tuple(slaves.get(key, ())),
                controls=tuple(process.pid for process in under),
                masters=tuple(
                    (pid, fd) for pid, fd, mounted in ours if not dev or mounted in (dev, None)
                ),
                session_leader=next(
                    (process.pid for process in under if process.pid == process.sid), None
                ),
                hung_up=key in hung_up,
                aliases=tuple(
                    alias for alias in aliases.get(rdev, ()) if means(alias[0], rdev, dev)
                ),
            )
        )
    return found


def path_holders(paths: Mapping[str, int], inside: Container[int]) -> dict[int, int]:
    """Return the value of each of `paths` that a process not `inside` has open -> one such PID.

    Reads every descriptor of the host, by name only; processes that may not be read are skipped.
    """
    found: dict[int, int] = {}
    for pid in all_pids():
        if pid in inside:
            continue
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                value = paths.get(os.readlink(f"/proc/{pid}/fd/{name}"))
                if value is not None:
                    found.setdefault(value, pid)
        except OSError:
            continue  # gone meanwhile, or no permission to look
    return found


def _kind(rdev: int) -> Kind:
    major, minor = os.major(rdev), os.minor(rdev)
    if major in _PTS_MAJORS:
        return "pts"
    if major == 4:
        return "console" if minor < 64 else "serial"
    if (major, minor) == (5, 1):
        return "console"
    return "serial" if major in (204, 229) else "other"
