"""The contents and attributes of one file, read for a checkpoint."""

from __future__ import annotations

import base64
import errno
import fcntl
import os

from blake3 import blake3

from ..checkpoint.chunks import StreamRef
from ..checkpoint.file_records import FileRecord
from ..checkpoint.records import MAX_INT
from ..checkpoint.writer import CheckpointWriter
from ..proc.syscalls import pidfd_getfd
from ..report import Reporter

_PIECE = 1 << 20


def digest(fd: int, length: int) -> str:
    """Return the BLAKE3 (hex) of the first `length` bytes of an open file; "" when it is
    shorter.
    """
    hasher = blake3()
    buffer = bytearray(min(_PIECE, max(length, 1)))
    view = memoryview(buffer)
    position = 0
    while position < length:
        count = os.preadv(fd, [view[: min(len(view), length - position)]], position)
        if count == 0:
            return ""
        hasher.update(view[:count])
        position += count
    return hasher.hexdigest()


def open_contents(path: str, leased: tuple[int, int] | None, flags: int) -> int:
    """Return a descriptor from which a file can be read.

    Opening a file breaks another process's write lease on it: the kernel sends that program a
    signal, which ends a program that does not expect it.  So the program's own descriptor is
    borrowed; EACCES if that is for writing only.
    """
    if leased is None:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    pid, fd = leased
    pidfd = os.pidfd_open(pid)
    try:
        borrowed = pidfd_getfd(pidfd, fd)
    finally:
        os.close(pidfd)
    if fcntl.fcntl(borrowed, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        os.close(borrowed)
        raise OSError(errno.EACCES, f"PID {pid} has a lease on it, which reading would break")
    return borrowed


def store_contents(
    writer: CheckpointWriter, path: str, fd: int, size: int, reporter: Reporter
) -> tuple[str, StreamRef, int]:
    """Put the contents into the checkpoint; return (hash, stream, size).

    The size is less if the file became shorter meanwhile.
    """
    taken = writer.add_file(("file", path), fd, size)
    if taken.changed:
        reporter.warning(f"{path} was written to by a process outside the tree while it was read")
    return taken.digest, writer.stream(("file", path)), taken.size


def base_record(path: str, kind: str, status: os.stat_result) -> FileRecord:
    """Return the record of a file without its contents."""
    return FileRecord(
        path=path,
        kind=kind,
        size=status.st_size,
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        # some file systems know years before 1386 and after 2554
        mtime_ns=max(-MAX_INT, min(status.st_mtime_ns, MAX_INT)),
        inode=status.st_ino,
        device=status.st_dev,
    )


def extended_attributes(file: str | int) -> dict[str, str]:
    """Return the extended attributes of an open file, or of what a link of /proc leads to, which
    may be a symbolic link itself.
    """
    try:
        return {n: base64.b64encode(os.getxattr(file, n)).decode() for n in os.listxattr(file)}
    except OSError:
        return {}  # a file system without extended attributes
