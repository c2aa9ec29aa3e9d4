"""CRIU's messages at a dump; those about descriptors are in `descriptor_remedies`."""

from __future__ import annotations

from .descriptor_remedies import DESCRIPTORS
from .remedy import AGAIN, CLOSE, DROP, ROOT, TERMINAL, TRACED, UNTRACE, Remedy, remedy

_STOPPING: tuple[Remedy, ...] = (
    remedy(
        "ended",
        r"kcmp failed: .*: No such process",
        "a process was just ending",
        AGAIN,
    ),
    remedy(
        "traced",
        r"Unable to interrupt task:? (?P<pid>\d+) \(Operation not permitted",
        TRACED,
        UNTRACE,
        passes=True,
    ),
    remedy(
        "signal",
        r"Unexpected (?P<pid>\d+) task interruption",
        "a signal was just reaching process {pid}",
        AGAIN,
    ),
    remedy(
        "address-space-used-up",
        r"remote mmap\(\) failed: Cannot allocate memory|Can't rmap memfd for parasite blob",
        "a process may not map what CRIU needs inside of it (ulimit -v)",
        "Raise its limit: `prlimit --pid PID --as=BYTES:`.",
    ),
    remedy(
        "mappings-used-up",
        r"remote_mprotect failed",
        "CRIU cannot map what it needs inside of a process, which may have no more memory "
        "mappings (vm.max_map_count)",
        "See how many it has (`wc -l /proc/PID/maps`), and raise the limit: `sysctl "
        "vm.max_map_count=NUMBER`.",
    ),
    remedy(
        "descriptors-used-up",
        r"Can't create memfd in victim: Too many open files",
        "a process may not open what CRIU needs inside of it (ulimit -n)",
        "It began just now (sshd does so before a login): try again; where it stays so, `criuctl "
        "check` shows the remedy.",
        passes=True,
    ),
    remedy(
        "pipes-used-up",
        r"Unable to set a pipe size",
        "the pipes of this user are as many as it may have (fs.pipe-user-pages-soft)",
        "Raise the limit (`sysctl fs.pipe-user-pages-soft=NUMBER`), or give criuctl "
        "CAP_SYS_RESOURCE, which is not bound by it.",
    ),
    remedy(
        "inside",
        r"The criu itself is within dumped tree",
        "criuctl runs inside the tree that it is to dump",
        "Run it from elsewhere.",
    ),
)

_TREE: tuple[Remedy, ...] = (
    remedy(
        "nested-namespace",
        # a process that is ending has none of these any more
        r"Can't dump nested (?P<kind>ipc|uts|time|cgroup) namespace for (?P<pid>\d+)",
        "process {pid} was just ending, or has entered another {kind} namespace inside the tree",
        "Try again; if it lives on in there, dump the tree inside that namespace by itself.",
        passes=True,
    ),
    remedy(
        "nested-namespace",
        r"Can't dump nested (?P<kind>\w+) namespace for (?P<pid>\d+)",
        "process {pid} has a {kind} namespace of its own inside the tree",
        "Dump the tree inside that namespace by itself.",
    ),
    remedy(
        "session-outside-pid-namespace",
        r"session leader of (?:zombie process )?(?P<pid>\d+)\(\d+\) "
        r"is outside of its pid namespace",
        "the session of process {pid} is led from outside of its PID namespace",
        "Start the program there with `setsid`.",
    ),
    remedy(
        "foreign-user",
        r"Can't get rlimit",
        "the limits of a process of another user cannot be read without CAP_SYS_RESOURCE",
        ROOT,
    ),
    remedy(
        "session-outside",
        r"root process (?P<pid>\d+) is not a session leader",
        "process {pid} does not lead its session",
        "Dump its leader.",
    ),
    remedy(
        "pending-sigtrap",
        r"Can't dump the (?P<pid>\d+) thread with a pending SIGTRAP",
        "thread {pid} has a SIGTRAP pending",
        AGAIN,
    ),
    remedy(
        "leader-gone",
        r"Zombies? (?:with threads|thread) (?:are )?not supported",
        "a process was just ending, or lives on without its main thread",
        AGAIN,
    ),
    remedy(
        "stopping",
        r"Individually stopped threads",
        "a process was just being stopped or continued",
        AGAIN,
    ),
    remedy(
        "shared-with-parent",
        r"Can't make (?:VM|FS|FILES|IO) id for (?P<pid>\d+)",
        "process {pid} shares memory, folders, descriptors or signal handlers with another one, "
        "as threads do",
        "It began just now: try again; where there always is one, have the program fork instead.",
        passes=True,
    ),
    remedy(
        "root-dead",
        r"A root task is dead",
        "the root of the tree has ended",
        "There is nothing left to dump.",
    ),
    remedy(
        "terminals",
        r"Only one slave external peer",
        "more than one terminal is held from outside of the tree",
        TERMINAL,
    ),
    remedy(
        "terminals",
        r"Found slave peer index|dangling tty|ctty inheritance",
        "a terminal is held from outside of the tree",
        TERMINAL,
    ),
    remedy(
        "terminal-number",
        r"Index (?P<number>\d+) on (?:ptmx|pts) is too big",
        "a terminal inside the tree has the number {number}, which is too high for CRIU",
        "End what holds the many others, and have the program open its terminal again.",
        fd=True,
    ),
    remedy(
        "many-terminals",
        r"Too many external terminals",
        "terminals held from outside of the tree are opened too often",
        "Have programs use the descriptors that they inherit, instead of opening /dev/tty, or "
        "end some of them.",
    ),
    remedy(
        "terminals",
        r"Unable to find a tty driver",
        "a terminal of a kind that CRIU does not know is open",
        CLOSE,
        fd=True,
    ),
    remedy(
        "mapping-kind",
        r"Unknown shit \d+ \((?P<what>.*)\)|Can't handle non-regular mapping on (?P<pid>\d+)'s"
        r"|Unsupported mapping found",
        "memory of a device or of the kernel is mapped",
        "Have the program let go of the device (GPU, sound, video) before the dump; `criuctl "
        "check` names it.",
    ),
    remedy(
        "uprobes",
        r"PID (?P<pid>\d+) has uprobes",
        "a user-space probe is set on process {pid}",
        "Remove it and restart the program.",
    ),
    remedy(
        "ghost-files",
        r"Can't dump ghost file (?P<path>.*) of (?P<size>\d+) size",
        "the deleted file {path} has grown to {size} bytes",
        "Try again: the room for it is computed again.",
    ),
    remedy(
        "link-remap",
        r"Can't link remap to (?P<path>.*): File exists",
        "the deleted file {path} is held by another tree that is being dumped at the moment as "
        "well",
        "Try again when that dump has ended.",
        passes=True,
    ),
    remedy(
        "link-remap",
        r"Can't (?:create|dump)? ?link remap (?:for|to) (?P<path>.*)",
        "no name can be given to the deleted file {path}",
        "Its folder must exist and be writable.",
    ),
    remedy(
        "watch-of-deleted",
        r"Can't find suitable path for handle",
        "a watched file (inotify) was deleted",
        DROP,
        fd=True,
    ),
    remedy(
        "watch-without-path",
        r"Can't dump that handle",
        "a watched file (inotify) is on a file system that finds no file again",
        DROP,
        fd=True,
    ),
    remedy(
        "epoll-target",
        r"Dump eventpoll \(pid: (?P<pid>\d+)\)",
        "an epoll of process {pid} watches a file that {pid} has closed, and another process has "
        "open",
        "Have the program take it off the epoll (EPOLL_CTL_DEL) before it closes what others "
        "have as well.",
    ),
    remedy(
        "freeze",
        r"Unable to freeze cgroup|Timeout reached",
        "the tree could not be frozen in time",
        "Try again, or raise criu_timeout; `criuctl check` names a process that cannot be frozen.",
    ),
    remedy(
        "freeze",
        r"Zombie with children",
        "processes came and went while the tree was being frozen",
        AGAIN,
    ),
    remedy(
        "page-server",
        r"page.?server|Page server|Can't write (?:header|page|img)",
        "CRIU could not hand over the pages",
        "Try again.",
    ),
    remedy(
        "init",
        r"Can't dump a pid namespace without the process init",
        "only a part of a PID namespace was named",
        "Name its first process.",
    ),
    remedy(
        "lo-down",
        r"Unable to connect a socket: Network is unreachable|kerndat_tcp_repair failed",
        "the loopback device of the tree's net namespace is down, and CRIU needs it",
        "`nsenter --target PID --net ip link set lo up`.",
    ),
    remedy(
        "netfilter",
        r"Failed to lock TCP connection|Locking (?:network|connection) failed",
        "the firewall could not hold the connections",
        ROOT,
    ),
)

DUMP: tuple[Remedy, ...] = _STOPPING + DESCRIPTORS + _TREE

# Errors that CRIU usually recovers from: the reason only if the log has no other.
FLEETING: tuple[Remedy, ...] = (
    remedy(
        "ended",
        r"Unseizable non-zombie \d+ found, state (?:[Xx],|., err [1-9])",
        "a process was just ending",
        AGAIN,
    ),
    remedy(
        "traced",
        r"(?:Unseizable non-zombie|Unable to interrupt task:?) (?P<pid>\d+)\b"
        r"(?! \(No such process)",
        TRACED,
        UNTRACE,
        passes=True,
    ),
    remedy(
        "freeze",
        r"Task pid reused while suspending|SEIZE \d+: ",
        "processes came and went while the tree was being frozen",
        AGAIN,
    ),
    remedy(
        "freeze",
        r"^Collected \(-\d+ attempts, [1-9]\d* in_progress\)",
        "processes or threads began faster than CRIU could stop them",
        AGAIN,
    ),
    remedy(
        "ended",
        r"Can't open (?P<pid>\d+)\b.*: No such file|: No such process$"
        r"|Unable to interrupt task: \d+ \(No such process",
        "a process or thread was just ending",
        AGAIN,
    ),
)
