"""Check mappings that are neither plain memory nor a plain file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ...errors import NoSuchProcess
from ...gpu.use import is_device
from ...proc.mappings import Mapping, vm_flags
from ...proc.tree import Process
from ...report import Finding
from .files import IO_URING_HINT
from .scene import Scene

_DEV_ZERO = os.makedev(1, 5)
_NO_PAGES = frozenset({"io", "pf"})
_SPECIAL = ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]", "[vectors]", "[uprobes]")


def check_mappings(scene: Scene) -> Iterator[Finding]:
    """Report mappings that CRIU cannot save, one finding per process and kind."""
    reported: set[tuple[int, str]] = set()
    suspicious: set[int] = set()
    for process, mapping in scene.mappings():
        for finding in _mapping(scene, process, mapping):
            # A segment that all workers of a server have attached is reported for one of them.
            what = (
                (0, f"shmid {mapping.inode}")
                if finding.code == "sysv-shm"
                else (process.pid, finding.text)
            )
            if what not in reported:
                reported.add(what)
                yield finding
        if is_device(mapping.path):
            continue  # `check_gpu` judges these
        # Ranges without pages (VM_IO, VM_PFNMAP) are made by drivers: such a mapping shows a file
        # or a name.
        if (
            mapping.path
            and mapping.path not in _SPECIAL
            and mapping.path.startswith(("[", "/dev/", "anon_inode:", "/dmabuf"))
        ):
            if not mapping.path.startswith(("[heap", "[stack", "[anon", "/dev/shm/", "/dev/zero")):
                suspicious.add(process.pid)
    for pid in sorted(suspicious):
        yield from _without_pages(scene.by_pid[pid], scene.mapped[pid])


def _mapping(scene: Scene, process: Process, mapping: Mapping) -> Iterator[Finding]:
    path = mapping.path
    # the kernel's name for such a segment
    if path.startswith("/SYSV") and mapping.deleted and not scene.foreign("ipc"):
        yield Finding(
            "error",
            "sysv-shm",
            f"{process} has System V shared memory (shmid {mapping.inode}) of the host's IPC "
            "namespace; CRIU saves it only together with a namespace",
            "Start the program in a private IPC namespace: `unshare --ipc setsid ...`.",
            pid=process.pid,
        )
    elif path.startswith("anon_inode:"):
        what = path.removeprefix("anon_inode:")
        code = "io-uring" if what == "[io_uring]" else "mapping-kind"
        hint = (
            IO_URING_HINT
            if code == "io-uring"
            else "Have the program end its use of it before the dump."
        )
        yield Finding(
            "error",
            code,
            f"{process} has memory of {what} mapped, which CRIU cannot save",
            hint,
            pid=process.pid,
        )
    elif path.startswith("socket:") and (family := _family(scene, mapping.inode)) not in (
        "packet",
        "",
    ):
        text = (
            f"{process} has memory of a socket ({family}) mapped, as for TCP_ZEROCOPY_RECEIVE; "
            "CRIU cannot save it"
        )
        yield Finding(
            "error",
            "mapping-kind",
            text,
            "Have the program unmap it before the dump.",
            pid=process.pid,
        )
    elif path == "/secretmem":
        yield Finding(
            "error",
            "secret-memory",
            f"{process} has secret memory (memfd_secret) mapped: not even the kernel lets it be "
            "read",
            "Configure the program to keep its secrets in ordinary memory.",
            pid=process.pid,
        )
    elif path == "[uprobes]":
        yield Finding(
            "error",
            "uprobes",
            f"a user-space probe (perf, bpftrace, systemtap) is set on {process}",
            "Remove the probe and restart the program: the mapping stays until then.",
            pid=process.pid,
        )
    elif path.startswith("/dev/") and not path.startswith("/dev/shm/") and not is_device(path):
        device = _device_behind(process.pid, mapping)
        if device is not None and device != _DEV_ZERO:
            yield Finding(
                "error",
                "device-mapping",
                f"{process} has the device {path} ({os.major(device)}:{os.minor(device)}) "
                "mapped, whose memory CRIU cannot save",
                "Have the program let go of the device (a GPU, a video or sound card) before the "
                "dump.",
                pid=process.pid,
            )


def _family(scene: Scene, inode: int) -> str:
    """Return the family of a socket that the tree has open; "" for another socket."""
    return next((s.socket.family for s in scene.sockets if s.socket.inode == inode), "")


def _device_behind(pid: int, mapping: Mapping) -> int | None:
    """Return the device number if the mapping is one of a device, else None."""
    try:
        status = os.stat(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}")
    except OSError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) else None


def _without_pages(process: Process, mapped: list[Mapping]) -> Iterator[Finding]:
    try:
        flags = vm_flags(process.pid)
    except NoSuchProcess:
        return
    for mapping in mapped:
        if (
            mapping.path in _SPECIAL
            or (mapping.shared and mapping.inode)
            or is_device(mapping.path)
        ):
            continue
        if flags.get(mapping.start, frozenset()) & _NO_PAGES:
            yield Finding(
                "error",
                "device-mapping",
                f"{process} has a range of device memory mapped "
                f"({mapping.path or 'without a name'}, {mapping.size} bytes)",
                "Have the program let go of the device before the dump.",
                pid=process.pid,
            )
            return


def check_programs(scene: Scene) -> Iterator[Finding]:
    """Report programs and libraries that were removed or replaced while they run (after a package
    upgrade, for example).
    """
    for process in scene.tree:
        if process.zombie:
            continue
        gone = sorted(
            {
                m.path
                for m in scene.mapped.get(process.pid, ())
                if m.deleted and "x" in m.perms and m.path.startswith("/")
            }
        )
        gone = [path for path in gone if not path.startswith(("/memfd:", "/dev/zero", "/SYSV"))]
        if gone:
            yield Finding(
                "info",
                "deleted-program",
                f"{process} runs code from deleted files, which travel in the checkpoint: "
                f"{', '.join(gone)}",
                pid=process.pid,
            )
