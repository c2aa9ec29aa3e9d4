"""File systems in user space that say what they like: every file is root's (`mounted`), or is read
slowly and past the page cache (`slow_file`).

They speak the kernel's protocol (linux/fuse.h, 7.19) on /dev/fuse, just enough for that.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOKUP, FORGET, GETATTR, STATFS, INIT, BATCH_FORGET = 1, 2, 3, 17, 26, 42
OPEN, READ, RELEASE, FLUSH = 14, 15, 18, 25
DIRECT_IO = 1  # FOPEN_DIRECT_IO: reads go past the page cache
ROOT = 1  # the node of the top folder
FOREVER = 1 << 30  # seconds


def _attributes(node: int, size: int = 0) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    size = 0 if node == ROOT else size
    # ino, size, blocks, three times and their nanoseconds, mode, nlink, uid, gid, rdev, blksize
    return struct.pack("=6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int, size: int = 0) -> bytes | None:
    if opcode == INIT:
        return struct.pack("=4I2HI", 7, 19, 0, 0, 0, 0, 4096)
    if opcode == GETATTR:
        return struct.pack("=QII", FOREVER, 0, 0) + _attributes(node, size)
    if opcode == LOOKUP:
        entry = struct.pack("=4Q2I", ROOT + 1, 0, FOREVER, FOREVER, 0, 0)
        return entry + _attributes(ROOT + 1, size)
    return bytes(80) if opcode == STATFS else None


def _serve(fd: int, content: bytes = b"", delay: float = 0.0) -> None:
    def answer(unique: int, body: bytes | None) -> None:
        error = 0 if body is not None else -errno.ENOSYS
        with suppress(OSError):  # the caller is gone
            os.write(fd, struct.pack("=IiQ", 16 + len(body or b""), error, unique) + (body or b""))

    while True:
        try:
            request = os.read(fd, 1 << 17)
        except OSError:  # it has been unmounted
            return
        _, opcode, unique, node = struct.unpack_from("=IIQQ", request)
        if opcode in (FORGET, BATCH_FORGET):
            continue
        if content and opcode == READ:
            _, offset, size = struct.unpack_from("=QQI", request, 40)
            timer = threading.Timer(delay, answer, (unique, content[offset : offset + size]))
            timer.daemon = True
            timer.start()
        elif content and opcode == OPEN:
            answer(unique, struct.pack("=QII", 0, DIRECT_IO, 0))
        elif content and opcode in (RELEASE, FLUSH):
            answer(unique, b"")
        else:
            answer(unique, _answer(opcode, node, len(content)))


@contextmanager
def slow_file(folder: Path, content: bytes, delay: float) -> Iterator[None]:
    """At `folder`, one in which each name is a file with this content; a read takes `delay`
    seconds, and goes to the reader's pages as direct I/O does, without O_DIRECT.
    """
    with mounted(folder, 0, content, delay):
        yield


@contextmanager
def mounted(folder: Path, user: int, content: bytes = b"", delay: float = 0.0) -> Iterator[None]:
    """Such a file system at `folder`, as the server of that user would have it mounted."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id={user},group_id={user},allow_other"
    mount = ["mount", "-i", "-t", "fuse", "-o", options, "claims", str(folder)]
    server = threading.Thread(target=_serve, args=(fd, content, delay), daemon=True)
    try:
        subprocess.run(mount, pass_fds=[fd], check=True, timeout=60)
        server.start()
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True, timeout=60)
            server.join(60)
    finally:
        os.close(fd)
