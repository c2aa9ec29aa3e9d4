"""Reading ``/proc`` with its races mapped to two errors.

A process may vanish between any two system calls: that is `NoSuchProcess`, never an empty answer.
The kernel may refuse to let us look (another user's process, no CAP_SYS_PTRACE): that is
`PreflightRefused`, since whoever may not look at a process cannot dump it either.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import NoSuchProcess, PreflightRefused

_FIRST_READ = 65536  # most files of /proc fit; one read(2) then gives a consistent snapshot


@contextmanager
def reading(pid: int) -> Iterator[None]:
    """Map the errors of whatever is read about `pid` inside the block."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        raise NoSuchProcess(f"there is no process with PID {pid}") from None
    except PermissionError as error:
        raise PreflightRefused(
            f"PID {pid}: the kernel does not let criuctl look at it "
            f"({error.filename or error.strerror})",
            hint="Run criuctl as root, with CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE.",
            pid=pid,
        ) from error


def open_pidfd(pid: int) -> int:
    """A pidfd of the process that has this PID now, close-on-exec; `NoSuchProcess`,
    `PreflightRefused`.
    """
    with reading(pid):
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            # Linux 6.12 says so of one that was reaped while a group or a session is still called
            # by its number.
            if error.errno == errno.EINVAL:
                raise ProcessLookupError from None
            raise


def read_raw(path: str, dir_fd: int | None = None) -> bytes:
    """The whole content of a file of procfs; lets `OSError` through."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        data = os.read(fd, _FIRST_READ)
        if not data:
            return data
        # Large files (maps, mountinfo) come page by page: an empty read is the only sign of their
        # end.
        pieces = [data]
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces) if len(pieces) > 1 else data
    finally:
        os.close(fd)


def read_bytes(pid: int, name: str) -> bytes:
    """``/proc/PID/name`` as bytes; `NoSuchProcess`, `PreflightRefused`."""
    with reading(pid):
        return read_raw(f"/proc/{pid}/{name}")


def read_text(pid: int, name: str) -> str:
    """``/proc/PID/name`` as text, undecodable bytes kept as surrogates."""
    return os.fsdecode(read_bytes(pid, name))


def read_lines(pid: int, name: str) -> list[str]:
    """The lines of ``/proc/PID/name``."""
    return text_lines(read_text(pid, name))


def text_lines(text: str) -> list[str]:
    """Lines as the kernel writes them: names may hold every other character at which Python cuts
    lines.
    """
    return text.removesuffix("\n").split("\n") if text else []


def read_link(pid: int, name: str) -> str:
    """Where the link ``/proc/PID/name`` points; "" as `target_of`."""
    with reading(pid):
        return target_of(f"/proc/{pid}/{name}")


def target_of(link: str, dir_fd: int | None = None) -> str:
    """Where a link of procfs points; "" to a path that is longer than the kernel tells (4096
    bytes).  Lets `OSError` through.
    """
    try:
        return os.readlink(link, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return ""
        raise


def read_status(pid: int, name: str = "status") -> dict[str, str]:
    """The fields of ``/proc/PID/status``, or of a thread's (`name`: ``task/TID/status``)."""
    return dict(line.split(":", 1) for line in read_lines(pid, name))


def memory_info() -> dict[str, str]:
    """The fields of ``/proc/meminfo``; sizes are "N kB"."""
    return dict(line.split(":", 1) for line in read_raw("/proc/meminfo").decode().splitlines())


def available_memory() -> int:
    """Bytes that programs may still take without swapping, as the kernel sees it."""
    told = memory_info()
    return int(told["MemAvailable"].split()[0]) * 1024


def swaps() -> list[str]:
    """The swap areas in use, but for those that are compressed memory (zram)."""
    lines = read_raw("/proc/swaps").decode(errors="replace").splitlines()[1:]
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("/dev/zram")]


def all_pids() -> list[int]:
    """Every PID that this procfs shows, ascending."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def all_tids(pid: int) -> list[int]:
    """Every thread of a process, ascending; none of one that is gone."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except (FileNotFoundError, ProcessLookupError):
        return []


def unit_of(pid: int) -> str:
    """The systemd unit (a service or a scope) that a process is of, by its control group; "" for
    none.
    """
    return unit_in(read_text(pid, "cgroup"))


def unit_in(groups: str) -> str:
    """The same, from what ``/proc/PID/cgroup`` says."""
    for line in text_lines(groups):
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "name=systemd"):
            units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
            if units:
                return units[-1]
    return ""
