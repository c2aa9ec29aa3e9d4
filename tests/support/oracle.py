"""The state oracle: everything the kernel reports about a process tree, taken before a dump and
after the restore, and compared.

It reads /proc and asks the descriptors themselves (`pidfd_getfd` gives a second descriptor of the
very same socket or pipe), and it shares no code with criuctl: an oracle that used the product's own
readers would be blind where the product is.

A snapshot is a plain dictionary ``{process: {...}}`` keyed by the process's PID as its own tree
sees it, so that a tree restored in a PID namespace of its own compares equal. Names that only the
kernel chooses (inodes of pipes and sockets, PIDs of the outside) are replaced by stable ones: a
pipe is called after its first holder, ``pipe@12:4``, and so is a pseudo-terminal, whose number
others may take meanwhile. Two descriptors of one open file description are found with kcmp(2) and
recorded as ``same_as``. Memory is compared page by page: what lies below each thread's stack
pointer is left out, for the kernel and CRIU may use it.

The tree must be quiet between the snapshot and the dump; a program that never is (a JIT, a server
with timers) is compared without memory.  `diff` returns sentences; an empty list is equality.

What CRIU itself cannot bring back, and no program was seen to miss, is not compared: O_DIRECTORY
and O_NOFOLLOW in a descriptor's flags; the name of a deleted file whose name is taken again
(``.cr_link`` is added to it); SO_REUSEPORT of sockets that do not listen; the names of connected
unix streams (they come back as an unnamed pair); the name of shared anonymous memory; whether a
shared mapping that can never be written to has VM_SHARED (of a file that is open for reading only
the kernel takes it off).
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import fnmatch
import hashlib
import os
import platform
import re
import signal
import socket
import stat
import struct
import termios
from collections.abc import Iterable, Mapping
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
ZERO_PAGE = bytes(PAGE)
RED_ZONE = 128 << 10  # bytes under a stack pointer that nothing promises to keep
MEMORY_LIMIT = 1 << 30  # mappings larger than this are reservations
FILE_LIMIT = 256 << 20
F_GETPIPE_SZ, F_GET_SEALS, SIOCOUTQ = 1032, 1034, 0x5411
PTS = 136  # the major number of pseudo-terminals' slaves
O_LARGEFILE = 0o100000  # means nothing where all files are
SYS_PIDFD_GETFD = 438
SYS_KCMP = {"x86_64": 312, "aarch64": 272}[platform.machine()]
KCMP_FILE = 0
PF_EXITING = 0x4

STATUS_KEYS = (
    "Umask",
    *("Uid", "Gid", "Groups"),
    *("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"),
    *("THP_enabled", "TracerPid"),
)
THREAD_KEYS = ("SigPnd", "SigBlk")
NAMESPACES = ("pid", "mnt", "net", "ipc", "uts", "user", "cgroup")
VM_FLAGS = frozenset(
    ("sh", "lo", "dc", "dd", "de", "dp", "hg", "nh", "mg", "wf", "um", "gd", "nr", "io")
)
SOCKET_OPTIONS = {
    "reuseaddr": (socket.SOL_SOCKET, socket.SO_REUSEADDR),
    "reuseport": (socket.SOL_SOCKET, socket.SO_REUSEPORT),
    "keepalive": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "broadcast": (socket.SOL_SOCKET, socket.SO_BROADCAST),
    "passcred": (socket.SOL_SOCKET, socket.SO_PASSCRED),
    "priority": (socket.SOL_SOCKET, socket.SO_PRIORITY),
    "rcvbuf": (socket.SOL_SOCKET, socket.SO_RCVBUF),
    "sndbuf": (socket.SOL_SOCKET, socket.SO_SNDBUF),
    "listening": (socket.SOL_SOCKET, socket.SO_ACCEPTCONN),
    "protocol": (socket.SOL_SOCKET, socket.SO_PROTOCOL),
}
TCP_OPTIONS = {
    "nodelay": socket.TCP_NODELAY,
    "cork": socket.TCP_CORK,
    "keepidle": socket.TCP_KEEPIDLE,
    "keepintvl": socket.TCP_KEEPINTVL,
    "defer_accept": socket.TCP_DEFER_ACCEPT,
}

_libc = ctypes.CDLL(None, use_errno=True)
Snapshot = dict[str, dict[str, Any]]


# -- finding the tree
# -------------------------------------------------------------------------------


def tree(root: int) -> list[int]:
    """PIDs of `root` and all its descendants, parents first."""
    found = [root]
    for pid in found:
        for task in listdir(f"/proc/{pid}/task"):
            found.extend(
                int(child)
                for child in read(f"/proc/{pid}/task/{task}/children").split()
                if int(child) not in found
            )
    return found


def listdir(path: str) -> list[str]:
    """The names in a folder, numbers in their order; none when the folder is gone, or its
    process.
    """
    try:
        return sorted(os.listdir(path), key=lambda name: (len(name), name))
    except (FileNotFoundError, ProcessLookupError):
        return []


def read(path: str) -> str:
    """A small text file of /proc; empty when the process is gone."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def status_of(path: str) -> dict[str, str]:
    """A ``status`` file of /proc as a dictionary."""
    return {
        key: value.strip()
        for key, _, value in (line.partition(":") for line in read(path).splitlines())
    }


def stat_of(pid: int, task: int | None = None) -> list[str]:
    """/proc/PID/stat from the state on: index N here is field N + 3 of proc(5)."""
    path = f"/proc/{pid}/stat" if task is None else f"/proc/{pid}/task/{task}/stat"
    return read(path).rpartition(")")[2].split()


def dying(pid: int) -> bool:
    """Whether it has ended, or is killed and about to end: a busy machine may take its time with
    that.
    """
    fields = stat_of(pid)
    if not fields or fields[0] in "ZX" or int(fields[6]) & PF_EXITING:
        return True
    status = status_of(f"/proc/{pid}/status")
    pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return bool(pending >> (signal.SIGKILL - 1) & 1)


def turns(pid: int) -> list[tuple[str, ...]]:
    """State, number and count of turns on a processor of every task of a process."""
    found = []
    for task in listdir(f"/proc/{pid}/task"):
        status = status_of(f"/proc/{pid}/task/{task}/status")
        counts = [status.get(f"{kind}_ctxt_switches", "") for kind in ("voluntary", "nonvoluntary")]
        found.append((status.get("State", "gone")[0], task, *counts))
    return found


def inner_pid(pid: int) -> int:
    """The PID of `pid` in its innermost PID namespace."""
    return int(status_of(f"/proc/{pid}/status")["NSpid"].split()[-1])


class _Names:
    """PIDs and inodes of this tree, and the stable names they go by."""

    def __init__(self, pids: list[int]) -> None:
        self.level = len(status_of(f"/proc/{pids[0]}/status")["NSpid"].split()) - 1
        self.keys: dict[int, str] = {}
        for pid in pids:
            inner = status_of(f"/proc/{pid}/status").get("NSpid", "").split()[self.level :]
            if inner:
                self.keys[pid] = ".".join(inner)
        self.inodes: dict[str, str] = {}

    def process(self, pid: int) -> str:
        """The tree's own name for the host's `pid`."""
        return self.keys.get(pid, "none" if pid == 0 else "outside")

    def group(self, numbers: str) -> str:
        """A process group or session from a line like ``NSpgid``: its id inside, or that its leader
        is outside.
        """
        values = numbers.split()
        inner, outer = values[self.level], int(values[0])
        if inner in self.keys.values():
            return inner
        if inner == "0" or os.path.exists(f"/proc/{outer}"):
            return "outside"
        return inner

    def inode(self, kind: str, inode: str, holder: str) -> str:
        """A name for a pipe or socket: that of the first holder who asks."""
        return self.inodes.setdefault(f"{kind}:{inode}", f"{kind}@{holder}")


# -- one process
# ------------------------------------------------------------------------------------


def snapshot(root: int, *, memory: bool = True) -> Snapshot:
    """The state of the tree under `root` (a PID of the caller's namespace)."""
    pids = tree(root)
    names = _Names(pids)
    ordered = sorted(names.keys, key=lambda pid: [int(part) for part in names.keys[pid].split(".")])
    result: Snapshot = {}
    for pid in ordered:
        try:
            result[names.keys[pid]] = _process(pid, names, memory)
        except (OSError, LookupError):
            if not dying(pid):
                raise  # a process that lives can be read completely
    _sharing([pid for pid in ordered if names.keys[pid] in result], names, result)
    _unix_peers(root, names, result)
    return result


def _process(pid: int, names: _Names, memory: bool) -> dict[str, Any]:
    status = status_of(f"/proc/{pid}/status")
    fields = stat_of(pid)
    state = fields[0]
    common: dict[str, Any] = {
        "comm": read(f"/proc/{pid}/comm").rstrip("\n"),
        "state": {"T": "stopped", "t": "traced", "Z": "zombie"}.get(state, "runs"),
        "parent": names.process(int(fields[1])),
        "group": names.group(status["NSpgid"]),
        "session": names.group(status["NSsid"]),
    }
    if state == "Z":
        return common | {"exit_code": fields[49]}
    keys = _descriptors(pid, names)
    common |= {
        "argv": read(f"/proc/{pid}/cmdline").split("\0"),
        "environ": read(f"/proc/{pid}/environ").split("\0"),
        "auxv": hashlib.blake2b(_read_bytes(f"/proc/{pid}/auxv"), digest_size=8).hexdigest(),
        "exe": _link(f"/proc/{pid}/exe"),
        "cwd": _link(f"/proc/{pid}/cwd"),
        "root": _link(f"/proc/{pid}/root"),
        "terminal": _terminal(int(fields[4]), names.process(pid), names),
        "exit_signal": fields[35],
        "layout": fields[23:26] + fields[42:49],  # code, stack, data, heap, arguments, environment
        "status": {key: status.get(key, "") for key in STATUS_KEYS}
        | {"ShdPnd": _pending(status, state)},
        "limits": read(f"/proc/{pid}/limits").splitlines()[1:],
        "core_filter": read(f"/proc/{pid}/coredump_filter").strip(),
        "oom_score_adj": read(f"/proc/{pid}/oom_score_adj").strip(),
        "loginuid": read(f"/proc/{pid}/loginuid").strip(),
        "cgroup": read(f"/proc/{pid}/cgroup").splitlines(),
        "namespaces": {kind: os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in NAMESPACES},
        # By their own numbers: outside, one may be before its process, where numbers have started
        # again.
        "threads": sorted(
            (
                thread
                for task in listdir(f"/proc/{pid}/task")
                if (thread := _thread(pid, int(task)))
            ),
            key=lambda t: int(t["tid"]),
        ),
        "timers": _timers(pid, names),
        "descriptors": keys,
        "mappings": _mappings(pid),
        "memory": _memory(pid) if memory else {},
    }
    return common


def _terminal(number: int, process: str, names: _Names) -> str:
    """The controlling terminal, by the kernel's number for it."""
    major, minor = os.major(number), os.minor(number)
    return names.inode("pts", str(minor), f"{process}:tty") if major == PTS else str(number)


def _pending(status: dict[str, str], state: str) -> str:
    """Signals pending for the process; a stopped one may hold a stop signal more or less, which the
    next SIGCONT drops anyway.
    """
    pending = int(status["ShdPnd"], 16)
    if state == "T":
        for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            pending &= ~(1 << (number - 1))
    return f"{pending:016x}"


def _read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _thread(pid: int, task: int) -> dict[str, Any] | None:
    """None for one that has ended since it was listed."""
    status = status_of(f"/proc/{pid}/task/{task}/status")
    fields = stat_of(pid, task)
    try:
        policy = os.sched_getscheduler(task) & ~getattr(os, "SCHED_RESET_ON_FORK", 0)
    except ProcessLookupError:
        return None
    if not status or not fields:
        return None
    return {
        "tid": status["NSpid"].split()[-1],
        "comm": read(f"/proc/{pid}/task/{task}/comm").strip(),
        "nice": fields[16],
        "policy": policy,
        "rt_priority": fields[37],
        "io_priority": _io_priority(task),
        # 1 ns is set where a thread had none: to set 0 sets the default
        "timer_slack": max(1, int(read(f"/proc/{task}/timerslack_ns") or 0)),
        "personality": read(f"/proc/{task}/personality").strip(),
        "status": {key: status[key] for key in THREAD_KEYS},
    }


def _io_priority(task: int) -> int:
    """Class and level; those without a class have none."""
    number = {"x86_64": 252, "aarch64": 31}[os.uname().machine]
    priority = int(ctypes.CDLL(None).syscall(number, 1, task))
    return priority if priority >> 13 else 0


def _timers(pid: int, names: _Names) -> list[str]:
    """The POSIX timers: id, signal, notification and clock."""
    lines = read(f"/proc/{pid}/timers").splitlines()
    return [
        re.sub(r"(pid|tid)\.(\d+)", lambda m: f"{m[1]}.{names.process(int(m[2]))}", line)
        for line in lines
    ]


# -- descriptors
# ------------------------------------------------------------------------------------


def _descriptors(pid: int, names: _Names) -> dict[str, dict[str, Any]]:
    pidfd = os.pidfd_open(pid)
    try:
        return {
            fd: found
            for fd in listdir(f"/proc/{pid}/fd")
            if (found := _descriptor(pid, pidfd, int(fd), names))
        }
    finally:
        os.close(pidfd)


def _descriptor(pid: int, pidfd: int, fd: int, names: _Names) -> dict[str, Any] | None:
    """None for one that was closed since it was listed, as a server does with its connections at
    any time.
    """
    target = _link(f"/proc/{pid}/fd/{fd}")
    if target is None:
        return None
    info = [line.strip() for line in read(f"/proc/{pid}/fdinfo/{fd}").splitlines()]
    values = {key: value.strip() for key, _, value in (line.partition(":") for line in info)}
    flags = int(values.get("flags", "0"), 8)
    holder = f"{names.process(pid)}:{fd}"
    record: dict[str, Any] = {
        "cloexec": bool(flags & os.O_CLOEXEC),
        "flags": oct(flags & ~(os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW | O_LARGEFILE)),
        "offset": values.get("pos"),
    }
    kind, _, inode = target.partition(":")
    if kind in ("pipe", "socket"):
        try:
            borrowed = _Borrowed(pidfd, fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                return None
            raise
        record["target"] = names.inode(kind, inode.strip("[]"), holder)
        with borrowed as copy:
            record |= _pipe(copy) if kind == "pipe" else _socket(copy)
        return record
    record["target"] = target.replace(".cr_link (deleted)", " (deleted)")
    # to look such a name up makes the kernel forget it for the processes that had it open
    if re.match(r"/proc/\d+/net/", target):
        record["target"] = target.removesuffix(" (deleted)")
    # its number may belong to another process by now
    if terminal := re.fullmatch(r"/dev/pts/(\d+)", target):
        record["target"] = names.inode("pts", terminal[1], holder)
    locks = [re.sub(r"^lock:\s*\d+:\s*", "", line) for line in info if line.startswith("lock:")]
    # "FLOCK  ADVISORY  WRITE 123 08:01:17 0 EOF": the owner's PID and the inode are the kernel's
    if locks:
        record["locks"] = sorted(
            " ".join(part for n, part in enumerate(line.split()) if n not in (3, 4))
            for line in locks
        )
    if target.startswith("anon_inode:"):
        record["state"] = _anonymous(info)
        return record
    try:
        entry = os.stat(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return record
    record["mode"] = oct(entry.st_mode)
    if stat.S_ISREG(entry.st_mode):
        record["size"] = entry.st_size
        if entry.st_nlink == 0 and entry.st_size <= FILE_LIMIT:  # it lives nowhere but in this tree
            record["content"] = _file_digest(f"/proc/{pid}/fd/{fd}")
        if target.startswith("/memfd:"):
            with _Borrowed(pidfd, fd) as copy:
                record["seals"] = fcntl.fcntl(copy, F_GET_SEALS)
    return record


def _file_digest(path: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _anonymous(info: list[str]) -> list[str]:
    """What fdinfo tells of an eventfd, timerfd, signalfd, epoll set or inotify, without what time
    or the kernel changes.
    """
    kept = []
    periodic = any(line.startswith("it_interval") and re.search(r"[1-9]", line) for line in info)
    for line in info:
        key = line.partition(":")[0]
        if key in ("pos", "flags", "mnt_id", "ino", "eventfd-id", "ticks", "Pid", "scm_fds"):
            continue
        if key == "it_value":  # the time that is left; armed or not is what counts
            line = "armed" if periodic or re.search(r"[1-9]", line) else "not armed"
        # a one-shot that has fired gets EPOLLERR and EPOLLHUP back when it is registered again
        elif key == "tfd":
            words = line.split()
            line = f"tfd: {words[1]} events: {int(words[3], 16) & ~0x18:x} data: {words[5]}"
        elif key.startswith("inotify"):
            line = re.sub(r" (sdev|fhandle-bytes|fhandle-type|f_handle):\S+", "", line)
        kept.append(line)
    return sorted(kept)


class _Borrowed:
    """A second descriptor, here, of descriptor `fd` of another process."""

    def __init__(self, pidfd: int, fd: int) -> None:
        self._fd: int = _libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"pidfd_getfd of descriptor {fd}: {os.strerror(number)}")

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _queued(fd: int, request: int = termios.FIONREAD) -> int | None:
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, request, b"\0\0\0\0"))[0])
    except OSError:  # a listening socket has no queue
        return None


def _pipe(fd: int) -> dict[str, Any]:
    return {"queued": _queued(fd), "capacity": fcntl.fcntl(fd, F_GETPIPE_SZ)}


def _socket(fd: int) -> dict[str, Any]:
    with socket.socket(fileno=os.dup(fd)) as sock:
        record: dict[str, Any] = {
            "family": sock.family.name,
            "type": sock.type.name,
            "local": _address(sock.getsockname),
            "peer": _address(sock.getpeername),
            "queued": _queued(fd),
            "unsent": _queued(fd, SIOCOUTQ) if sock.family != socket.AF_UNIX else None,
        }
        wanted = dict(SOCKET_OPTIONS)
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            wanted |= {name: (socket.IPPROTO_TCP, option) for name, option in TCP_OPTIONS.items()}
            record["tcp_state"] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        record["options"] = {}
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            del wanted["reuseport"]
            if (
                sock.family == socket.AF_UNIX
                and sock.type != socket.SOCK_DGRAM
                and record["peer"] is not None
            ):
                record["local"] = record["peer"] = "connected"
        for name, (level, option) in wanted.items():
            try:
                value = sock.getsockopt(level, option)
                # The kernel doubles what is set, and grows it by any number itself: an odd size
                # cannot be set again.
                record["options"][name] = value // 2 if name in ("rcvbuf", "sndbuf") else value
            except OSError:
                record["options"][name] = None
    return record


def _address(ask: Any) -> str | None:
    try:
        return repr(ask())
    except OSError:
        return None


def _sharing(pids: list[int], names: _Names, result: Snapshot) -> None:
    """Mark descriptors that are one open file description: ``same_as`` is its first holder."""
    seen: dict[tuple[str, str, str], list[tuple[int, int, str]]] = {}
    for pid in pids:
        for fd, record in result[names.keys[pid]].get("descriptors", {}).items():
            holder = f"{names.keys[pid]}:{fd}"
            known = seen.setdefault((record["target"], record["flags"], str(record["offset"])), [])
            for other_pid, other_fd, other in known:
                if _libc.syscall(SYS_KCMP, pid, other_pid, KCMP_FILE, int(fd), other_fd) == 0:
                    record["same_as"] = other
                    break
            else:
                known.append((pid, int(fd), holder))


def _unix_peers(root: int, names: _Names, result: Snapshot) -> None:
    """Tell for each unix socket which one it is connected to, by a sock_diag dump (of the caller's
    own net namespace only).
    """
    if os.stat(f"/proc/{root}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
        return
    labels = {
        name.partition(":")[2]: label
        for name, label in names.inodes.items()
        if name.startswith("socket:")
    }
    peers = {
        labels[str(a)]: labels.get(str(b), "outside")
        for a, b in unix_peers().items()
        if str(a) in labels
    }
    for process in result.values():
        for record in process.get("descriptors", {}).values():
            if record["target"] in peers:
                record["connected_to"] = peers[record["target"]]


def unix_peers() -> dict[int, int]:
    """Inode of every connected unix socket -> inode of its peer."""
    sock_diag_by_family, dump_flags, show_peer, attribute_peer = 20, 0x301, 0x4, 2
    request = struct.pack("=IHHII", 40, sock_diag_by_family, dump_flags, 1, 0)
    request += struct.pack(
        "=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, show_peer, 0xFFFFFFFF, 0xFFFFFFFF
    )
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as sock:
        sock.send(request)
        while True:
            data = sock.recv(1 << 18)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind in (2, 3):  # an error, or the end
                    return found
                inode = struct.unpack_from("=I", data, at + 20)[0]
                attribute = at + 32
                while attribute < at + length:
                    size, name = struct.unpack_from("=HH", data, attribute)
                    if name == attribute_peer:
                        found[inode] = struct.unpack_from("=I", data, attribute + 4)[0]
                    attribute += (size + 3) & ~3
                at += (length + 3) & ~3


# -- memory
# -----------------------------------------------------------------------------------------


def _mappings(pid: int) -> list[str]:
    """``start-end perms offset path [flags]`` of every mapping, neighbours that differ in nothing
    joined.
    """
    joined: list[tuple[int, int, str, int, str, str]] = []
    for start, end, perms, offset, path, flags in _smaps(pid):
        if joined:
            first, last, *rest = joined[-1]
            same_place = last == start and (
                not path or path.startswith("[") or joined[-1][3] + last - first == offset
            )
            if same_place and (rest[0], rest[2], rest[3]) == (perms, path, flags):
                joined[-1] = (first, end, perms, joined[-1][3], path, flags)
                continue
        joined.append((start, end, perms, offset, path, flags))
    return [f"{s:x}-{e:x} {p} {o:x} {path} [{flags}]" for s, e, p, o, path, flags in joined]


def _smaps(pid: int) -> Iterable[tuple[int, int, str, int, str, str]]:
    head: tuple[int, int, str, int, str] | None = None
    for line in read(f"/proc/{pid}/smaps").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ *(.*)", line)
        if match:
            path = (
                ""
                if match[5].startswith("[anon:")
                else match[5].replace("/memfd:/dev/zero (deleted)", "/dev/zero (deleted)")
            )
            head = (
                int(match[1], 16),
                int(match[2], 16),
                match[3],
                int(match[4], 16) if path and path[0] != "[" else 0,
                path,
            )
        elif line.startswith("VmFlags:") and head:
            flags = line.split()[1:]
            kept = VM_FLAGS if "mw" in flags else VM_FLAGS - {"sh"}
            yield *head, " ".join(flag for flag in flags if flag in kept)


def _memory(pid: int) -> dict[str, str]:
    """Page address -> digest, for every page that is this process's own and not zero."""
    pages: dict[str, str] = {}
    stacks = [s for s in (_stack_pointer(pid, task) for task in listdir(f"/proc/{pid}/task")) if s]
    mem, pagemap = (
        os.open(f"/proc/{pid}/mem", os.O_RDONLY),
        os.open(f"/proc/{pid}/pagemap", os.O_RDONLY),
    )
    try:
        for start, end, perms, offset, path, flags in _smaps(pid):
            # MAP_DROPPABLE, as of the random numbers of newer C libraries: no checkpoint has it.
            # Memory that a fork would wipe, and what OpenSSL takes for its PID: see `repairs`.
            if {"dp", "wf"} & {*flags.split()} or "/libcrypto" in path:
                continue
            anonymous_shared = path.startswith(("/dev/zero", "/memfd:", "/SYSV"))
            if (
                path.startswith(("[v", "[uprobes"))
                or end - start > MEMORY_LIMIT
                or (perms[3] == "s" and not anonymous_shared)
            ):
                continue
            wanted = (
                range((end - start) // PAGE) if perms[3] == "s" else _own_pages(pagemap, start, end)
            )
            of_file = (
                _FilePages(pid, start, end, offset)
                if path.startswith("/") and perms[3] == "p"
                else None
            )
            for index in wanted:
                address = start + index * PAGE
                below = [sp for sp in stacks if address < sp and address >= (sp & -PAGE) - RED_ZONE]
                if any(address + PAGE <= sp for sp in below):
                    continue
                try:
                    page = os.pread(mem, PAGE, address)
                except OSError:  # past the end of a file, or a guard page
                    continue
                if below:
                    page = page[max(below) - address :]
                unchanged = of_file.page(index) if of_file else ZERO_PAGE[: len(page)]
                if page != unchanged:
                    pages[f"{address:x} {path or 'anonymous'}"] = hashlib.blake2b(
                        page, digest_size=8
                    ).hexdigest()
    finally:
        os.close(mem)
        os.close(pagemap)
    return pages


class _FilePages:
    """What a private mapping of a file holds where the process has written nothing (CRIU copies
    such pages now and then).
    """

    def __init__(self, pid: int, start: int, end: int, offset: int) -> None:
        self._path = f"/proc/{pid}/map_files/{start:x}-{end:x}"
        self._offset = offset

    def page(self, index: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                return os.pread(file.fileno(), PAGE, self._offset + index * PAGE).ljust(PAGE, b"\0")
        # the mapping is gone, or its file cannot be opened: then every page of it counts
        except OSError:
            return b""


def _own_pages(pagemap: int, start: int, end: int) -> Iterable[int]:
    """Indices of the private pages of a mapping: present or swapped out, and not the file's (bits
    63, 62, 61 of pagemap).
    """
    entries = array.array("Q", os.pread(pagemap, (end - start) // PAGE * 8, start // PAGE * 8))
    return [index for index, entry in enumerate(entries) if entry >> 62 and not entry >> 61 & 1]


def _stack_pointer(pid: int, task: str) -> int | None:
    fields = read(f"/proc/{pid}/task/{task}/syscall").split()
    return int(fields[-2], 16) if len(fields) >= 3 else None


# -- comparing
# --------------------------------------------------------------------------------------

# what a restore with PIDs of its own may change
NEW_NAMESPACE = ("*/namespaces/pid", "*/namespaces/mnt")
# For programs that are never quiet: what any running program changes by itself.
RESTLESS = (
    "*/memory/*",
    "*/mappings*",
    "*/layout*",
    "*/offset",
    "*/size",
    "*/queued",
    "*/status/SigBlk",
    "*/timers",
)


def _flatten(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{path}/{number}")
    else:
        yield path, value


def diff(before: Snapshot, after: Snapshot, ignore: Iterable[str] = ()) -> list[str]:
    """Sentences that say where two snapshots differ; paths that match a pattern of `ignore` are
    left out.
    """
    old, new = dict(_flatten(before, "")), dict(_flatten(after, ""))
    skip = re.compile("|".join(fnmatch.translate(pattern) for pattern in ignore) or r"(?!)")
    lines: list[str] = []
    pages: dict[str, list[str]] = {}
    for path in sorted(old.keys() | new.keys()):
        a, b = old.get(path, "absent"), new.get(path, "absent")
        if a == b or skip.match(path):
            continue
        if "/memory/" in path:
            process, _, page = path.partition("/memory/")
            pages.setdefault(f"{process} {page.partition(' ')[2]}", []).append(
                page.partition(" ")[0]
            )
        elif isinstance(a, list) and isinstance(b, list):
            lines.append(
                f"{path}: lost {[x for x in a if x not in b]}, new {[x for x in b if x not in a]}"
            )
        else:
            lines.append(f"{path}: {a!r} -> {b!r}")
    lines.extend(
        f"{where}: {len(found)} pages differ, first at {found[0]}" for where, found in pages.items()
    )
    return lines
