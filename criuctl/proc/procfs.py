"""Read ``/proc`` and map its races to two errors.

A process may vanish between any two system calls: that raises `NoSuchProcess` and never gives an
empty answer. The kernel may refuse to show it (another user's process, no CAP_SYS_PTRACE): that
raises `PreflightRefused`, since a caller that may not look at a process cannot dump it either.

A process that is ending loses its memory, descriptors and namespaces one after the other while it
is still listed. Its files then give all kinds of answers: an empty or short one, EINVAL
(``mountinfo``), EIO. So `reading` takes every failure to read or to parse as the end of the
process, if the process has ended or is about to by then. All that opens ``/proc/PID/...`` does so
through this module or inside `reading`; a test looks for what does not.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ..errors import CriuctlError, NoSuchProcess, PreflightRefused

_FIRST_READ = 65536  # most files of /proc fit; one read(2) then gives a consistent snapshot
_PF_EXITING = 0x4
UNREADABLE = (OSError, ValueError, LookupError, struct.error)  # reading or parsing has failed


@contextmanager
def reading(pid: int) -> Iterator[None]:
    """Map the errors of reads about `pid` inside the block, and of the parsing of what was read."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        raise NoSuchProcess(f"there is no process with PID {pid}") from None
    except UNREADABLE as error:
        if ending(pid):
            raise NoSuchProcess(f"the process with PID {pid} has ended") from error
        if not isinstance(error, PermissionError):
            raise
        raise PreflightRefused(
            f"PID {pid}: the kernel does not permit criuctl to read it "
            f"({error.filename or error.strerror})",
            hint="Run criuctl as root, with CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE.",
            pid=pid,
        ) from error


def ending(pid: int) -> bool:
    """Return whether the process or thread is gone, is a zombie, or runs none of its instructions
    any more.
    """
    try:
        fields = read_raw(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X", b"x") or bool(int(fields[6]) & _PF_EXITING)


def open_entry(pid: int, name: str, flags: int = os.O_PATH) -> int:
    """Return a descriptor of ``/proc/PID/name``, close-on-exec; `NoSuchProcess`,
    `PreflightRefused`.
    """
    with reading(pid):
        return os.open(f"/proc/{pid}/{name}", flags | os.O_CLOEXEC)


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Return exactly these bytes of a process's memory.

    `NoSuchProcess`, `PreflightRefused`; `OSError` (EIO) if they are not all mapped.
    """
    fd = open_entry(pid, "mem", os.O_RDONLY)
    with reading(pid):
        try:
            data = os.pread(fd, size, address)
        finally:
            os.close(fd)
        if size and not data:  # the kernel has no memory to read from
            raise ProcessLookupError
        if len(data) < size:
            raise OSError(errno.EIO, f"{size} bytes at {address:#x} cannot be read")
        return data


def open_pidfd(pid: int) -> int:
    """Return a pidfd of the process that has this PID now, close-on-exec.

    `NoSuchProcess`, `PreflightRefused`.
    """
    with reading(pid):
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            # Linux 6.12 answers so for a reaped process whose PID still names a group or a session.
            if error.errno == errno.EINVAL:
                raise ProcessLookupError from None
            raise


def umask() -> int:
    """Return this process's umask, without changing it for a moment as umask(2) does."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def read_raw(path: str, dir_fd: int | None = None) -> bytes:
    """Return the whole content of a procfs file; lets `OSError` through."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        data = os.read(fd, _FIRST_READ)
        if not data:
            return data
        # Large files (maps, mountinfo) come page by page: only an empty read shows their end.
        pieces = [data]
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces) if len(pieces) > 1 else data
    finally:
        os.close(fd)


def read_bytes(pid: int, name: str) -> bytes:
    """Return ``/proc/PID/name`` as bytes; `NoSuchProcess`, `PreflightRefused`."""
    with reading(pid):
        return read_raw(f"/proc/{pid}/{name}")


def read_text(pid: int, name: str) -> str:
    """Return ``/proc/PID/name`` as text, undecodable bytes kept as surrogates."""
    return os.fsdecode(read_bytes(pid, name))


def read_lines(pid: int, name: str) -> list[str]:
    """Return the lines of ``/proc/PID/name``."""
    return text_lines(read_text(pid, name))


def text_lines(text: str) -> list[str]:
    """Split text into lines at "\\n" alone, as the kernel writes them.

    Names may hold every other character at which Python splits lines.
    """
    return text.removesuffix("\n").split("\n") if text else []


def read_link(pid: int, name: str) -> str:
    """Return the target of the link ``/proc/PID/name``; "" as in `target_of`."""
    with reading(pid):
        return target_of(f"/proc/{pid}/{name}")


def target_of(link: str, dir_fd: int | None = None) -> str:
    """Return the target of a procfs link.

    "" for a path longer than the kernel shows (4096 bytes). Lets `OSError` through.
    """
    try:
        return os.readlink(link, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return ""
        raise


def read_status(pid: int, name: str = "status") -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``, or of a thread's (`name`: ``task/TID/status``)."""
    with reading(pid):
        return dict(line.split(":", 1) for line in read_lines(pid, name))


def field_of(status: bytes, name: bytes) -> bytes:
    """Return one field of the content of a status file: for many threads, `read_status` is slow."""
    at = status.index(b"\n%b:" % name) + len(name) + 2
    return status[at : status.index(b"\n", at)].strip()


def memory_info() -> dict[str, str]:
    """Return the fields of ``/proc/meminfo``; sizes are "N kB"."""
    return dict(line.split(":", 1) for line in read_raw("/proc/meminfo").decode().splitlines())


def available_memory() -> int:
    """Return how many bytes programs may still take without swapping, as the kernel estimates."""
    info = memory_info()
    return int(info["MemAvailable"].split()[0]) * 1024


def swaps() -> list[str]:
    """Return the swap areas in use, without compressed memory (zram)."""
    lines = read_raw("/proc/swaps").decode(errors="replace").splitlines()[1:]
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("/dev/zram")]


def all_pids() -> list[int]:
    """Return every PID that this procfs shows, ascending."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def all_tids(pid: int) -> list[int]:
    """Return every thread of a process, ascending; none if it is gone."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except (FileNotFoundError, ProcessLookupError):
        return []


def inner_thread(pid: int, tid: int) -> str:
    """Return the thread's ID in its own PID namespace."""
    with suppress(CriuctlError):
        for line in read_lines(pid, f"task/{tid}/status"):
            if line.startswith("NSpid:"):
                return line.split()[-1]
    return str(tid)


def anonymous_memory(pid: int) -> int:
    """Return the bytes of memory, swap and huge pages of a process that no file on a disk has.

    Shared memory counts with the process's share of it. `NoSuchProcess`.
    """
    status = read_status(pid)
    kib = sum(_kib(status, name) for name in ("RssAnon", "VmSwap", "HugetlbPages"))
    if _kib(status, "RssShmem"):
        rollup = dict(line.split(":", 1) for line in read_lines(pid, "smaps_rollup")[1:])
        kib += _kib(rollup, "Pss_Shmem")
    return kib * 1024


def _kib(fields: Mapping[str, str], name: str) -> int:
    words = fields.get(name, "").split()
    return int(words[0]) if words else 0  # a zombie has none


def unit_of(pid: int) -> str:
    """Return the systemd unit (service or scope) that a process is in; "" for none."""
    return unit_in(read_text(pid, "cgroup"))


def unit_in(groups: str) -> str:
    """Return the systemd unit named in the text of ``/proc/PID/cgroup``; "" for none."""
    for line in text_lines(groups):
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "name=systemd"):
            units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
            if units:
                return units[-1]
    return ""
