"""The output of a session as a log of bytes with absolute offsets, bounded in memory and on disk.

The newest bytes are in a ring in memory. The terminal is read directly into it (`room`, `advance`),
and clients are served from it without a copy (`view`). `flush` writes the bytes to a file of
bounded size, at their offset modulo its capacity. Readers that are further back find the scrollback
there, also after the holder's end. The file's first page holds the capacity and the range of
offsets.

A full disk must not stop a session: the file is then given up, and only the ring is kept.  The
bytes of a view are overwritten once a ring's size of output has come: use a view at once.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from ..protocol import OUTPUT_PIECE
from .base64_text import decoded

RING = 1 << 20
DEFAULT_CAPACITY = 16 << 20
_PAGE = 4096
_HEADER = struct.Struct("<16sQQQ")  # magic, capacity, base, end
_MAGIC = b"criuctl-log-1\n\0\0"


class OutputLog:
    """One session's output; `end` is the offset of the next byte, `base` that of the oldest still
    kept.
    """

    def __init__(
        self, path: Path, capacity: int = DEFAULT_CAPACITY, *, base: int = 0, ring: int = RING
    ) -> None:
        """Make an empty log that begins at offset `base`; a file at `path` is overwritten."""
        self.path = path
        self.capacity = max(_PAGE, capacity // _PAGE * _PAGE)
        self.end = base
        self._first = base  # no older byte was ever kept
        self._written_base = base  # the base in the file's first page
        self._flushed = base
        self._ring_start = base  # offset of the oldest byte in the ring
        self._size, self._piece = ring, min(OUTPUT_PIECE, ring // 4)
        self._ring = bytearray(ring)  # takes memory only as output comes
        self._view = memoryview(self._ring)
        self._fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        self.broken = ""  # why the file was given up
        try:
            self._write_header(base)
        except OSError as error:
            self._give_up(error)

    @classmethod
    def reopen(cls, path: Path, ring: int = RING) -> OutputLog:
        """Open the log that another program of this holder has left at `path`."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            capacity, base, end = _read_header(fd)
        finally:
            os.close(fd)
        log = cls.__new__(cls)
        log.path, log.capacity, log.end = path, capacity, end
        log._first, log._written_base, log._flushed, log._ring_start = base, base, end, end
        log._size, log._piece, log._ring, log.broken = (
            ring,
            min(OUTPUT_PIECE, ring // 4),
            bytearray(ring),
            "",
        )
        log._view = memoryview(log._ring)
        log._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return log

    @classmethod
    def resume(cls, state: dict[str, Any], path: Path) -> OutputLog:
        """Open the log that another program of this holder has described (`SessionFiles.to_state`).

        `path` is where it is if the description does not say.  A file that is gone or damaged costs
        the scrollback, not the session.
        """
        path = Path(state.get("path", path))
        if state["broken"] is not None:
            log = cls(path, state["capacity"], base=state["base"])
            log.append(decoded(state["broken"]))
            return log
        try:
            log = cls.reopen(path)
            if log.end == state["end"]:
                return log
            log.close()
        except (OSError, ValueError):
            pass
        return cls(path, state["capacity"], base=state["end"])

    @property
    def base(self) -> int:
        """Return the offset of the oldest byte that can still be read."""
        kept = (
            self._ring_start
            if self._fd < 0
            else min(self._ring_start, max(self._flushed - self.capacity, 0))
        )
        return max(kept, self._first)

    # -- writing ----------------------------------------------------------------------------------

    def room(self) -> memoryview:
        """Return where the next bytes go: at most one frame's worth, and never nothing."""
        at = self.end % self._size
        return self._view[at : min(at + self._piece, self._size)]

    def advance(self, count: int) -> None:
        """Take `count` bytes that were put into `room`."""
        self.end += count
        self._ring_start = max(self._ring_start, self.end - self._size)
        if self.end - self._flushed >= self._size - self._piece:
            self.flush()  # before the next piece overwrites what is not in the file yet

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes that are in memory already."""
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                room = self.room()
                count = min(len(room), len(view) - at)
                room[:count] = view[at : at + count]
                self.advance(count)
                at += count

    def flush(self) -> None:
        """Write what is new to the file."""
        if self._fd < 0 or self._flushed == self.end:
            return
        try:
            oldest = min(self.end - self.capacity, self._flushed)
            if oldest > self._written_base:
                # First: if the holder is killed in the middle, the file must not hold new bytes at
                # the offsets of old ones.
                self._write_header(oldest)
            while self._flushed < self.end:
                at, place = self._flushed % self._size, self._flushed % self.capacity
                count = min(self.end - self._flushed, self._size - at, self.capacity - place)
                self._flushed += os.pwrite(self._fd, self._view[at : at + count], _PAGE + place)
            self._write_header(self.base)
        except OSError as error:
            self._give_up(error)

    def _write_header(self, base: int) -> None:
        """Write the range of offsets in the file: from `base` to what is flushed."""
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, self.capacity, base, self._flushed), 0)
        self._written_base = base

    def _give_up(self, error: OSError) -> None:
        self.broken = f"{self.path}: {error.strerror}"
        os.close(self._fd)
        self._fd = -1

    # -- reading ----------------------------------------------------------------------------------

    def view(self, offset: int, limit: int) -> memoryview | bytes:
        """Return some bytes from `offset` on, at most `limit`; none only at the end.

        `offset` must not be below `base`.
        """
        limit = min(limit, self.end - offset)
        if limit <= 0:
            return b""
        if offset >= self._ring_start:
            at = offset % self._size
            return self._view[at : min(at + limit, self._size)]
        place = offset % self.capacity
        count = min(limit, self._ring_start - offset, self.capacity - place)
        return os.pread(self._fd, count, _PAGE + place)

    def read(self, offset: int, end: int) -> bytes:
        """Return the bytes from `offset` to `end`, without those no longer kept."""
        offset, pieces = max(offset, self.base), []
        while offset < end:
            piece = bytes(self.view(offset, end - offset))
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def escapes(self, offset: int, count: int) -> bool:
        """Return whether there is an escape character among `count` bytes from `offset` on.

        One `view` must hold these bytes, so that a single ``memchr`` finds it.
        """
        if offset < self._ring_start:
            return b"\x1b" in bytes(self.view(offset, count))
        at = offset % self._size
        return self._ring.find(b"\x1b", at, at + count) >= 0

    def after_gap(self) -> int:
        """Return where a reader goes on whose next byte is no longer kept.

        That is far enough from `base` for the reader not to be overtaken at once.
        """
        return max(self.base, self.end - self._size // 2)

    def move(self, folder: Path) -> None:
        """Move the file to `folder`, and replace one of its name there."""
        self.path = self.path.replace(folder / self.path.name)

    def close(self) -> None:
        """Write what is new and close the file."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _read_header(fd: int) -> tuple[int, int, int]:
    magic, capacity, base, end = _HEADER.unpack(
        os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    )
    if magic != _MAGIC or not capacity or not 0 <= end - base <= capacity:
        raise ValueError("not an output log")
    return capacity, base, end


def read_file(path: Path) -> tuple[int, bytes]:
    """Return base offset and bytes of a log without a holder; `OSError`, `ValueError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        capacity, base, end = _read_header(fd)
        pieces, offset = [], base
        while offset < end:
            place = offset % capacity
            piece = os.pread(fd, min(end - offset, capacity - place), _PAGE + place)
            if not piece:
                raise ValueError(f"the log ends at {offset}, not at {end}")
            pieces.append(piece)
            offset += len(piece)
        return base, b"".join(pieces)
    finally:
        os.close(fd)
