"""An inode's identity over time: inode numbers alone are reused for later files.

A file system reuses an inode number as soon as it is free, and device numbers may change when the
host is started again. The file handle (name_to_handle_at(2)) contains the inode's generation, and
statx(2) returns its time of creation; the creator of a file can choose neither.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import folder_walk

_SYS_OPENAT2 = 437  # the same number on every architecture
NO_LINKS, IN_ROOT = 0x04, 0x10  # openat2(2): RESOLVE_NO_SYMLINKS, RESOLVE_IN_ROOT
_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_AT_FDCWD, _AT_STATX_DONT_SYNC = -100, 0x4000
_BORN = struct.Struct("=qI")  # stx_btime, at 80 in struct statx
_DEVICES = struct.Struct("=4I")  # stx_rdev_major and _minor, stx_dev_major and _minor, at 128
_LIBC = ctypes.CDLL(None, use_errno=True)


def open_below(root: int, path: str, resolve: int, flags: int = 0) -> int:
    """Open the file at `path` with O_PATH, where the folder `root` is "/"; `OSError`.

    `resolve`: flags of openat2(2); with `NO_LINKS` a link is ELOOP. Links of processes in procfs
    are never followed. With O_NOFOLLOW in `flags` a link at the end is opened itself.
    """
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC | flags, 0, resolve | IN_ROOT)
    while True:
        fd = int(_LIBC.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how)))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EAGAIN:  # a component was renamed meanwhile
            raise OSError(code, os.strerror(code), path)


def born(fd: int) -> int:
    """Return when the inode was made, in nanoseconds of unix time.

    0 if its file system does not say.
    """
    if not hasattr(_LIBC, "statx"):
        return 0
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer) < 0:
        return 0
    (mask,) = struct.unpack_from("=I", buffer)
    seconds, nanoseconds = _BORN.unpack_from(buffer, 80)
    return seconds * 10**9 + nanoseconds if mask & _STATX_BTIME else 0


def device(path: str) -> tuple[int, int]:
    """Return st_dev and st_rdev of the file at `path`, as the kernel knows them; `OSError`.

    Its file system is not asked: one that another user serves (FUSE), or a server that does not
    answer, could otherwise make the caller wait.
    """
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, 0, buffer) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    numbers = _DEVICES.unpack_from(buffer, 128)
    return os.makedev(*numbers[2:]), os.makedev(*numbers[:2])


def handle(fd: int) -> str:
    """Return the file handle; "" where its file system has none."""
    return folder_walk.handle(fd)


__all__ = ["IN_ROOT", "NO_LINKS", "born", "device", "handle", "open_below"]
