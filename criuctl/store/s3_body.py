"""Several buffers as one body to send: a seekable file over views, nothing copied."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

_PIECE = 1 << 20
_SMALL = 64 << 10  # pieces below this are sent together
PART_BYTES = 16 << 20
_MAX_PARTS = 9000  # S3 allows 10,000
_MD5_ETAG = re.compile(r"[0-9a-f]{32}(-[1-9][0-9]*)?")


def slices(view: memoryview, size: int) -> Iterator[memoryview]:
    """Yield `view` in pieces of at most `size` bytes."""
    for start in range(0, view.nbytes, size):
        yield view[start : start + size]


def md5_of(views: Sequence[memoryview]) -> str:
    """Return the value of the header Content-MD5 for `views` sent one after the other."""
    digest = hashlib.md5(usedforsecurity=False)
    for view in views:
        digest.update(view)
    return base64.b64encode(digest.digest()).decode()


def md5_etag(etag: str) -> str | None:
    """Return the ETag without quotes if it has the form of an MD5, or of an object in parts.

    Else None.
    """
    bare = etag.removeprefix("W/").strip('"').lower()
    return bare if _MD5_ETAG.fullmatch(bare) else None


def etag_in_parts(views: Sequence[memoryview], size: int) -> str:
    """Return the ETag that S3 gives to `views`, `size` bytes, sent in parts.

    It is made from the MD5s of the parts, and their number.
    """
    parts = [*in_parts(views, size)]
    digests = b"".join(base64.b64decode(md5_of(part)) for part in parts)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def in_parts(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yield `views`, `size` bytes together, in the parts of S3's multipart upload."""
    return cut(views, max(PART_BYTES, -(-size // _MAX_PARTS)))


def cut(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yield `views` in runs of exactly `size` bytes, the last one shorter."""
    run: list[memoryview] = []
    room = size
    for view in views:
        while view.nbytes >= room:
            run.append(view[:room])
            yield [piece for piece in run if piece.nbytes]
            view, run, room = view[room:], [], size
        if view.nbytes:
            run.append(view)
            room -= view.nbytes
    if run:
        yield run


class ViewReader:
    """A read-only file over `views`, as botocore wants a body: read, seek, tell and a length.

    `read` ignores the requested size and returns about 1 MiB, without a copy where the memory is in
    large pieces: http.client asks for 16 KiB at a time, and each of those would be a system call
    and a turn of the interpreter's lock.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._size = sum(view.nbytes for view in views)
        self._position = self._index = self._start = 0  # in total; the view; within it

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes | memoryview:
        """Return the next piece, b"" at the end."""
        first = self._next()
        if not 0 < len(first) < _SMALL:
            return first
        pieces, total = [first], len(first)
        while total < _PIECE and (piece := self._next()):
            pieces.append(piece)
            total += len(piece)
        return b"".join(pieces)

    def _next(self) -> bytes | memoryview:
        if self._index == len(self._views):
            return b""
        view = self._views[self._index]
        piece = view[self._start : self._start + _PIECE]
        self._start += piece.nbytes
        self._position += piece.nbytes
        if self._start == view.nbytes:
            self._index, self._start = self._index + 1, 0
        return piece

    def tell(self) -> int:
        """Return the bytes before the next piece."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` from the start, or (whence 2) from the end."""
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._size
        self._position = self._start = max(0, min(offset, self._size))
        self._index = 0
        while self._index < len(self._views) and self._start >= self._views[self._index].nbytes:
            self._start -= self._views[self._index].nbytes
            self._index += 1
        return self._position


class Body:
    """The content to send, and its digests."""

    def __init__(self, views: list[memoryview], size: int) -> None:
        self.views = views
        self.size = size

    @cached_property
    def md5(self) -> str:
        """Return the MD5 for Content-MD5."""
        return md5_of(self.views)

    def etag(self, like: str) -> str:
        """Return the ETag that this must have, if it is an MD5.

        That of an object in parts, with a number, where `like` has one.
        """
        return (
            etag_in_parts(self.views, self.size)
            if "-" in like
            else base64.b64decode(self.md5).hex()
        )
