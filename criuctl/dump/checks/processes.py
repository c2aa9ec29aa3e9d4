"""Check processes and threads: other programs that control them, and states that cannot be
frozen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...errors import NoSuchProcess
from ...proc.limits import CAP_SYS_RESOURCE
from ...proc.procfs import read_lines, read_raw, read_text
from ...proc.syscalls import KCMP_FILES, KCMP_FS, KCMP_SIGHAND, KCMP_VM, shares
from ...proc.tree import Process, children
from ...proc.vforks import waits_in_vfork
from ...quoting import quoted
from ...report import Finding
from .connections import PASSES
from .limits import check_limits
from .scene import Scene
from .sessions import check_sessions

_SIGTRAP_BIT = 1 << 4
_POLICIES = frozenset({os.SCHED_OTHER, os.SCHED_FIFO, os.SCHED_RR, os.SCHED_BATCH, os.SCHED_IDLE})
_SHARED = {
    KCMP_VM: "its memory",
    KCMP_FS: "its working folder, root and umask",
    KCMP_SIGHAND: "its signal handlers",
}
_THREADS_OWN = ("net", "mnt", "uts", "ipc")  # namespaces that a single thread can enter
_ASKED = ("TracerPid:\t", "SigPnd:\t", "ShdPnd:\t")
_EXITING = 0x4  # PF_EXITING, among the flags of /proc/PID/stat
# how many looks, and seconds between them, to see whether a process wakes up
_LOOKS, _LOOK = 10, 0.01


def check_processes(scene: Scene) -> Iterator[Finding]:
    """Check every process by itself."""
    stuck, leaderless, vforking = _stuck(scene.tree), _leaderless(scene.tree), _vforking(scene.tree)
    may_raise_limits = scene.own_capabilities >> CAP_SYS_RESOURCE & 1
    for process in scene.tree:
        if process.pid in leaderless:
            yield Finding(
                "error",
                "leader-gone",
                f"the main thread of {process} has ended, {process.threads - 1} other threads "
                "run on; CRIU cannot save that",
                "Wait until the process ends, or have it changed to keep its main thread.",
                pid=process.pid,
            )
            continue
        if process.zombie:
            continue
        yield from _threads(scene, process)
        yield from check_limits(scene, process)
        if process.pid in vforking:
            yield _vfork(scene, process)
        elif process.pid in stuck:
            yield Finding(
                "warning",
                "uninterruptible",
                f"{process} sleeps uninterruptibly in the kernel ({_wait_channel(process.pid)}) "
                "and cannot be frozen until then",
                "To free a process that waits for a file server that does not answer, end that "
                "server.",
                pid=process.pid,
            )
        if not may_raise_limits and set(process.uids + process.gids) - set(scene.own_ids):
            yield Finding(
                "error",
                "foreign-user",
                f"{process} runs as user {process.uid} and group {process.gid}; CRIU cannot read "
                "its limits without CAP_SYS_RESOURCE, which criuctl lacks here",
                "Give criuctl CAP_SYS_RESOURCE (ordinary hosts have it; some containers drop "
                "it), or run the program as root.",
                pid=process.pid,
            )
    yield from _shared(scene)
    yield from check_sessions(scene)


def _shared(scene: Scene) -> Iterator[Finding]:
    """Report what a process shares with its parent as threads do (clone(2) with CLONE_VM,
    CLONE_FS); descriptors may be shared.

    The child of a vfork(2) does so until it starts its program; its parent waits for that.
    """
    pairs = [(process, process.ppid) for process in scene.living[1:]]
    for look in range(_LOOKS):
        pairs = [pair for pair in pairs if _shared_by(*pair) and not _waits_for_child(pair[1])]
        if not pairs:
            return
        if look:
            time.sleep(_LOOK)
    for process, parent in pairs:
        if found := _shared_by(process, parent):
            yield Finding(
                "error",
                "shared-with-parent",
                f"{process} shares {' and '.join(found)} with its parent "
                f"{scene.command_of(parent)}, as threads do; CRIU cannot "
                "save that",
                "End it before the dump, or have the program fork instead.",
                pid=process.pid,
            )


def _shared_by(process: Process, parent: int) -> list[str]:
    return [
        words for what, words in _SHARED.items() if shares(process.pid, parent, what, unknown=False)
    ]


def _waits_for_child(pid: int) -> bool:
    """Return whether one of its threads sleeps uninterruptibly, as in vfork(2)."""
    for tid in _thread_ids(pid):
        try:
            if read_raw(f"/proc/{pid}/task/{tid}/stat").rpartition(b")")[2].split()[0] == b"D":
                return True
        except OSError:  # it has ended
            continue
    return False


def _threads(scene: Scene, process: Process) -> Iterator[Finding]:
    """Check tracers, pending SIGTRAPs and scheduling policies, which each thread has separately."""
    reported: set[int] = set()
    trapped = scheduled = False
    pid = process.pid
    threads = [str(pid)] if process.threads == 1 else _thread_ids(pid)
    if len(threads) > 1:
        yield from _own(process, threads)
    for tid in threads:
        try:
            status = dict(
                line.split(":\t", 1)
                for line in read_lines(pid, f"task/{tid}/status")
                if line.startswith(_ASKED)
            )
        except NoSuchProcess:
            continue
        tracer = int(status.get("TracerPid", "0"))
        if tracer and tracer not in reported:
            reported.add(tracer)
            whose = "from inside the tree" if tracer in scene.by_pid else "from outside"
            yield Finding(
                "error",
                "traced",
                f"{process} is traced by process {scene.command_of(tracer)} {whose}; a process can "
                "have only one tracer, and CRIU has to be it",
                "End the tracer or have it detach (in gdb: `detach`; strace: end it with ^C).",
                pid=pid,
            )
        pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
        if pending & _SIGTRAP_BIT and not trapped:
            trapped = True
            yield Finding(
                "error",
                "pending-sigtrap",
                f"{process} has a SIGTRAP pending; CRIU cannot stop it cleanly",
                "Have the program unblock and take the signal first.",
                pid=pid,
            )
        if not scheduled and _policy(int(tid)) not in _POLICIES:
            scheduled = True
            yield Finding(
                "error",
                "scheduling-policy",
                f"{process} is scheduled by deadlines or a policy newer than that; CRIU would save "
                "it, and never restore it",
                f"Give it another policy: `chrt --all-tasks --other --pid 0 {pid}`.",
                pid=pid,
            )


def _own(process: Process, threads: Sequence[str]) -> Iterator[Finding]:
    """Report what threads do not share with their process (unshare(2), setns(2)): CRIU saves only
    the main thread's.
    """
    pid = process.pid
    own = _namespaces(pid, str(pid))
    for what, differs in (
        (
            "descriptors of their own",
            lambda tid: not shares(pid, int(tid), KCMP_FILES) and not _ends(pid, tid),
        ),
        (
            "a working folder, root and umask of their own",
            lambda tid: not shares(pid, int(tid), KCMP_FS) and not _ends(pid, tid),
        ),
        ("another namespace", lambda tid: _namespaces(pid, tid) not in (own, ())),
    ):
        if own and (found := sum(map(differs, threads))):
            yield Finding(
                "warning",
                "thread-apart",
                f"{found} of the {len(threads)} threads of {process} have {what}; after a "
                "restore they have what the main thread has",
                "Dump it at a time when it has no such threads, or have the work done by "
                "processes.",
                pid=pid,
            )


def _ends(pid: int, tid: str) -> bool:
    """Return whether a thread, or the main thread, is just ending, and so has released what they
    shared.
    """
    try:
        return any(
            int(read_text(pid, f"task/{one}/stat").rpartition(")")[2].split()[6]) & _EXITING
            for one in (str(pid), tid)
        )
    except NoSuchProcess:
        return True


def _namespaces(pid: int, tid: str) -> tuple[str, ...]:
    """Return the namespaces that a single thread can have; () if it has ended."""
    try:
        return tuple(os.readlink(f"/proc/{pid}/task/{tid}/ns/{kind}") for kind in _THREADS_OWN)
    except OSError:
        return ()


def _policy(tid: int) -> int:
    try:
        return os.sched_getscheduler(tid) & ~os.SCHED_RESET_ON_FORK
    except OSError:  # it has ended
        return os.SCHED_OTHER


def _thread_ids(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _stuck(tree: Sequence[Process]) -> set[int]:
    """Return the processes that sleep uninterruptibly and still do a little later.

    Reading a disk takes moments, which a freeze waits out.
    """
    found = [process for process in tree if process.state == "D"]
    for _ in range(_LOOKS):
        if found:
            time.sleep(_LOOK)
        found = [process for process in found if process.identity.state() == "D"]
    return {process.pid for process in found}


def _vforking(tree: Sequence[Process]) -> set[int]:
    """Return the processes that wait in vfork(2) and still do a little later; most children start
    their program within moments.
    """
    found = [process.pid for process in tree if not process.zombie and waits_in_vfork(process.pid)]
    for _ in range(_LOOKS):
        if found:
            time.sleep(_LOOK)
        found = [pid for pid in found if waits_in_vfork(pid)]
    return set(found)


def _vfork(scene: Scene, process: Process) -> Finding:
    borrowers: list[int] = []
    with suppress(NoSuchProcess):
        borrowers = [
            pid for pid in children(process.pid) if shares(pid, process.pid, KCMP_VM, unknown=False)
        ]
    child = f"its child {scene.command_of(borrowers[0])}" if borrowers else "a child"
    end = f"end the child: `kill {quoted(borrowers[0])}`" if borrowers else "end that"
    return Finding(
        "error",
        "vfork",
        f"{process} waits in vfork(2) until {child} starts its program or ends; before that it "
        "cannot be frozen",
        f"{PASSES} with that: try again; where it does not, {end}.",
        pid=process.pid,
    )


def _leaderless(tree: Sequence[Process]) -> set[int]:
    """Return the processes whose main thread has ended while others run on.

    Every process that ends with threads is in this state for a moment.
    """
    found = [process for process in tree if process.zombie and process.threads > 1]
    for _ in range(_LOOKS):
        if found:
            time.sleep(_LOOK)
        found = [
            process
            for process in found
            if process.identity.exists() and len(_thread_ids(process.pid)) > 1
        ]
    return {process.pid for process in found}


def _wait_channel(pid: int) -> str:
    try:
        return read_text(pid, "wchan") or "unknown"
    except (NoSuchProcess, OSError):
        return "unknown"
