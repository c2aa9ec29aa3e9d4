"""Process trees: which processes are in one, and the properties of each.

A process is identified by PID *and* start time (`ProcessIdentity`): a PID alone may belong to
another process by the time it is used. `read_tree` walks ``/proc/PID/task/TID/children`` (all
threads: the kernel files a child under the thread that forked it). That file can skip entries while
siblings exit, and a running tree forks during the walk, so the walk is repeated until two walks in
a row saw the same processes; on a frozen tree the second walk is the proof. Kernels without
CONFIG_PROC_CHILDREN get a scan of all parent PIDs.

Open descriptors and mappings are read separately (`descriptors`, `mappings`): they cost more than
all the rest.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import NoSuchProcess
from .descriptors import Descriptor, descriptors
from .mappings import Mapping, mappings
from .procfs import (
    UNREADABLE,
    all_pids,
    ending,
    open_pidfd,
    read_bytes,
    read_link,
    read_raw,
    read_text,
    reading,
)

__all__ = [
    "Descriptor",
    "Mapping",
    "Process",
    "ProcessIdentity",
    "children",
    "descriptors",
    "ends_reported",
    "mappings",
    "read_process",
    "read_tree",
    "wait_ended",
    "wait_gone",
]

_PF_EXITING, _PF_KTHREAD = 0x00000004, 0x00200000
# what the kernel answers about a process that has ended, or is about to
_OF_ENDED = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.EINVAL, errno.EIO, errno.EBADF)
_KILLED = 1 << signal.SIGKILL - 1  # in a set of signals
# a tree that forks faster than this is returned as last seen; the freeze settles it
_MAX_WALKS = 20
_WATCHED = 64  # for so many processes there are certainly enough descriptors
_DELETED = " (deleted)"
_CHILDREN = "children"  # the file in a thread's folder; exists with CONFIG_PROC_CHILDREN


class ProcessIdentity(NamedTuple):
    """The identity of one process, which never matches a successor under the same PID."""

    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of the process that has this PID now; `NoSuchProcess`."""
        return cls(pid, _Stat.of(pid).start_time)

    def state(self) -> str | None:
        """Return its state letter as in /proc/PID/stat ("Z": a zombie), None once it is reaped."""
        try:
            stat = _Stat.of(self.pid)
        except NoSuchProcess:
            return None
        return stat.state if stat.start_time == self.start_time else None

    def exists(self) -> bool:
        """Return whether the process still has its PID, running or as a zombie."""
        return self.state() is not None

    def alive(self) -> bool:
        """Return whether the process runs, sleeps or is stopped; a zombie is not alive."""
        return self.state() not in (None, "Z", "X", "x")

    def doomed(self) -> bool:
        """Return whether none of its instructions runs any more.

        It is gone, or it was killed and is about to end, which can take long with much memory.
        """
        try:
            stat, status = _Stat.of(self.pid), read_text(self.pid, "status")
        except NoSuchProcess:
            return True
        pending = [
            int(line.split()[1], 16)
            for line in status.split("\n")
            if line.startswith(("SigPnd:", "ShdPnd:"))
        ]
        return (
            not self.alive()
            or bool(stat.flags & _PF_EXITING)
            or any(signals & _KILLED for signals in pending)
        )

    def open_pidfd(self) -> int:
        """Return a pidfd of this very process, close-on-exec.

        The caller closes it. `NoSuchProcess`.
        """
        fd = open_pidfd(self.pid)
        if not self.exists():  # the PID may have been reused before the open, not after it
            os.close(fd)
            raise NoSuchProcess(f"there is no process with PID {self.pid} any more")
        return fd


class _Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    command: str
    state: str
    ppid: int
    pgid: int
    sid: int
    tty_nr: int
    flags: int
    threads: int
    start_time: int
    rss_pages: int

    @classmethod
    def of(cls, pid: int) -> _Stat:
        data = read_bytes(pid, "stat")
        # The command may hold any character, also parentheses and newlines: the last ")" ends it.
        opening, closing = data.index(b"("), data.rindex(b")")
        f = data[closing + 2 :].split()
        return cls(
            command=os.fsdecode(data[opening + 1 : closing]),
            state=f[0].decode(),
            ppid=int(f[1]),
            pgid=int(f[2]),
            sid=int(f[3]),
            tty_nr=int(f[4]),
            flags=int(f[6]),
            threads=int(f[17]),
            start_time=int(f[19]),
            rss_pages=int(f[21]),
        )


class Process(NamedTuple):
    """The properties of one process of a tree. PIDs are those of criuctl's own PID namespace."""

    pid: int
    ns_pids: tuple[int, ...]  # its PID in each PID namespace, ours first, its own last
    ppid: int
    pgid: int
    sid: int
    start_time: int
    command: str  # the kernel's 15 bytes (comm)
    argv: tuple[str, ...]  # empty for zombies and kernel threads
    exe: str  # "" for zombies and kernel threads
    exe_deleted: bool
    cwd: str
    uids: tuple[int, int, int, int]  # real, effective, saved, filesystem
    gids: tuple[int, int, int, int]
    state: str  # R S D T t Z I, as in /proc/PID/stat
    threads: int
    tty_nr: int  # device number of the controlling terminal as in stat; 0: none
    tracer_pid: int  # 0: not traced
    seccomp: int  # 0 none, 1 strict, 2 filter
    cap_eff: int
    rss: int  # bytes
    kernel_thread: bool

    @property
    def identity(self) -> ProcessIdentity:
        """PID and start time."""
        return ProcessIdentity(self.pid, self.start_time)

    @property
    def ns_pid(self) -> int:
        """Its PID in its own PID namespace."""
        return self.ns_pids[-1]

    @property
    def uid(self) -> int:
        """Effective user id."""
        return self.uids[1]

    @property
    def gid(self) -> int:
        """Effective group id."""
        return self.gids[1]

    @property
    def zombie(self) -> bool:
        """Whether it is dead and not reaped."""
        return self.state in "ZXx"

    def __str__(self) -> str:
        return f"{self.pid} ({self.command})"


def _ids(value: bytes) -> tuple[int, int, int, int]:
    real, effective, saved, filesystem = (int(word) for word in value.split())
    return real, effective, saved, filesystem


def _link_or_empty(pid: int, name: str) -> str:
    """Return the link of a process that exists; zombies and kernel threads have none."""
    try:
        return read_link(pid, name)
    except NoSuchProcess:
        return ""


def read_process(pid: int) -> Process:
    """Read all properties of a process now.

    `NoSuchProcess`, `PreflightRefused` (no permission to look).
    """
    stat = _Stat.of(pid)
    status: dict[bytes, bytes] = {}
    for line in read_bytes(pid, "status").split(b"\n"):
        key, _, value = line.partition(b":")
        status[key] = value.strip()
    exe = _link_or_empty(pid, "exe")
    cwd = _link_or_empty(pid, "cwd")
    cmdline = read_text(pid, "cmdline")
    # Unlike a missing link, a changed start time means that the PID now belongs to another process.
    if _Stat.of(pid).start_time != stat.start_time:
        raise NoSuchProcess(f"there is no process with PID {pid} any more")
    return Process(
        pid=pid,
        ns_pids=tuple(int(word) for word in status.get(b"NSpid", str(pid).encode()).split()),
        ppid=stat.ppid,
        pgid=stat.pgid,
        sid=stat.sid,
        start_time=stat.start_time,
        command=stat.command,
        argv=tuple(cmdline.rstrip("\0").split("\0")) if cmdline else (),
        exe=exe.removesuffix(_DELETED),
        exe_deleted=exe.endswith(_DELETED),
        cwd=cwd,
        uids=_ids(status[b"Uid"]),
        gids=_ids(status[b"Gid"]),
        state=stat.state,
        threads=stat.threads,
        tty_nr=stat.tty_nr & 0xFFFFFFFF,
        tracer_pid=int(status[b"TracerPid"]),
        seccomp=int(status.get(b"Seccomp", b"0")),
        cap_eff=int(status.get(b"CapEff", b"0"), 16),
        rss=stat.rss_pages * os.sysconf("SC_PAGE_SIZE"),
        kernel_thread=bool(stat.flags & _PF_KTHREAD),
    )


def children(pid: int) -> list[int]:
    """Return the PIDs of the children of all threads of `pid`, ascending; `NoSuchProcess`."""
    with reading(pid):
        threads = os.listdir(f"/proc/{pid}/task")
    found: set[int] = set()
    for tid in threads:
        try:
            found.update(map(int, read_raw(f"/proc/{pid}/task/{tid}/{_CHILDREN}").split()))
        except FileNotFoundError:
            if not _kernel_lists_children():
                return _children_by_scan(pid)
        except ProcessLookupError:
            # the thread ended; its children belong to another thread now, and the next walk finds
            # them
            pass
    return sorted(found)


def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/{_CHILDREN}")


def _children_by_scan(parent: int) -> list[int]:
    found = []
    for pid in all_pids():
        try:
            if _Stat.of(pid).ppid == parent:
                found.append(pid)
        except NoSuchProcess:
            continue
    return found


def members(numbers: Collection[int]) -> dict[int, list[int]]:
    """Return the processes in each of these process groups and sessions.

    Numbers that are no process group or session here are left out.
    """
    found: dict[int, list[int]] = {}
    for pid in all_pids():
        try:
            data = read_bytes(pid, "stat")
        except NoSuchProcess:
            continue
        _state, _ppid, pgid, sid = data[data.rindex(b")") + 2 :].split(maxsplit=4)[:4]
        for number in {int(pgid), int(sid)}.intersection(numbers):
            found.setdefault(number, []).append(pid)
    return found


def running_for(pid: int, seconds: float) -> bool:
    """Return whether the process has run for that long, so that it had this PID at that time."""
    try:
        started = ProcessIdentity.of(pid).start_time / os.sysconf("SC_CLK_TCK")
    except NoSuchProcess:
        return False
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started > seconds


def walk(root: int) -> list[int]:
    """Return the PIDs of the tree, root first, parents before children, siblings ascending."""
    order, seen, position = [root], {root}, 0
    while position < len(order):
        try:
            below = children(order[position])
        except NoSuchProcess:
            if order[position] == root:
                raise
            below = []
        order += [pid for pid in below if pid not in seen]
        seen.update(below)
        position += 1
    return order


@contextmanager
def ends_reported(tree: Sequence[Process]) -> Iterator[None]:
    """Raise `NoSuchProcess` for a failure to read or to parse inside the block, if the tree is not
    what it was when it was read.

    The last resort: no reader that forgets that a process may end is a bug to the user.
    """
    try:
        yield
    except UNREADABLE as error:
        if (isinstance(error, OSError) and error.errno not in _OF_ENDED) or not _changed(tree):
            raise
        raise NoSuchProcess(
            f"a process of the tree of PID {tree[0].pid} has ended while it was read",
            hint="Run the command again.",
        ) from error


def _changed(tree: Sequence[Process]) -> bool:
    """Return whether a process has ended, or has a new child."""
    try:
        now = set(walk(tree[0].pid))
    except NoSuchProcess:
        return True
    return now != {process.pid for process in tree} or any(
        ending(process.pid) for process in tree if not process.zombie
    )


def read_tree(root: int) -> list[Process]:
    """Return the process `root` and all its descendants, root first, parents before children.

    Zombies are included. Raises `NoSuchProcess` if the root does not exist, `PreflightRefused` if
    the kernel does not permit reading it.
    """
    before: list[int] = []
    tree: list[Process] = []
    for _ in range(_MAX_WALKS):
        pids = walk(root)
        if pids == before and len(tree) == len(pids):
            break
        before = pids
        tree = []
        for pid in pids:
            try:
                tree.append(read_process(pid))
            except NoSuchProcess:
                if pid == root:
                    raise
    return tree


def wait_gone(identities: Iterable[ProcessIdentity], timeout: float) -> list[ProcessIdentity]:
    """Wait until all these processes are gone *and reaped*.

    Return those still there after `timeout`. A zombie still holds its PID, which matters for a
    restore, so it counts as there. The exit is awaited on pidfds, for a limited number of
    processes. The kernel reports reaping only to the parent, so between exit and reaping the state
    is polled with a bounded backoff.
    """
    deadline = time.monotonic() + timeout
    left = [identity for identity in identities if identity.exists()]
    poller = select.poll()
    watched: dict[int, ProcessIdentity] = {}
    pause = 0.001
    try:
        for identity in left[:_WATCHED]:
            try:
                fd = identity.open_pidfd()
            except NoSuchProcess:
                continue
            watched[fd] = identity
            poller.register(fd, select.POLLIN)
        while left:
            remaining = deadline - time.monotonic()
            running = set(watched.values())
            if set(left) - running:
                remaining = min(remaining, pause)
                pause = min(pause * 2, 0.05)
            for fd, _event in poller.poll(max(0.0, remaining) * 1000):
                poller.unregister(fd)
                del watched[fd]
                os.close(fd)
                pause = 0.001
            left = [identity for identity in left if identity.exists()]
            if time.monotonic() >= deadline:
                break
    finally:
        for fd in watched:
            os.close(fd)
    return left


def wait_ended(identities: Iterable[ProcessIdentity], timeout: float) -> list[ProcessIdentity]:
    """Wait until none of these processes runs any more, reaped or not.

    Returns those that still run after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    left = list(identities)
    for identity in left:
        try:
            fd = identity.open_pidfd()
        except NoSuchProcess:
            continue
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(fd)
    return [identity for identity in left if identity.alive()]
