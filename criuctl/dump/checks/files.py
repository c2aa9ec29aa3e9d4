"""Check descriptors that are not sockets: files, devices, and the kernel's anonymous kinds."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

from ...config import Config
from ...criu import binary
from ...errors import NoSuchProcess, PlatformError
from ...gpu.use import opened_device
from ...proc import tunnels
from ...proc.descriptors import Descriptor
from ...proc.procfs import read_raw, reading
from ...proc.tree import Process
from ...quoting import quoted
from ...report import Finding
from .open_paths import check_path
from .scene import Scene

# CRIU: criu/files.c, dump_one_file().  BPF maps of two types are saved, if CRIU was built for it
# (`_saves_bpf_maps`).
_ANONYMOUS = frozenset({"eventfd", "epoll", "inotify", "fanotify", "signalfd", "timerfd", "pidfd"})
_BPF_MAP_TYPES = frozenset({1, 2})  # hash, array
_TIMER_CLOCKS = frozenset({0, 1, 7})  # realtime, monotonic, boottime
_MEM_MAJOR = 1  # null, zero, full, random, urandom, kmsg, ...
_AUTOFS = os.makedev(10, 235)
_CTTY, _CONSOLE, _PTMX = os.makedev(5, 0), os.makedev(5, 1), os.makedev(5, 2)
_LAST_CONSOLE = 63
_PTS_MAJOR, _USB_SERIAL, _LOW_DENSE_SERIAL = 136, 188, 204
_PTM_MAJORS = range(128, 136)
_PIDFD_THREAD = os.O_EXCL
_BLOCK = 512
_MIB = 1 << 20

IO_URING_HINT = (
    "Have the program do without: io_uring off in its configuration, for Node.js "
    "UV_USE_IO_URING=0, for MariaDB innodb_use_native_aio=OFF. A program that always asks for one "
    "(newer libuv: uvloop, Node.js) does without where the kernel gives none: start it by "
    "`criuctl run --no-io-uring`, or set `sysctl kernel.io_uring_disabled=2` before."
)

_WHY = {
    "[userfaultfd]": (
        "Have the program end its use of it (a garbage collector or a virtual machine's migration)."
    ),
    "[perf_event]": "Have the program stop measuring, or end the profiler inside the tree.",
    "bpf-prog": "Have the program unload its BPF program, or dump the processes that hold none.",
    "bpf-map": "Have the program close its BPF maps before the dump; hash and array maps are "
    "saved by a CRIU that was built with libbpf, which Debian's was not.",
    # CRIU does not save Landlock, and no file of /proc shows which processes are in a domain: this
    # hint is the only place to report it.
    "[landlock-ruleset]": (
        "Have the program close the ruleset after use. Note that the sandbox it "
        "has entered with it is not restored, and that nothing shows this: "
        "after a restore the program runs unconfined until it confines itself "
        "again."
    ),
    "kvm-vm": "A virtual machine is saved with its own tools (`virsh save`, QEMU's savevm).",
    "kvm-vcpu:0": "A virtual machine is saved with its own tools (`virsh save`, QEMU's savevm).",
}


def check_descriptors(scene: Scene) -> Iterator[Finding]:
    """Check every descriptor that is no socket; one that is shared with children is reported
    once.
    """
    reported: set[tuple[str, int, int, int]] = set()
    for process, d in scene.descriptors():
        key = (d.target, d.inode, d.mnt_id, d.flags)
        if d.kind == "socket" or (key in reported and not d.target.startswith("anon_inode:")):
            continue
        reported.add(key)
        yield from _descriptor(scene, process, d)


def _error(process: Process, d: Descriptor, code: str, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint, pid=process.pid, fd=d.fd)


def _descriptor(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    yield from _breaking_lease(process, d)
    if not d.target:
        text = (
            "the path of what is open is longer than 4096 bytes: the kernel does not report such "
            "a path, and CRIU cannot save it"
        )
        yield _error(
            process,
            d,
            "path-too-long",
            text,
            "Have the program close it, or move the folder further up.",
        )
    elif d.flags & os.O_PATH and (kind := _taken_for(d)):
        yield _error(
            process,
            d,
            f"path-of-{kind.lower()}",
            f"{d.target} is a {kind} that is open as a path only (O_PATH); CRIU takes it for one "
            "that can be used",
            "Have the program close it.",
        )
    elif d.kind == "io_uring":
        yield _error(
            process,
            d,
            "io-uring",
            "an io_uring is open; CRIU cannot save its queues",
            IO_URING_HINT,
        )
    elif d.target.startswith("anon_inode:"):
        yield from _anonymous(scene, process, d)
    elif d.target == "/secretmem":
        yield _error(
            process,
            d,
            "secret-memory",
            "secret memory (memfd_secret) is open: not even the kernel lets it be read",
            "Configure the program to keep its secrets in ordinary memory.",
        )
    elif d.kind == "memfd":
        yield from _huge(process, d)
    elif d.kind in ("device", "tty"):
        yield from _device(scene, process, d)
    elif d.kind == "pipe":
        # O_DIRECT on a pipe means packets: the boundaries between them would be lost.
        if d.target.startswith("pipe:") and d.flags & os.O_DIRECT and not _is_of_autofs(scene, d):
            yield _error(
                process,
                d,
                "packet-pipe",
                "the pipe is in packet mode (O_DIRECT), which CRIU cannot save",
                "Have the program use plain pipes.",
            )
        elif not d.target.startswith("pipe:"):
            yield from check_path(scene, process, d)
    elif d.kind in ("file", "dir", "symlink"):
        yield from check_path(scene, process, d)
    elif d.kind == "namespace" and all(
        d.inode not in spaces.values() for spaces in scene.namespaces.values()
    ):
        yield _error(
            process,
            d,
            "namespace-file",
            f"the namespace {d.target} is open, in which no process of the tree is; CRIU cannot "
            "save or restore that",
            "Have the program close it, or open it by a name (`ip netns`, a bind mount).",
        )
    elif d.kind == "other":
        yield _error(
            process,
            d,
            "descriptor-kind",
            f"{d.target} cannot be saved by CRIU",
            "Have the program close it.",
        )


def _breaking_lease(process: Process, d: Descriptor) -> Iterator[Finding]:
    if any(line.startswith("lock:") and "LEASE" in line and "BREAKING" in line for line in d.extra):
        yield Finding(
            "warning",
            "lease-breaking",
            f"the lease on {d.target} is being broken; a restore breaks it again, and the program "
            "gets that signal once more",
            "Dump when the program has given it up (within "
            f"{int(read_raw('/proc/sys/fs/lease-break-time'))} s).",
            pid=process.pid,
            fd=d.fd,
        )


def _taken_for(d: Descriptor) -> str:
    """Return what CRIU takes a descriptor of a path for, without success; "" for what it takes for
    a path.
    """
    if stat.S_ISSOCK(d.mode):
        return "socket"
    if d.kind == "pipe" and not d.target.startswith("pipe:"):
        return "FIFO"
    return "terminal" if d.kind == "tty" and d.rdev in (_PTMX, _CTTY) else ""


def _field(d: Descriptor, name: str) -> int | None:
    for line in d.extra:
        key, _, value = line.partition(":")
        if key.strip() == name:
            try:
                return int(value.split()[0], 0)
            except (ValueError, IndexError):
                return None
    return None


def _anonymous(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    what = d.target.removeprefix("anon_inode:")
    if d.kind == "timerfd":
        clock = _field(d, "clockid")
        if clock is not None and clock not in _TIMER_CLOCKS:
            yield _error(
                process,
                d,
                "timer-clock",
                f"the timer runs on clock {clock}, which wakes the machine from sleep; CRIU "
                "knows the ordinary clocks only",
                "Have the program use CLOCK_BOOTTIME or CLOCK_REALTIME.",
            )
    elif d.kind == "pidfd":
        pid = _field(d, "Pid")
        if d.flags & _PIDFD_THREAD:
            yield _error(
                process,
                d,
                "pidfd-thread",
                f"the pidfd stands for a thread ({pid}), which CRIU cannot save",
                "Have the program close it.",
            )
        elif pid is not None and pid != -1 and scene.outside(pid):
            yield _error(
                process,
                d,
                "pidfd-outside",
                f"the pidfd stands for process {scene.command_of(pid)}, which is not part of the "
                "tree",
                "Have the program close it, or dump a tree that holds both.",
            )
    elif d.kind not in _ANONYMOUS and not (
        what == "bpf-map"
        and _field(d, "map_type") in _BPF_MAP_TYPES
        and _saves_bpf_maps(scene.config)
    ):
        yield _error(
            process,
            d,
            "descriptor-kind",
            f"{what} is open, which CRIU cannot save",
            _WHY.get(what, "Have the program close it before the dump."),
        )


def _saves_bpf_maps(config: Config) -> bool:
    """Return whether CRIU was built with libbpf: its program then names that library as needed.

    The answer is True for what is no ELF program (a script that starts one); CRIU itself refuses
    then.
    """
    try:
        program = Path(binary.find(config).argv[-1]).read_bytes()
    except (PlatformError, OSError):
        return True  # no CRIU is another finding
    return not program.startswith(b"\x7fELF") or b"libbpf" in program


def _huge(process: Process, d: Descriptor) -> Iterator[Finding]:
    """Check that a memfd of huge pages can be saved.

    CRIU recognises it by the device of a page of that size, which it allocates for this purpose.
    """
    with reading(process.pid):
        size = os.stat(f"/proc/{process.pid}/fd/{d.fd}").st_blksize
    pool = f"/sys/kernel/mm/hugepages/hugepages-{size >> 10}kB"
    if size <= resource.getpagesize() or not os.path.isdir(pool):
        return
    free = int(read_raw(f"{pool}/free_hugepages")) - int(read_raw(f"{pool}/resv_hugepages"))
    if free <= 0 and not int(read_raw(f"{pool}/nr_overcommit_hugepages")):
        yield _error(
            process,
            d,
            "huge-pages",
            f"{d.target} is of huge pages of {size >> 10} KiB; CRIU needs a free one to save it, "
            "and this host has none",
            f"Add a free huge page: `echo N > {quoted(pool)}/nr_hugepages`.",
        )


def _device(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    if opened_device(d):
        return  # `check_gpu` judges these
    major, minor = os.major(d.rdev), os.minor(d.rdev)
    name = f"{d.target} ({'block' if stat.S_ISBLK(d.mode) else 'character'} device {major}:{minor})"
    if stat.S_ISCHR(d.mode):
        if major == _MEM_MAJOR or d.rdev == _AUTOFS:
            yield from check_path(scene, process, d)
            return
        if _is_known_terminal(d.rdev):
            return
        if d.rdev == tunnels.DEVICE and _tunnel_is_saved(scene, process, d):
            yield from check_path(scene, process, d)
            return
    hint = "Have the program close the device before the dump and open it again afterwards."
    if d.rdev == tunnels.DEVICE:
        hint = (
            "End the tunnel before the dump, or start the program in a net namespace of its own "
            "(`unshare --net`)."
        )
    yield _error(
        process,
        d,
        "device",
        (f"{name} is open; the device's state is not in any process and cannot be saved"),
        hint,
    )


def _is_of_autofs(scene: Scene, d: Descriptor) -> bool:
    """Return whether it is the pipe of an autofs that CRIU saves: its packets have one size."""
    if not scene.saved("mnt"):
        return False
    return any(
        m.kind == "autofs" and f"pipe_ino={d.inode}" in m.settings for m in scene.mounts.values()
    )


def _tunnel_is_saved(scene: Scene, process: Process, d: Descriptor) -> bool:
    """Return whether its network interface is in a net namespace that CRIU saves, and returns with
    it.
    """
    if not scene.saved("net"):
        return False
    saved = {inodes["net"] for inodes in scene.namespaces.values()} - {scene.own_namespaces["net"]}
    try:
        return tunnels.net_namespace(process.pid, d.fd) in saved
    except (NoSuchProcess, OSError):
        return False


def _is_known_terminal(rdev: int) -> bool:
    """Return whether CRIU has a driver for this terminal (criu/tty.c, get_tty_driver)."""
    major, minor = os.major(rdev), os.minor(rdev)
    if rdev in (_CTTY, _CONSOLE, _PTMX) or major in _PTM_MAJORS:
        return True
    return (major == 4 and minor <= _LAST_CONSOLE) or major in (
        _PTS_MAJOR,
        _USB_SERIAL,
        _LOW_DENSE_SERIAL,
    )
