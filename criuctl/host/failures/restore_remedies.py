"""CRIU's messages at a restore."""

from __future__ import annotations

from .remedy import CLOSE, PIDS, ROOT, Remedy, remedy

RESTORE: tuple[Remedy, ...] = (
    remedy(
        "descriptor-number",
        r"Can't chose service_fd_base",
        "it has a descriptor whose number is too high for the limit of open files here",
        "Restore it where criuctl has CAP_SYS_RESOURCE, or a higher `ulimit -n`.",
    ),
    remedy(
        "shared-mappings",
        r"(?:Unable to open pages-|Can't open file ).*: Too many open files",
        "CRIU, which restores each mapping of shared memory with a descriptor, can have no more "
        "of them here",
        "Restore it where criuctl has CAP_SYS_RESOURCE, or a higher `ulimit -Hn`.",
    ),
    remedy(
        "pid-taken",
        r"Can't fork for (?P<pid>\d+): File exists|Pid \d+ do not match expected (?P<other>\d+)",
        "a PID of the tree is taken",
        PIDS,
    ),
    remedy(
        "file-changed",
        r"File /?(?P<path>.*) has bad (?P<what>size|mode|build-ID)",
        "/{path} is not the file that was open: its {what} differs",
        "Put the file back, or dump with --with-files next time; `criuctl restore --dry-run` "
        "compares all files.",
    ),
    remedy(
        "file-missing",
        r"Can't open file /?(?P<path>.*?)(?: on restore)?: No such file",
        "/{path} is missing",
        "Put the file back.",
    ),
    remedy(
        "file-denied",
        r"Can't open file /?(?P<path>.*?)(?: on restore)?: (?P<why>.*)",
        "/{path} cannot be opened: {why}",
        "See to that.",
    ),
    remedy(
        "port-taken",
        r"Can't bind inet socket.*Address already in use",
        "a port of the tree is taken",
        "`ss -tuanp` shows the process that has it; connections in TIME-WAIT release it within a "
        "minute.",
    ),
    remedy(
        "address-missing",
        r"Can't bind inet socket.*Cannot assign",
        "this host lacks an address that the tree listens on",
        "Add it, or remove it.",
    ),
    remedy(
        "interface-missing",
        r"couldn't find ifindex for|Can't set 1:25 \(.*No such device",
        "a network interface that a socket of the tree is bound to is not there",
        "Add one of that name (`ip link`).",
    ),
    remedy(
        "unix-path-taken",
        r"Can't bind id \S+ ino \d+ addr (?P<path>.*): Address already in use",
        "a unix socket's name is taken: {path}",
        "End the process that has it, or move away what is there.",
    ),
    remedy(
        "unix-peer-missing",
        r"Can't connect \d+ socket: (?:Connection refused|No such file)",
        "a service that the tree sends datagrams to does not listen here",
        "Start it (syslog, systemd-journald) and restore again.",
    ),
    remedy(
        "connection",
        r"Connected TCP socket in image",
        "the checkpoint holds an established connection",
        "This is a bug in criuctl: report it.",
    ),
    remedy(
        "cpu",
        r"CPU .*(?:mismatch|do not match|unsupported)|FPU feature required",
        "this CPU lacks what the program was using",
        "Use a like host.",
    ),
    remedy(
        "mounts",
        r"A few mount points can't be mounted|No mapping for .* mountpoint",
        "mounts of the tree cannot be made here",
        "Make them.",
    ),
    remedy(
        "namespace-file",
        r"Can't find suitable NS ID",
        "an open namespace file has no counterpart here",
        CLOSE,
        fd=True,
    ),
    remedy(
        "terminals",
        r"tty to inherit session from|Can't open (?:master|slave) pty",
        "a terminal that the tree needs could not be made",
        "Another process took its number at that moment: try again.",
    ),
    remedy(
        "cgroup",
        r"Can't move .* into|Cgroup dir .* doesn't exist",
        "a control group of the tree cannot be used here",
        "Make it first.",
    ),
    remedy(
        "loginuid",
        r"Setting loginuid for",
        "the login uid cannot be set",
        "criuctl needs CAP_AUDIT_CONTROL.",
    ),
    remedy(
        "no-memory",
        r"Cannot allocate memory|Can't restore \S+ mapping with 0xf+4$",  # -ENOMEM
        "memory ran out",
        "Free memory, or restore with --lazy; of a tree with huge pages: more of those "
        "(nr_hugepages).",
    ),
    remedy(
        "no-space",
        r"No space left on device",
        "a file system is full",
        "Free room there, or in the tmpfs that criuctl uses (run_dir).",
    ),
    remedy(
        "images",
        r"Can't (?:open|read) .*\.img|Image corrupt|image corruption|No .*img",
        "an image is missing or damaged",
        "`criuctl verify`.",
    ),
    remedy(
        "denied",
        r"Operation not permitted|Permission denied",
        "the kernel denied what CRIU needs",
        ROOT,
    ),
)
