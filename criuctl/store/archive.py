"""A store in one file: what `criuctl export` writes and `criuctl import` reads.

The file holds a store's objects one after the other, each after a small header, and ends with a
digest of all preceding bytes (``images/FORMAT.md``, "Exported checkpoints"). So the code that reads
and verifies stores reads and verifies such files too. It is written sequentially without seeking
back, so it may be a pipe.

`ArchiveWriter` takes objects as any store does. Objects that only coordinate writers (intents,
probes) are kept in memory and are not written to the file. There are no other writers, so a name
that is free stays free.

`ArchiveStore` reads the whole file before it returns any content: the digest detects a file that
was cut off, or has a flipped bit, whatever its content, and without any key. The author of a file
is proved by the seals of its content, never by the digest.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    StoreCannot,
    StoreError,
    StoreFull,
    UnsupportedFormat,
)
from .base import (
    Capabilities,
    Data,
    ObjectInfo,
    Store,
    as_views,
    check_limit,
    check_name,
    check_prefix,
    short_object,
    valid_name,
)

MAGIC = b"CRIUCTLX"
VERSION = 1
HEADER = struct.Struct("<8sHHI")  # magic, version, reserved for later versions
# bytes of the content, bytes of the name, zero; name and content follow
SECTION = struct.Struct("<QHH")
END = b"end"  # the name of the last section, whose content is the digest
DIGEST_SIZE = 32
MAX_SECTIONS = 1 << 20

_KINDS = ("packs/", "index/", "checkpoints/")  # what a file may hold besides the config
_PIECE = 1 << 20  # bytes read at once

Progress = Callable[[int, int], None]  # bytes done, bytes in total


def _hasher() -> Any:
    from blake3 import blake3

    return blake3()


def _of_a_file(name: str) -> bool:
    return name == "config" or name.startswith(_KINDS)


class ArchiveWriter(Store):
    """Appends objects to the open file `fd`; `finish` completes it."""

    def __init__(self, fd: int, url: str) -> None:
        self.url = url
        self.size = 0  # bytes written
        self._fd = fd
        self._hash = _hasher()
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._passing: dict[str, bytes] = {}
        self._write(HEADER.pack(MAGIC, VERSION, 0, 0))

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        views = as_views(data)
        check_name(name)
        with self._lock:
            if not _of_a_file(name):
                self._passing[name] = b"".join(views)
                return
            if name in self._sizes:
                raise ObjectExists(f"{name} is in {self.url} already", object=name)
            size = sum(view.nbytes for view in views)
            self._write(SECTION.pack(size, len(name), 0) + name.encode("ascii"))
            for view in views:
                self._write(view)
            self._sizes[name] = size

    def finish(self) -> None:
        """Write the end; nothing can be put afterwards."""
        with self._lock:
            self._write(SECTION.pack(DIGEST_SIZE, len(END), 0) + END)
            self._write(self._hash.digest())

    def get(self, name: str, limit: int | None = None) -> bytes:
        with self._lock:
            if name in self._passing:
                return self._passing[name]
        raise self._absent(name)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        piece = self.get(name)[offset : offset + length]
        if len(piece) != length:
            raise short_object(name, self.url, offset, length, len(piece))
        return piece

    def stat(self, name: str) -> ObjectInfo:
        with self._lock:
            if name in self._sizes:
                return ObjectInfo(name, self._sizes[name], time.time())
        return ObjectInfo(name, len(self.get(name)), time.time())

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            sizes = self._sizes | {name: len(content) for name, content in self._passing.items()}
        return iter(
            [
                ObjectInfo(name, sizes[name], time.time())
                for name in sorted(sizes)
                if name.startswith(prefix)
            ]
        )

    def delete(self, name: str) -> None:
        with self._lock:
            self._passing.pop(check_name(name), None)
            if name in self._sizes:
                raise StoreCannot(f"nothing can be deleted from {self.url}", object=name)

    def create(self) -> None:
        """Do nothing: the file exists."""

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=True, kind="file")

    def _absent(self, name: str) -> StoreError:
        if name in self._sizes:
            return StoreCannot(f"{self.url} is being written and cannot be read", object=name)
        return ObjectMissing(f"{name} is not in {self.url}", object=name)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._hash.update(view)
        self.size += view.nbytes
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:  # the reader has closed it: the command line handles that
            raise
        except OSError as error:
            kind = (
                StoreFull
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                else StoreError
            )
            raise kind(f"{self.url} cannot be written: {error.strerror}") from error


class ArchiveStore(Store):
    """The objects in the seekable file `fd`.

    Made by `verified`. The caller closes the descriptor.
    """

    def __init__(self, fd: int, url: str, places: dict[str, tuple[int, int]]) -> None:
        self.url = url
        self._fd = fd
        self._places = places
        self._modified = os.fstat(fd).st_mtime

    @classmethod
    def verified(
        cls, fd: int, url: str, progress: Progress = lambda _done, _total: None
    ) -> ArchiveStore:
        """Read the whole file and check it.

        `UnsupportedFormat` for another kind of file, `Damaged`.
        """
        return cls(fd, url, _Scan(fd, url, progress).run())

    def get(self, name: str, limit: int | None = None) -> bytes:
        offset, size = self._place(name)
        check_limit(name, self.url, size, limit)
        return self._read(name, offset, size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        start, size = self._place(name)
        if not 0 <= offset <= offset + length <= size:
            raise short_object(name, self.url, offset, length, max(size - offset, 0))
        return self._read(name, start + offset, length)

    def stat(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, self._place(name)[1], self._modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found = sorted(name for name in self._places if name.startswith(prefix))
        return iter([ObjectInfo(name, self._places[name][1], self._modified) for name in found])

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        raise self._read_only(name)

    def delete(self, name: str) -> None:
        raise self._read_only(name)

    def create(self) -> None:
        """Do nothing: it exists."""

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=True, kind="file")

    def _read_only(self, name: str) -> StoreCannot:
        return StoreCannot(
            f"{self.url} is an exported checkpoint: it is read, never changed", object=name
        )

    def _place(self, name: str) -> tuple[int, int]:
        try:
            return self._places[check_name(name)]
        except KeyError:
            raise ObjectMissing(f"{name} is not in {self.url}", object=name) from None

    def _read(self, name: str, offset: int, length: int) -> bytes:
        data = _read(self._fd, length, offset, self.url)
        if len(data) != length:  # it was complete a moment ago
            raise short_object(name, self.url, offset, length, len(data))
        return data


def _read(fd: int, size: int, offset: int, url: str) -> bytes:
    """Return `size` bytes, or as many as there are."""
    try:
        data = os.pread(fd, size, offset)
        while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
            data += more
    except OSError as error:
        raise StoreError(f"{url} cannot be read: {error.strerror}") from error
    return data


class _Scan:
    """One pass through a file, from its beginning to its end."""

    def __init__(self, fd: int, url: str, progress: Progress) -> None:
        self._fd, self._url, self._progress = fd, url, progress
        self._size = os.fstat(fd).st_size
        self._at = 0
        self._hash = _hasher()

    def run(self) -> dict[str, tuple[int, int]]:
        """Return the position of each object by name: offset and size."""
        self._begin()
        places: dict[str, tuple[int, int]] = {}
        while True:
            size, words, zero = SECTION.unpack(self._take(SECTION.size, "the header of an object"))
            raw = self._take(words, "the name of an object")
            if raw == END and not zero:
                break
            name = raw.decode("ascii", "replace")
            if (
                zero
                or not valid_name(name)
                or not _of_a_file(name)
                or name in places
                or len(places) == MAX_SECTIONS
            ):
                raise self._damaged(
                    f"what begins at byte {self._at - words - SECTION.size} is not an object"
                )
            if size > self._size - self._at:
                raise self._damaged(
                    f"{name} should have {size} bytes, and {self._size - self._at} are left: the "
                    "file was cut off"
                )
            places[name] = self._at, size
            self._pass(size, name)
        expected = self._hash.digest()
        digest = self._take(size if size == DIGEST_SIZE else 0, "the digest")
        if digest != expected:
            raise self._damaged(
                "its content is not what was written: the digest at its end differs"
            )
        if self._at != self._size:
            raise self._damaged(f"{self._size - self._at} bytes follow its end")
        return places

    def _begin(self) -> None:
        foreign = _read(self._fd, len(MAGIC), 0, self._url) != MAGIC[: self._size]
        if foreign:
            raise UnsupportedFormat(
                f"{self._url} is not a checkpoint that criuctl exported",
                hint="`criuctl import` reads what `criuctl export` wrote, and nothing else.",
            )
        _magic, version, *room = HEADER.unpack(self._take(HEADER.size, "its header"))
        if version != VERSION or any(room):
            raise UnsupportedFormat(
                f"{self._url} has export format {version}; this criuctl reads {VERSION}",
                hint="Use the criuctl that wrote it, or a newer one.",
            )

    def _pass(self, size: int, name: str) -> None:
        left = size
        while left:
            left -= len(self._take(min(left, _PIECE), name))
            self._progress(self._at, self._size)

    def _take(self, size: int, what: str) -> bytes:
        data = _read(self._fd, size, self._at, self._url)
        if len(data) != size:
            raise self._damaged(f"it was cut off at byte {self._at + len(data)}, in {what}")
        self._at += size
        self._hash.update(data)
        return data

    def _damaged(self, what: str) -> Damaged:
        return Damaged(
            f"{self._url} is damaged: {what}", hint="Copy it again, or export the checkpoint again."
        )


__all__ = ["ArchiveStore", "ArchiveWriter"]
