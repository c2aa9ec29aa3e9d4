"""CRIU's error messages in words for people: tables, tried from top to bottom.

Each entry is a pattern of CRIU's sentence (4.2; subsystem prefix and place taken off), a stable
code (the preflight's where it knows the same obstacle), what happened, and what to do.  Named
groups of the pattern can be used in both; ``pid`` and ``fd`` also tell whom it is about.

What a tree has for a moment only, a dump outwaits (`Remedy.passes`).  So it does with what the
preflight refuses where it stays: CRIU meets only what has begun since.
"""

from __future__ import annotations

import re

from msgspec import Struct


class Remedy(Struct, frozen=True):
    """One message of CRIU that is understood."""

    code: str
    pattern: re.Pattern[str]
    text: str
    hint: str
    about_descriptor: bool  # the descriptor CRIU was busy with is the one meant
    passes: bool  # by itself: a dump tries again


def _r(
    code: str, pattern: str, text: str, hint: str, *, fd: bool = False, passes: bool = False
) -> Remedy:
    return Remedy(code, re.compile(pattern), text, hint, fd, passes or hint == _AGAIN)


_AGAIN = "It passes by itself: try again."
_CLOSE = "Have the program close it before the dump."
_DROP = "Have the program drop the watch, or close what it keeps open of the file."
_OLD_CRIU = "Run scripts/setup: it finds or installs a CRIU that works on this kernel."
_ROOT = (
    "Run criuctl as root with all capabilities; some containers drop CAP_SYS_RESOURCE, "
    "CAP_SYS_ADMIN or CAP_NET_ADMIN."
)
_PIDS = (
    "Restore with `--pids private`, or end the process that has the number (`criuctl restore "
    "--dry-run` names it)."
)
_TRACED = (
    "process {pid} cannot be stopped: another program traces it, it is not ours to stop, or it "
    "was just ending"
)
_UNTRACE = (
    "End the tracer (gdb, strace, a profiler) or have it detach; run criuctl as root; or try again."
)
_TERMINAL = (
    "Detach the program from the terminal (redirect its input and output), or start it as a "
    "session of criuctl."
)

_DUMP = (
    _r(
        "ended",
        r"kcmp failed: .*: No such process",
        "a process was just ending",
        _AGAIN,
    ),
    _r(
        "traced",
        r"Unable to interrupt task:? (?P<pid>\d+) \(Operation not permitted",
        _TRACED,
        _UNTRACE,
        passes=True,
    ),
    _r(
        "signal",
        r"Unexpected (?P<pid>\d+) task interruption",
        "a signal was just reaching process {pid}",
        _AGAIN,
    ),
    _r(
        "address-space-used-up",
        r"remote mmap\(\) failed: Cannot allocate memory|Can't rmap memfd for parasite blob",
        "a process may not map what CRIU needs inside of it (ulimit -v)",
        "Raise its limit: `prlimit --pid PID --as=BYTES:`.",
    ),
    _r(
        "mappings-used-up",
        r"remote_mprotect failed",
        "CRIU cannot map what it needs inside of a process, which may have no more memory "
        "mappings (vm.max_map_count)",
        "See how many it has (`wc -l /proc/PID/maps`), and raise the limit: `sysctl "
        "vm.max_map_count=NUMBER`.",
    ),
    _r(
        "descriptors-used-up",
        r"Can't create memfd in victim: Too many open files",
        "a process may not open what CRIU needs inside of it (ulimit -n)",
        "It began just now (sshd does so before a login): try again; where it stays so, `criuctl "
        "check` tells the remedy.",
        passes=True,
    ),
    _r(
        "pipes-used-up",
        r"Unable to set a pipe size",
        "the pipes of this user are as many as it may have (fs.pipe-user-pages-soft)",
        "Raise the limit (`sysctl fs.pipe-user-pages-soft=NUMBER`), or give criuctl "
        "CAP_SYS_RESOURCE, which is not bound by it.",
    ),
    _r(
        "inside",
        r"The criu itself is within dumped tree",
        "criuctl runs inside the tree that it shall dump",
        "Run it from elsewhere.",
    ),
    _r(
        "io-uring",
        r"anon_inode:\[io_uring\]|send_fds failed",
        "an io_uring is in use",
        "Have the program use epoll instead.",
        fd=True,
    ),
    _r(
        "descriptor-kind",
        r"Can't dump file (?P<fd>-?\d+) of that type \[\d+\] \((?:anon anon_inode:|reg |unknown )(?P<what>[^)]*)\)",
        "descriptor {fd} is {what}, which CRIU cannot save",
        _CLOSE,
    ),
    _r(
        "device",
        r"Can't dump file (?P<fd>-?\d+) of that type \[\d+\] \(chr (?P<what>[^)]*)\)",
        "descriptor {fd} is the device {what}, which CRIU cannot save",
        _CLOSE,
    ),
    _r(
        "device",
        r"Net namespace is required to dump tun link",
        "a tunnel device (/dev/net/tun) is open",
        "End the tunnel first.",
        fd=True,
    ),
    _r(
        "socket-family",
        r"Unknown socket collected \(family (?P<family>\d+)\)",
        "a socket of family {family} is open",
        _CLOSE,
        fd=True,
    ),
    _r(
        "socket-protocol",
        r"Unsupported proto 262",
        "a Multipath TCP socket is open",
        "Go programs: GODEBUG=multipathtcp=0.",
        fd=True,
    ),
    _r(
        "socket-protocol",
        r"Unsupported proto (?P<proto>\d+)",
        "a socket of protocol {proto} is open",
        _CLOSE,
        fd=True,
    ),
    _r(
        "unix-peer-outside",
        r"Can't dump half of stream unix connection|Can't dump name-less external socket|External socket is used"
        r"|Unix socket \d+ (?:without peer|with unreachable peer)",
        "a unix socket is connected to a process outside of the tree",
        "Have the program close the connection, or dump a tree that holds both ends; `criuctl "
        "check` names the other end.",
    ),
    _r(
        "unix-not-accepted",
        r"closed in-flight socket|in-flight socket 0x",
        "a unix connection is not accepted yet",
        _AGAIN,
        fd=True,
    ),
    _r(
        "tcp-not-accepted",
        r"In-flight connection \(l\)",
        "TCP connections wait to be accepted",
        _AGAIN,
        fd=True,
    ),
    _r(
        "unix-credentials",
        r"Control messages in queue",
        "unread messages carry credentials (SO_PASSCRED)",
        _AGAIN,
        fd=True,
    ),
    _r(
        "unix-datagram-long",
        r"sys_recvmsg failed: truncated",
        "an unread datagram is too long",
        _AGAIN,
        fd=True,
    ),
    _r(
        "netlink-groups",
        r"netlink socket \S+ (?:has more than 32 groups|is bound to groups)",
        "a netlink socket listens to groups in a way that CRIU cannot save",
        _CLOSE,
        fd=True,
    ),
    _r(
        "socket-filter",
        r"Can't get socket filter",
        "a BPF program filters what a socket receives",
        _CLOSE,
        fd=True,
    ),
    _r(
        "packet-groups",
        r"Multiple MC membership",
        "a packet socket has joined the same thing twice",
        _CLOSE,
        fd=True,
    ),
    _r(
        "netlink-queue",
        r"The socket has data to read",
        "a netlink socket has unread messages",
        _AGAIN,
        fd=True,
    ),
    _r(
        "corked-datagram",
        r"Can't dump corked dgram",
        "a datagram is being put together (UDP_CORK)",
        _AGAIN,
        fd=True,
    ),
    _r(
        "net-namespace",
        r"Socket state \d+ obtained but expected",
        "a socket is of another net namespace",
        _CLOSE,
        fd=True,
    ),
    _r(
        "old-criu",
        r"Can't get 1:16 opt: Operation not supported",
        "this CRIU is too old for this kernel: it cannot dump TCP sockets",
        _OLD_CRIU,
    ),
    _r(
        "namespace-file",
        r"No NS ID with kid",
        "a namespace is open in which no process of the tree is",
        _CLOSE,
        fd=True,
    ),
    _r(
        "old-criu",
        r"Unexpected rt vDSO area bounds",
        "this CRIU is too old for this kernel",
        _OLD_CRIU,
    ),
    _r(
        "sysv-shm",
        r"Task (?P<pid>\d+) with SysVIPC shmem map",
        "process {pid} has System V shared memory of the host's IPC namespace",
        "Start the program in a private IPC namespace: `unshare --ipc setsid ...`.",
    ),
    _r(
        "packet-pipe",
        r"packetized mode for pipes",
        "a pipe is in packet mode (O_DIRECT)",
        "Have the program use plain pipes.",
        fd=True,
    ),
    _r(
        "pidfd-outside",
        r"pidfd pid \d+ is not a part",
        "a pidfd stands for a process outside of the tree",
        _CLOSE,
        fd=True,
    ),
    _r("pidfd-thread", r"PIDFD_THREAD flag", "a pidfd stands for a thread", _CLOSE, fd=True),
    _r(
        "timer-clock",
        r"Unknown clock type",
        "a timer runs on an alarm clock",
        "Have the program use CLOCK_BOOTTIME.",
        fd=True,
    ),
    _r(
        "program-in-memory",
        r"Can't lookup mount=\d+ for fd=-1 path=(?P<path>/memfd:.*)",
        "a program runs from a memory file ({path})",
        "Have the program written to a file, and start it from there.",
    ),
    _r(
        "huge-pages",
        r"Can't lookup mount=\d+ for fd=(?P<fd>-?\d+) path=(?P<path>/memfd:.*)",
        "{path} is of huge pages, of which this host has none free; CRIU needs one to save it",
        "Add a free huge page: nr_hugepages in /sys/kernel/mm/hugepages.",
    ),
    _r(
        "mount-namespace",
        r"Can't lookup mount=\d+ for fd=(?P<fd>-?\d+) path=(?P<path>.*)",
        "{path} was opened in another mount namespace",
        "Give the program files and stdio opened inside its own mount namespace.",
    ),
    _r(
        "path-hidden",
        r"overmounted mounts are not supported.* fd=(?P<fd>-?\d+) path=(?P<path>.*)",
        "{path} is hidden: something was mounted over it",
        "Unmount what hides it.",
    ),
    _r(
        "path-hidden",
        r"Unaccessible path opened",
        "an open file's path leads to another file now",
        "Have the program open it anew.",
        fd=True,
    ),
    _r(
        "path-hidden",
        r"The path \[(?P<path>.*)\] is not supported",
        "no path leads to the open file {path}",
        _CLOSE,
        fd=True,
    ),
    _r(
        "nested-namespace",
        # who is ending has none of these any more
        r"Can't dump nested (?P<kind>ipc|uts|time|cgroup) namespace for (?P<pid>\d+)",
        "process {pid} was just ending, or has entered another {kind} namespace inside the tree",
        "Try again; if it lives on in there, dump the tree inside that namespace by itself.",
        passes=True,
    ),
    _r(
        "nested-namespace",
        r"Can't dump nested (?P<kind>\w+) namespace for (?P<pid>\d+)",
        "process {pid} has a {kind} namespace of its own inside the tree",
        "Dump the tree inside that namespace by itself.",
    ),
    _r(
        "session-outside-pid-namespace",
        r"session leader of (?:zombie process )?(?P<pid>\d+)\(\d+\) is outside of its pid namespace",
        "the session of process {pid} is led from outside of its PID namespace",
        "Start the program there with `setsid`.",
    ),
    _r(
        "foreign-user",
        r"Can't get rlimit",
        "the limits of a process of another user cannot be read without CAP_SYS_RESOURCE",
        _ROOT,
    ),
    _r(
        "session-outside",
        r"root process (?P<pid>\d+) is not a session leader",
        "process {pid} does not lead its session",
        "Dump its leader.",
    ),
    _r(
        "pending-sigtrap",
        r"Can't dump the (?P<pid>\d+) thread with a pending SIGTRAP",
        "thread {pid} has a SIGTRAP pending",
        _AGAIN,
    ),
    _r(
        "leader-gone",
        r"Zombies? (?:with threads|thread) (?:are )?not supported",
        "a process was just ending, or lives on without its main thread",
        _AGAIN,
    ),
    _r(
        "stopping",
        r"Individually stopped threads",
        "a process was just being stopped or continued",
        _AGAIN,
    ),
    _r(
        "shared-with-parent",
        r"Can't make (?:VM|FS|FILES|IO) id for (?P<pid>\d+)",
        "process {pid} shares memory, folders, descriptors or signal handlers with another one, "
        "as threads do",
        "It began just now: try again; where there always is one, have the program fork instead.",
        passes=True,
    ),
    _r(
        "root-dead",
        r"A root task is dead",
        "the root of the tree has ended",
        "There is nothing left to dump.",
    ),
    _r(
        "terminals",
        r"Only one slave external peer",
        "more than one terminal is held from outside of the tree",
        _TERMINAL,
    ),
    _r(
        "terminals",
        r"Found slave peer index|dangling tty|ctty inheritance",
        "a terminal is held from outside of the tree",
        _TERMINAL,
    ),
    _r(
        "terminal-number",
        r"Index (?P<number>\d+) on (?:ptmx|pts) is too big",
        "a terminal inside the tree has the number {number}, which is too high for CRIU",
        "End what holds the many others, and have the program open its terminal anew.",
        fd=True,
    ),
    _r(
        "many-terminals",
        r"Too many external terminals",
        "terminals held from outside of the tree are opened too often",
        "Have programs use the descriptors that they inherit, instead of opening /dev/tty, or "
        "end some of them.",
    ),
    _r(
        "terminals",
        r"Unable to find a tty driver",
        "a terminal of a kind that CRIU does not know is open",
        _CLOSE,
        fd=True,
    ),
    _r(
        "mapping-kind",
        r"Unknown shit \d+ \((?P<what>.*)\)|Can't handle non-regular mapping on (?P<pid>\d+)'s|Unsupported mapping found",
        "memory of a device or of the kernel is mapped",
        "Have the program let go of the device (GPU, sound, video) before the dump; `criuctl "
        "check` names it.",
    ),
    _r(
        "uprobes",
        r"PID (?P<pid>\d+) has uprobes",
        "a user-space probe is set on process {pid}",
        "Remove it and start the program anew.",
    ),
    _r(
        "ghost-files",
        r"Can't dump ghost file (?P<path>.*) of (?P<size>\d+) size",
        "the deleted file {path} has grown to {size} bytes",
        "Try again: the room for it is computed anew.",
    ),
    _r(
        "link-remap",
        r"Can't link remap to (?P<path>.*): File exists",
        "the deleted file {path} is held by another tree that is being dumped at the moment as "
        "well",
        "Try again when that dump has ended.",
        passes=True,
    ),
    _r(
        "link-remap",
        r"Can't (?:create|dump)? ?link remap (?:for|to) (?P<path>.*)",
        "no name can be given to the deleted file {path}",
        "Its folder must exist and be writable.",
    ),
    _r(
        "watch-of-deleted",
        r"Can't find suitable path for handle",
        "a watched file (inotify) was deleted",
        _DROP,
        fd=True,
    ),
    _r(
        "watch-without-path",
        r"Can't dump that handle",
        "a watched file (inotify) is on a file system that finds no file again",
        _DROP,
        fd=True,
    ),
    _r(
        "epoll-target",
        r"Dump eventpoll \(pid: (?P<pid>\d+)\)",
        "an epoll of process {pid} watches what that has closed, and another process has open",
        "Have the program take it off the epoll (EPOLL_CTL_DEL) before it closes what others "
        "have as well.",
    ),
    _r(
        "freeze",
        r"Unable to freeze cgroup|Timeout reached",
        "the tree could not be frozen in time",
        "Try again, or raise criu_timeout; `criuctl check` names a process that cannot be frozen.",
    ),
    _r(
        "freeze",
        r"Zombie with children",
        "processes came and went while the tree was being frozen",
        _AGAIN,
    ),
    _r(
        "page-server",
        r"page.?server|Page server|Can't write (?:header|page|img)",
        "CRIU could not hand over the pages",
        "Try again.",
    ),
    _r(
        "init",
        r"Can't dump a pid namespace without the process init",
        "only a part of a PID namespace was named",
        "Name its first process.",
    ),
    _r(
        "lo-down",
        r"Unable to connect a socket: Network is unreachable|kerndat_tcp_repair failed",
        "the loopback device of the tree's net namespace is down, and CRIU needs it",
        "`nsenter --target PID --net ip link set lo up`.",
    ),
    _r(
        "netfilter",
        r"Failed to lock TCP connection|Locking (?:network|connection) failed",
        "the firewall could not hold the connections",
        _ROOT,
    ),
)

_RESTORE = (
    _r(
        "descriptor-number",
        r"Can't chose service_fd_base",
        "it has a descriptor whose number is too high for the limit of open files here",
        "Restore it where criuctl has CAP_SYS_RESOURCE, or a higher `ulimit -n`.",
    ),
    _r(
        "shared-mappings",
        r"(?:Unable to open pages-|Can't open file ).*: Too many open files",
        "CRIU, which restores each mapping of shared memory with a descriptor, can have no more "
        "of them here",
        "Restore it where criuctl has CAP_SYS_RESOURCE, or a higher `ulimit -Hn`.",
    ),
    _r(
        "pid-taken",
        r"Can't fork for (?P<pid>\d+): File exists|Pid \d+ do not match expected (?P<other>\d+)",
        "a PID of the tree is taken",
        _PIDS,
    ),
    _r(
        "file-changed",
        r"File /?(?P<path>.*) has bad (?P<what>size|mode|build-ID)",
        "/{path} is not the file that was open: its {what} differs",
        "Put the file back, or dump with --with-files next time; `criuctl restore --dry-run` "
        "compares all files.",
    ),
    _r(
        "file-missing",
        r"Can't open file /?(?P<path>.*?)(?: on restore)?: No such file",
        "/{path} is missing",
        "Put the file back.",
    ),
    _r(
        "file-denied",
        r"Can't open file /?(?P<path>.*?)(?: on restore)?: (?P<why>.*)",
        "/{path} cannot be opened: {why}",
        "See to that.",
    ),
    _r(
        "port-taken",
        r"Can't bind inet socket.*Address already in use",
        "a port of the tree is taken",
        "`ss -tuanp` names who has it; connections in TIME-WAIT let go of it within a minute.",
    ),
    _r(
        "address-missing",
        r"Can't bind inet socket.*Cannot assign",
        "this host lacks an address that the tree listens on",
        "Add it, or remove it.",
    ),
    _r(
        "interface-missing",
        r"couldn't find ifindex for|Can't set 1:25 \(.*No such device",
        "a network interface that a socket of the tree is bound to is not there",
        "Add one of that name (`ip link`).",
    ),
    _r(
        "unix-path-taken",
        r"Can't bind id \S+ ino \d+ addr (?P<path>.*): Address already in use",
        "a unix socket's name is taken: {path}",
        "End who has it, or move away what is there.",
    ),
    _r(
        "unix-peer-missing",
        r"Can't connect \d+ socket: (?:Connection refused|No such file)",
        "a service that the tree sends datagrams to does not listen here",
        "Start it (syslog, systemd-journald) and restore again.",
    ),
    _r(
        "connection",
        r"Connected TCP socket in image",
        "the checkpoint holds an established connection",
        "This is a bug in criuctl: report it.",
    ),
    _r(
        "cpu",
        r"CPU .*(?:mismatch|do not match|unsupported)|FPU feature required",
        "this CPU lacks what the program was using",
        "Use a like host.",
    ),
    _r(
        "mounts",
        r"A few mount points can't be mounted|No mapping for .* mountpoint",
        "mounts of the tree cannot be made here",
        "Make them.",
    ),
    _r(
        "namespace-file",
        r"Can't find suitable NS ID",
        "an open namespace file has no counterpart here",
        _CLOSE,
        fd=True,
    ),
    _r(
        "terminals",
        r"tty to inherit session from|Can't open (?:master|slave) pty",
        "a terminal that the tree needs could not be made",
        "Somebody else took its number in this very moment: try again.",
    ),
    _r(
        "cgroup",
        r"Can't move .* into|Cgroup dir .* doesn't exist",
        "a control group of the tree cannot be used here",
        "Make it first.",
    ),
    _r(
        "loginuid",
        r"Setting loginuid for",
        "the login uid cannot be set",
        "criuctl needs CAP_AUDIT_CONTROL.",
    ),
    _r(
        "no-memory",
        r"Cannot allocate memory|Can't restore \S+ mapping with 0xf+4$",  # -ENOMEM
        "memory ran out",
        "Free memory, or restore with --lazy; of a tree with huge pages: more of those "
        "(nr_hugepages).",
    ),
    _r(
        "no-space",
        r"No space left on device",
        "a file system is full",
        "Free room there, or in the tmpfs that criuctl uses (run_dir).",
    ),
    _r(
        "images",
        r"Can't (?:open|read) .*\.img|Image corrupt|image corruption|No .*img",
        "an image is missing or damaged",
        "`criuctl verify`.",
    ),
    _r(
        "denied",
        r"Operation not permitted|Permission denied",
        "the kernel denied what CRIU needs",
        _ROOT,
    ),
)

REMEDIES: tuple[Remedy, ...] = _DUMP + _RESTORE

# What CRIU mostly gets over: the reason only if the log has no other.
FLEETING: tuple[Remedy, ...] = (
    _r(
        "ended",
        r"Unseizable non-zombie \d+ found, state (?:[Xx],|., err [1-9])",
        "a process was just ending",
        _AGAIN,
    ),
    _r(
        "traced",
        r"(?:Unseizable non-zombie|Unable to interrupt task:?) (?P<pid>\d+)\b(?! \(No such process)",
        _TRACED,
        _UNTRACE,
        passes=True,
    ),
    _r(
        "freeze",
        r"Task pid reused while suspending|SEIZE \d+: ",
        "processes came and went while the tree was being frozen",
        _AGAIN,
    ),
    _r(
        "freeze",
        r"^Collected \(-\d+ attempts, [1-9]\d* in_progress\)",
        "processes or threads began faster than CRIU could stop them",
        _AGAIN,
    ),
    _r(
        "ended",
        r"Can't open (?P<pid>\d+)\b.*: No such file|: No such process$|Unable to interrupt task: \d+ \(No such process",
        "a process or thread was just ending",
        _AGAIN,
    ),
)
