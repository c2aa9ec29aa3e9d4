"""Processes and threads: who else has a hand on them, and which states cannot be frozen."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...errors import NoSuchProcess
from ...host.target import ancestors
from ...proc.limits import CAP_SYS_RESOURCE
from ...proc.procfs import read_lines, read_raw, read_text
from ...proc.syscalls import KCMP_FILES, KCMP_FS, KCMP_SIGHAND, KCMP_VM, shares
from ...proc.tree import Process, ProcessIdentity, children, members
from ...proc.vforks import waits_in_vfork
from ...quoting import quoted
from ...report import Finding
from .connections import PASSES
from .scene import Scene

_SIGTRAP_BIT = 1 << 4
_POLICIES = frozenset({os.SCHED_OTHER, os.SCHED_FIFO, os.SCHED_RR, os.SCHED_BATCH, os.SCHED_IDLE})
_ROOM = 4  # descriptors that CRIU opens inside a process to look at it
_HELPER = 64 << 10  # bytes that it maps there for that, at least
_HELPER_MAPPINGS = 2
_SERVICE, _PAD, _ALIGNMENT = 16, 16, 128  # CRIU: criu/servicefd.c, choose_service_fd_base()
_SHARED = {
    KCMP_VM: "its memory",
    KCMP_FS: "its working folder, root and umask",
    KCMP_SIGHAND: "its signal handlers",
}
_THREADS_OWN = ("net", "mnt", "uts", "ipc")  # namespaces that a thread may enter alone
_ASKED = ("TracerPid:\t", "SigPnd:\t", "ShdPnd:\t")
_EXITING = 0x4  # PF_EXITING, among the flags of /proc/PID/stat
_LOOKS, _LOOK = 10, 0.01  # how often, and seconds between, to look whether a process wakes up


def check_processes(scene: Scene) -> Iterator[Finding]:
    """Every process by itself."""
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
        yield from _numbers(scene, process)
        yield from _address_space(process)
        yield from _mappings(scene, process)
        if process.pid in vforking:
            yield _vfork(scene, process)
        elif process.pid in stuck:
            yield Finding(
                "warning",
                "uninterruptible",
                f"{process} sleeps uninterruptibly in the kernel ({_wait_channel(process.pid)}) "
                "and cannot be frozen until then",
                "A process that waits for a file server that does not answer is freed by ending "
                "that.",
                pid=process.pid,
            )
        if not may_raise_limits and set(process.uids + process.gids) - set(scene.own_ids):
            yield Finding(
                "error",
                "foreign-user",
                f"{process} runs as user {process.uid} and group {process.gid}; CRIU cannot read "
                "its limits without "
                "CAP_SYS_RESOURCE, which criuctl lacks here",
                "Give criuctl CAP_SYS_RESOURCE (ordinary hosts have it; some containers drop "
                "it), or run the program as root.",
                pid=process.pid,
            )
    yield from _shared(scene)
    yield from _sessions(scene)
    yield from _lost_sessions(scene)


def _shared(scene: Scene) -> Iterator[Finding]:
    """What a process shares with its parent as threads do (clone(2) with CLONE_VM, CLONE_FS);
    descriptors may be shared.

    The child of a vfork(2) does until it starts its program, for which its parent waits.
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
    """Whether one of its threads sleeps uninterruptibly, as in vfork(2)."""
    for tid in _thread_ids(pid):
        try:
            if read_raw(f"/proc/{pid}/task/{tid}/stat").rpartition(b")")[2].split()[0] == b"D":
                return True
        except OSError:  # it has ended
            continue
    return False


def _threads(scene: Scene, process: Process) -> Iterator[Finding]:
    """Tracers, pending SIGTRAPs and scheduling policies, which are a thread's own."""
    told: set[int] = set()
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
        if tracer and tracer not in told:
            told.add(tracer)
            whose = "from inside the tree" if tracer in scene.by_pid else "from outside"
            yield Finding(
                "error",
                "traced",
                f"{process} is traced by process {scene.command_of(tracer)} {whose}; a process "
                "can have but one, and CRIU is one",
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
                f"{process} is scheduled by deadlines or a policy newer than that; CRIU would "
                "save it, and never restore it",
                f"Give it another policy: `chrt --all-tasks --other --pid 0 {pid}`.",
                pid=pid,
            )


def _own(process: Process, threads: Sequence[str]) -> Iterator[Finding]:
    """What threads have apart from their process (unshare(2), setns(2)): CRIU saves what the main
    thread has, and no more.
    """
    pid = process.pid
    mine = _namespaces(pid, str(pid))
    for what, differs in (
        (
            "descriptors of their own",
            lambda tid: not shares(pid, int(tid), KCMP_FILES) and not _ends(pid, tid),
        ),
        (
            "a working folder, root and umask of their own",
            lambda tid: not shares(pid, int(tid), KCMP_FS) and not _ends(pid, tid),
        ),
        ("another namespace", lambda tid: _namespaces(pid, tid) not in (mine, ())),
    ):
        if mine and (found := sum(map(differs, threads))):
            yield Finding(
                "warning",
                "thread-apart",
                f"{found} of the {len(threads)} threads of {process} have {what}; after a restore "
                "they have what the main "
                "thread has",
                "Dump it at a time when it has no such threads, or have the work done by "
                "processes.",
                pid=pid,
            )


def _ends(pid: int, tid: str) -> bool:
    """Whether a thread, or the main thread, is just ending, and so has given up what they
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
    """Those that a thread can have by itself; () if it has ended."""
    try:
        return tuple(os.readlink(f"/proc/{pid}/task/{tid}/ns/{kind}") for kind in _THREADS_OWN)
    except OSError:
        return ()


def _policy(tid: int) -> int:
    try:
        return os.sched_getscheduler(tid) & ~os.SCHED_RESET_ON_FORK
    except OSError:  # it has ended
        return os.SCHED_OTHER


def _numbers(scene: Scene, process: Process) -> Iterator[Finding]:
    """Whether there are descriptor numbers left: for CRIU in the process now, and above the highest
    one at a restore.
    """
    opened = [d.fd for d in scene.opened.get(process.pid, ())]
    try:
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    except OSError:  # it has ended, or is another user's, which is told
        return
    left = soft - sum(fd < soft for fd in opened)
    if left < _ROOM:
        more = f"`prlimit --pid {process.pid} --nofile={soft + _ROOM}:{max(hard, soft + _ROOM)}`"
        yield Finding(
            "error",
            "descriptors-used-up",
            f"{process} can open {left} more descriptors (ulimit -n: {soft}); CRIU needs {_ROOM} "
            "inside of it",
            "Have it close some, or raise its limit: "
            f"{more}{'' if hard >= soft + _ROOM else ' (needs CAP_SYS_RESOURCE)'}.",
            pid=process.pid,
        )
    most = _restorable(scene)
    if most <= 0:  # told once, of the root
        if process.pid == scene.root.pid:
            yield Finding(
                "error",
                "descriptors-few",
                f"criuctl may have {_limit(scene)} descriptors (ulimit -Hn); CRIU needs "
                f"{_ALIGNMENT} at least",
                "Start criuctl with a higher `ulimit -n`.",
                pid=process.pid,
            )
        return
    if opened and max(opened) > most:
        yield Finding(
            "error",
            "descriptor-number",
            f"{process} has a descriptor numbered {max(opened)}; CRIU, which needs some above "
            f"it, restores {most} at most",
            "Start criuctl with a higher `ulimit -n` (CAP_SYS_RESOURCE, fs.nr_open), or the "
            "program with a lower one.",
            pid=process.pid,
            fd=max(opened),
        )
    shared = sum(
        m.shared and m.deleted and m.path == "/dev/zero" for m in scene.mapped.get(process.pid, ())
    )
    yield from many_shared(process, len(opened), shared, _limit(scene))


def many_shared(process: Process, opened: int, shared: int, limit: int) -> Iterator[Finding]:
    """Whether CRIU, which can have `limit` descriptors, has enough for those of the process and one
    of each shared mapping.
    """
    if opened + shared + _SERVICE + _PAD > limit:
        yield Finding(
            "error",
            "shared-mappings",
            f"{process} has {shared} mappings of shared memory; CRIU restores each with a "
            f"descriptor, of {limit} in all",
            "Start criuctl with a higher `ulimit -Hn` (CAP_SYS_RESOURCE, fs.nr_open).",
            pid=process.pid,
        )


def _address_space(process: Process) -> Iterator[Finding]:
    """Whether CRIU can map its helper there, which counts as the process's own memory."""
    try:
        limit = resource.prlimit(process.pid, resource.RLIMIT_AS)[0]
        used = int(read_text(process.pid, "statm").split()[0]) * resource.getpagesize()
    except (NoSuchProcess, OSError):  # it has ended, or is another user's, which is told
        return
    if limit != resource.RLIM_INFINITY and limit - used < _HELPER:
        yield Finding(
            "error",
            "address-space-used-up",
            f"{process} may map {limit >> 10} KiB of memory (ulimit -v) and has {used >> 10}; "
            f"CRIU needs {_HELPER >> 10} there",
            f"Have it unmap some, or raise its limit: `prlimit --pid {process.pid} "
            f"--as={used + 16 * _HELPER}:`.",
            pid=process.pid,
        )


def _mappings(scene: Scene, process: Process) -> Iterator[Finding]:
    """Whether CRIU's helper, which is two mappings, finds room among those that a process may have
    (vm.max_map_count).
    """
    limit = int(read_raw("/proc/sys/vm/max_map_count"))
    # which is none, to the kernel
    used = sum(mapping.path != "[vsyscall]" for mapping in scene.mapped.get(process.pid, ()))
    if limit - used < _HELPER_MAPPINGS:
        yield Finding(
            "error",
            "mappings-used-up",
            f"{process} has {used} memory mappings, of {limit} that it may have "
            "(vm.max_map_count); CRIU needs "
            f"{_HELPER_MAPPINGS} more there",
            f"Raise the limit: `sysctl vm.max_map_count={quoted(2 * limit)}`.",
            pid=process.pid,
        )


def _restorable(scene: Scene) -> int:
    """The highest number of a descriptor for which CRIU finds room for its own."""
    return _limit(scene) // _ALIGNMENT * _ALIGNMENT - _SERVICE - _PAD


def _limit(scene: Scene) -> int:
    return descriptor_limit(scene.own_capabilities)


def descriptor_limit(capabilities: int) -> int:
    """How many descriptors CRIU can have, with the limit that it can give itself."""
    if capabilities >> CAP_SYS_RESOURCE & 1:
        return int(read_raw("/proc/sys/fs/nr_open"))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _thread_ids(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _stuck(tree: Sequence[Process]) -> set[int]:
    """Who sleeps uninterruptibly and still does a little later: reading a disk takes moments, which
    a freeze waits out.
    """
    found = [process for process in tree if process.state == "D"]
    for _ in range(_LOOKS):
        if found:
            time.sleep(_LOOK)
        found = [process for process in found if process.identity.state() == "D"]
    return {process.pid for process in found}


def _vforking(tree: Sequence[Process]) -> set[int]:
    """Who waits in vfork(2) and still does a little later; most children start their program within
    moments.
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
    """Whose main thread has ended while others run on, which is so for a moment of every process
    that ends with threads.
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


def _sessions(scene: Scene) -> Iterator[Finding]:
    """Sessions and process groups led from outside the tree."""
    root = scene.root
    if root.sid not in scene.by_pid or root.pgid not in scene.by_pid:
        leader = (
            f"its session is led by {scene.command_of(root.sid)}"
            if root.sid not in scene.by_pid
            else "its process group is led"
        )
        yield Finding(
            "info",
            "session-outside",
            f"{root} does not lead its session: {leader} from outside the tree; a restore gives "
            "it a session of its own",
            "Start programs that shall be dumped with `setsid`, or dump the leader.",
            pid=root.pid,
        )
    behind = {pid for pids in members(scene.by_pid.keys()).values() for pid in pids}.difference(
        scene.by_pid
    )
    for pid in sorted(behind):
        if not _left_behind(pid, root):
            continue
        yield Finding(
            "warning",
            "left-behind",
            f"{scene.command_of(pid)} is in a session or process group of the tree, but not below "
            "its root: it is not dumped; "
            "while it lives, the tree can be restored only in a PID namespace of its own",
            "End it, or dump a root that has it below (a session of `criuctl run` keeps its "
            "orphans).",
            pid=pid,
        )
    for process in scene.tree:
        if (
            scene.at_home(process.pid, "pid")
            and len(process.ns_pids) > 1
            and _inner_session(process.pid) == 0
        ):
            yield Finding(
                "error",
                "session-outside-pid-namespace",
                f"the session of {process} is led from outside its PID namespace; it has no "
                "number there that CRIU could save",
                "Start the program in the PID namespace with a session of its own: `unshare "
                "--pid --fork setsid ...`.",
                pid=process.pid,
            )


def _lost_sessions(scene: Scene) -> Iterator[Finding]:
    """Sessions that CRIU dumps and cannot build again (criu/pstree.c, prepare_pstree_ids).

    Who is in another session than its parent must have been forked before that one or one above it
    left the session.  Only for children of the root CRIU makes helpers: in the place of a leader
    that has ended, or below one that lives.
    """
    root = scene.root
    parents = {process.pid: process.ppid for process in scene.tree[1:]}
    # A session that is led from outside is the root's at a restore.
    sids = {
        process.pid: root.pid if process.sid == root.sid else process.sid for process in scene.tree
    }
    for process in scene.tree[1:]:
        sid = sids[process.pid]
        if process.ppid == root.pid and sid not in (root.pid, process.pid):
            helper = -sid if sid in scene.by_pid else sid
            parents[process.pid], parents[helper] = helper, sid if helper < 0 else root.pid
            sids[helper] = sid
    born: dict[int, int] = {}
    for process in scene.tree[1:]:
        above, sid = parents[process.pid], sids[process.pid]
        if sid in (process.pid, sids.get(above)):
            continue
        while above in sids and above != sid and born.setdefault(above, sid) == sid:
            above = parents.get(above, 0)
        if above == sid:
            continue
        parent = scene.command_of(process.ppid)
        yield Finding(
            "error",
            "session-lost",
            f"{process} is in session {process.sid}, but was adopted by {parent}, which never "
            "was: CRIU would dump that, and can "
            "restore it only for children of the root",
            f"Dump the tree below {parent} by itself, with that one as the root, or end "
            f"{process.pid} first.",
            pid=process.pid,
        )


def _left_behind(pid: int, root: Process) -> bool:
    """Whether it lives, and not below the root: it may have been forked since the tree was looked
    at.
    """
    try:
        return ProcessIdentity.of(pid).alive() and root.pid not in ancestors(pid)
    except NoSuchProcess:
        return False


def _inner_session(pid: int) -> int | None:
    try:
        for line in read_lines(pid, "status"):
            if line.startswith("NSsid:"):
                return int(line.split()[-1])
    except NoSuchProcess:
        pass
    return None
