"""What CRIU 4.2 loses on a restore and criuctl puts right.

Each of these was seen with the state oracle of the tests, on programs that CRIU dumps and restores without a
word of complaint:

- POSIX locks on a file that the process has also mapped are gone: the restorer closes a descriptor of the file
  after it has set them.  Mended in post-restore, by having the process itself set them once more.
- An orphan is adopted by whoever is the subreaper *around* the tree, because the tree's own subreaper gets that role
  back too late; where it has ended and was not reaped, the restore waits for it for ever.  Mended by giving the root its
  role as soon as it exists (`criuctl.ops.restores.earlytasks`).
- A mapping larger than memory and swap (address space that a program has reserved, a heap that grew there bit by bit) is
  refused to CRIU, which makes each at once and writable.  Mended in the images: made without a reservation.
- A connection that its peer had closed before the dump may be reset: CRIU lets its socket see the peer's FIN again,
  and the kernel may put the acknowledgement off until the firewall lock is down.  Then it meets nobody, or a listener,
  and is answered by a reset.  Mended in post-restore: acknowledged at once, while the lock drops it.
- An epoll that a process shares with its children is made by whichever of them has the lowest PID, which may not have (or have
  something else under the number of) a descriptor that is watched: the restore fails, or it watches something else.  Mended
  by taking such watches out of the images; in post-restore the process that CRIU had read them from adds them itself.
- An inotify descriptor or pidfd with more flags than it can be made with (``O_ASYNC``) fails the restore.  What CRIU opens by
  a path (a terminal, a named pipe) has ``O_ASYNC`` afterwards, but no signal is ever sent: open(2) does not see to that, nor can
  the flag be taken off again.  Elsewhere the signal tells the number of the descriptor that CRIU had made first (``si_fd``).
  Mended in the images, without those flags; in post-restore the process sets them itself.  So it does with the signal and its
  owner (``F_SETOWN``) where the descriptor is inherited from criuctl, as a terminal from outside: CRIU forgets them.
- A thread that a signal tells of a descriptor (``F_SETOWN_EX``) fails the restore: CRIU makes descriptors before threads.  So
  does a process outside of the tree that has ended.  Mended in the images: without that owner.  In post-restore the process
  sets a thread itself; who is outside, and not the very one it was, is told.
- A root that wants a signal when its parent ends (``PR_SET_PDEATHSIG``, often SIGKILL) gets it at once: its parent is CRIU,
  which ends.  Mended in the images: without that wish, and told.
- A System V shared memory segment that was removed, to end with its last user (IPC_RMID), stays for ever.  Mended in
  post-restore: removed again, in the tree's IPC namespace.
- Limits, and the OOM score, that only CAP_SYS_RESOURCE may raise stay as they are for criuctl.  Not mended but told.

For locks, orphans, flags and epolls a system call is run inside the process (`criuctl.proc.inject`).  What could not be mended
is told.  System calls that the freeze has interrupted: see `criuctl.repairs`.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ...criu.images import ImageSet, read, write
from ...errors import CriuctlError, NoSuchProcess, RestoreFailed
from ...proc import inject
from ...proc.limits import CAP_SYS_RESOURCE, effective_capabilities
from ...proc.namespaces import in_ipc_namespace
from ...proc.procfs import memory_info, read_text
from ...proc.syscalls import borrow_socket, remove_shared_memory
from ...proc.tree import ProcessIdentity
from ...report import Reporter

_FL_POSIX = 1
_F_SETLK = 6
_F_SETSIG, _F_SETOWN_EX = 10, 15
_OWNER_THREAD, _OWNER_GROUP = 0, 2  # F_OWNER_TID, F_OWNER_PGRP
_SHM_DEST = 0o1000
_FLOCK = struct.Struct("=hhxxxxqqixxxx")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux
_EPOLL_EVENT = struct.Struct("=IQ")  # events, data; packed on x86-64
_EPOLL_CTL_ADD = 1
_BELOW_STACK = 4096  # far below the red zone, well inside the stack's mapping
_MADE_WITH = {"ify": os.O_NONBLOCK | os.O_CLOEXEC, "pidfd": os.O_NONBLOCK}  # kind -> the flags that it can be made with
_REALTIME = 32  # signals from here on have no names
_LIMITS = {getattr(resource, name): name for name in dir(resource) if name.startswith("RLIMIT_")}
_MAP_PRIVATE, _MAP_NORESERVE = 0x2, 0x4000


def unreserve(images: ImageSet) -> None:
    """Let the kernel, which by default refuses a single mapping for which it could never have memory, make such ones again."""
    told = memory_info()
    room = sum(int(told[key].split()[0]) for key in ("MemTotal", "SwapTotal")) << 10
    for name in images.names():
        if not re.fullmatch(r"mm-\d+\.img", name):
            continue
        memories = read(images.folder, name, "MM")
        large = [v for m in memories for v in m.vmas if v.flags & _MAP_PRIVATE and v.end - v.start > room]
        for area in large:
            area.flags |= _MAP_NORESERVE
        if large:
            write(images.folder, name, "MM", memories)


def drop_parent_signal(images: ImageSet, reporter: Reporter) -> None:
    """The root's wish for a signal when its parent ends: taken out, in each of its threads."""
    root = read(images.folder, "pstree.img", "PSTREE")[0]
    for thread in root.threads:
        cores = read(images.folder, f"core-{thread}.img", "CORE")
        if number := cores[0].thread_core.pdeath_sig:
            cores[0].thread_core.ClearField("pdeath_sig")
            write(images.folder, f"core-{thread}.img", "CORE", cores)
            name = signal.Signals(number).name if number < _REALTIME else f"signal {number}"
            reporter.warning(
                f"PID {root.pid}: its wish for {name} when its parent ends is dropped: that one is gone",
                "Dump the parent with it, or run the program as a session (`criuctl run`).",
            )


def part_flags(images: ImageSet) -> dict[tuple[int, int], int]:
    """Take out of the images the flags that can be given only to a descriptor that is there.

    Returns (PID, descriptor) of one that is to be given them in post-restore -> all of its status flags.
    """
    if not any(_unopenable(e) for e in images.files()):
        return {}
    holder = _holder(images)
    parted: dict[tuple[int, int], int] = {}

    def edit(entry: Any) -> None:
        lost, held = _unopenable(entry), holder(entry)
        if lost and held:
            parted[held] = _file(entry).flags
            _file(entry).flags &= ~lost

    images.edit_files(edit)
    return parted


def _holder(images: ImageSet) -> Callable[[Any], tuple[int, int] | None]:
    """Tells of an entry the (PID, descriptor) that CRIU has read it from."""
    holders = images.holders()
    # What is opened by a path of its own.
    opened_by = {f.regf_id: e.id for e in images.files() for f in (e.fifo, e.tty) if f.HasField("regf_id")}
    return lambda entry: next(iter(holders.get(opened_by.get(entry.id, entry.id), ())), None)


def _file(entry: Any) -> Any:
    return next((value for _, value in entry.ListFields() if hasattr(value, "flags")), None)


def _unopenable(entry: Any) -> int:
    file = _file(entry)
    if file is None:
        return 0
    flags: int = file.flags & next((~taken for kind, taken in _MADE_WITH.items() if entry.HasField(kind)), os.O_ASYNC)
    return flags


def set_flags(parted: Mapping[tuple[int, int], int], pids: Mapping[int, int], reporter: Reporter) -> None:
    """Have each of these processes set what `part_flags` has taken out: a signal tells the number of who has asked for it."""
    for (inner, fd), flags in parted.items():
        try:
            with inject.stopped(pids[inner]):
                result = inject.call(pids[inner], inject.FCNTL, fd, fcntl.F_SETFL, flags)
            if result < 0:
                raise OSError(-result, os.strerror(-result))
        except (OSError, KeyError, CriuctlError) as error:
            reporter.warning(f"PID {inner}: descriptor {fd} has not all of its flags (O_ASYNC, O_APPEND): {error}")


def part_owners(images: ImageSet, age: float | None, reporter: Reporter) -> dict[tuple[int, int], Any]:
    """Take out of the images the owners of descriptors that are not there, or not yet, when CRIU gives them back.

    `age`: of the checkpoint, in seconds, where its tree comes back to whoever was around it.  Returns (PID, descriptor) ->
    CRIU's fown_entry; those that are there in post-restore have a PID, the others, which are told, have none.
    """
    tree = read(images.folder, "pstree.img", "PSTREE")
    processes, threads = {entry.pid for entry in tree}, {thread for entry in tree for thread in entry.threads}
    groups = processes | {entry.pgid for entry in tree} - {tree[0].pgid}  # the root's may be one of outside

    def there(owner: Any) -> bool:
        if owner.pid in (groups if owner.pid_type == _OWNER_GROUP else processes):
            return True
        return owner.pid not in threads and age is not None and older(owner.pid, age)

    if all(there(owner) for entry in images.files() if (owner := _owner(entry)) is not None):
        return {}
    holder = _holder(images)
    parted: dict[tuple[int, int], Any] = {}

    def edit(entry: Any) -> None:
        owner, held = _owner(entry), holder(entry)
        if owner is not None and not there(owner):
            if held:
                parted[held] = type(owner).FromString(owner.SerializeToString())
            owner.pid = 0

    images.edit_files(edit)
    gone: dict[str, list[tuple[int, int]]] = {}
    for held, owner in parted.items():
        if owner.pid_type != _OWNER_THREAD or owner.pid not in threads:
            what = "process group" if owner.pid_type == _OWNER_GROUP else "PID"
            gone.setdefault(f"{what} {owner.pid}", []).append(held)
            owner.pid = 0
    for who, ((pid, fd), *others) in gone.items():
        more = f" and {len(others)} more" if others else ""
        reporter.warning(f"PID {pid}: {who}, outside, no longer gets a signal for descriptor {fd}{more} (F_SETOWN)")
    return parted


def _owner(entry: Any) -> Any:
    owners = (value.fown for _, value in entry.ListFields() if hasattr(value, "fown"))
    return next((owner for owner in owners if owner.pid), None)


def older(pid: int, seconds: float) -> bool:
    """Whether the process has been there for so long: then it is the one that had this PID that long ago."""
    try:
        started = ProcessIdentity.of(pid).start_time / os.sysconf("SC_CLK_TCK")
    except NoSuchProcess:
        return False
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started > seconds


def set_owners(owners: Mapping[tuple[int, int], Any], pids: Mapping[int, int], reporter: Reporter) -> None:
    """Have processes say again whom a signal tells of a descriptor's input, before `set_flags`; CRIU's fown_entry of each."""
    for (inner, fd), owner in owners.items():
        try:
            with inject.stopped(pids[inner]):
                data = struct.pack("=iI", owner.pid_type, owner.pid)
                result = _call_with(pids[inner], data, inject.FCNTL, fd, _F_SETOWN_EX) if owner.pid else 0
                if result >= 0 and owner.signum:
                    result = inject.call(pids[inner], inject.FCNTL, fd, _F_SETSIG, owner.signum)
            if result < 0:
                raise OSError(-result, os.strerror(-result))
        except (OSError, KeyError, CriuctlError) as error:
            reporter.warning(f"PID {inner}: nobody gets a signal for descriptor {fd} (F_SETOWN, F_SETSIG): {error}")


def posix_locks(images: ImageSet) -> list[Any]:
    """The POSIX locks of the images, as CRIU's file_lock_entry."""
    if "filelocks.img" not in os.listdir(images.folder):
        return []
    return [e for e in read(images.folder, "filelocks.img", "FILE_LOCKS") if e.flag & _FL_POSIX]


def acknowledge(images: ImageSet, pids: Mapping[int, int]) -> None:
    """Let every connection whose peer has closed send its acknowledgement now; `pids` are the tree's PIDs -> ours."""
    for closed in images.closed_by_peer():
        for pid, fd in closed.holders[:1]:
            pidfd = os.pidfd_open(pids[pid])
            try:
                with borrow_socket(pidfd, fd) as sock:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            finally:
                os.close(pidfd)


def remove_segments(images: ImageSet, root: int, reporter: Reporter) -> None:
    """Have shared memory that was to end with its last user do so; `root` is in the tree's IPC namespace."""
    names = [name for name in images.names() if name.startswith("ipcns-shm-")]
    removed = [e.desc.id for name in names for e in read(images.folder, name, "IPCNS_SHM") if e.desc.mode & _SHM_DEST]
    if removed:
        try:
            in_ipc_namespace(root, lambda: remove_shared_memory(*removed))
        except OSError as error:
            numbers = ", ".join(map(str, removed))
            reporter.warning(f"System V shared memory (shmid {numbers}) does not end with its users: {error}")


def set_locks(locks: list[Any], pids: Mapping[int, int], reporter: Reporter) -> None:
    """Have each process set its POSIX locks again; setting one that is still held changes nothing."""
    for inner in {lock.pid for lock in locks}:
        try:
            with inject.stopped(pids[inner]):
                for lock in (lk for lk in locks if lk.pid == inner):
                    _set_lock(pids[inner], lock)
        except (OSError, KeyError, CriuctlError) as error:
            reporter.warning(f"PID {inner}: its file locks could not be made sure of: {error}")


def _set_lock(pid: int, lock: Any) -> None:
    flock = _FLOCK.pack(lock.type, os.SEEK_SET, lock.start, lock.len, 0)
    result = _call_with(pid, flock, inject.FCNTL, lock.fd, _F_SETLK)
    if result < 0:
        raise OSError(-result, f"lock of descriptor {lock.fd}: {os.strerror(-result)}")


def part_watches(images: ImageSet) -> dict[tuple[int, int], list[Any]]:
    """Take out of the images what an epoll's maker could not watch.

    Returns (PID, the epoll's descriptor) of who can -> CRIU's eventpoll_tfd_entry of each.
    """
    if not any(e.HasField("epfd") and e.epfd.tfd for e in images.files()):
        return {}
    holders = images.holders()
    numbers = {(pid, fd): number for number, held in holders.items() for pid, fd in held}  # file ids
    parted: dict[tuple[int, int], list[Any]] = {}

    def edit(entry: Any) -> None:
        held = holders.get(entry.id, ())
        if not entry.HasField("epfd") or not held:
            return
        reader, maker = held[0], min(held)[0]  # at the dump the first of the tree, at the restore the lowest PID
        watches = list(entry.epfd.tfd)
        strange = [w for w in watches if numbers.get((maker, w.tfd)) != numbers.get((reader[0], w.tfd))]
        if strange:
            parted[reader] = strange
            del entry.epfd.tfd[:]
            entry.epfd.tfd.extend(w for w in watches if w not in strange)

    images.edit_files(edit)
    return parted


def set_watches(parted: Mapping[tuple[int, int], list[Any]], pids: Mapping[int, int]) -> None:
    """Have each of these processes watch again what `part_watches` has taken out."""
    for (inner, epoll), watches in parted.items():
        pid = pids[inner]
        with inject.stopped(pid):
            for watch in watches:
                event = _EPOLL_EVENT.pack(watch.events, watch.data)
                result = _call_with(pid, event, inject.EPOLL_CTL, epoll, _EPOLL_CTL_ADD, watch.tfd)
                if result < 0:
                    raise RestoreFailed(
                        f"PID {inner}: descriptor {watch.tfd} cannot be watched by epoll {epoll} again: {os.strerror(-result)}"
                    )


def _call_with(pid: int, data: bytes, number: int, *arguments: int) -> int:
    """The result of a system call whose last argument, behind `arguments`, is the address of `data` in the process."""
    address = (inject.stack_pointer(pid) - _BELOW_STACK) & ~0xF
    saved = inject.read_memory(pid, address, len(data))
    try:
        inject.write_memory(pid, address, data)
        return inject.call(pid, number, *arguments, address)
    finally:
        inject.write_memory(pid, address, saved)


def needs_subreaper(images: ImageSet) -> bool:
    """Whether the root adopts orphans, and CRIU has a helper fork some of its children: in a session that is not the root's."""
    tree = read(images.folder, "pstree.img", "PSTREE")
    core = read(images.folder, f"core-{tree[0].pid}.img", "CORE")[0]
    if not core.tc.child_subreaper:
        return False
    return any(entry.ppid == tree[0].pid and entry.sid not in (tree[0].sid, entry.pid) for entry in tree[1:])


def tell_limits(images: ImageSet, pids: Mapping[int, int], reporter: Reporter) -> None:
    """Warn of what CRIU could not raise to what it was; it says nothing itself."""
    if effective_capabilities() >> CAP_SYS_RESOURCE & 1:
        return
    found: dict[str, list[str]] = {}
    for inner in images.pids():
        core = read(images.folder, f"core-{inner}.img", "CORE")[0]
        if inner in pids and core.HasField("tc"):
            with suppress(OSError, NoSuchProcess):  # it has ended; nothing to tell
                if lowered := ", ".join(_lowered(pids[inner], core.tc)):
                    found.setdefault(lowered, []).append(str(inner))
    for lowered, whose in found.items():
        reporter.warning(
            f"PID {', '.join(whose)}: {lowered}: not restored",
            "Raising that needs CAP_SYS_RESOURCE, which criuctl lacks; start criuctl itself with such limits.",
        )


def _lowered(pid: int, told: Any) -> Iterator[str]:
    for number, limit in enumerate(told.rlimits.rlimits):
        before = [-1 if value >= 1 << 63 else value for value in (limit.cur, limit.max)]
        after = list(resource.prlimit(pid, number))
        if after != before:
            before_text, after_text = ("/".join("unlimited" if v == -1 else str(v) for v in pair) for pair in (before, after))
            yield f"{_LIMITS.get(number, f'limit {number}')} is {after_text}, it was {before_text}"
    score = int(read_text(pid, "oom_score_adj"))
    if told.HasField("oom_score_adj") and score != told.oom_score_adj:
        yield f"oom_score_adj is {score}, it was {told.oom_score_adj}"
