"""Read untrusted tar archives once from beginning to end, in little memory.

Common tar readers keep whole extended headers, whatever their size, and let the compressor choose
how much memory decompression needs. Here all kept memory comes out of one `Allowance`: a fixed part
and a multiple of the file's own size, so that a small file cannot cost much. Only regular files are
returned: links, devices, sparse files and members of unknown kinds are skipped, and nothing is ever
written anywhere.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

from msgspec import Struct

from ..errors import Damaged

RATIO = 64  # bytes that may be kept for each byte of the file
FREE = 4 << 20  # bytes that may be kept for any file
# bytes of one extended header; a file has 64 KiB of extended attributes, and a name of 4 KiB
_MAX_HEADER = 1 << 20
_FREE_MEMBERS = 1 << 17
_BYTES_EACH = 8  # bytes of the file for each member beyond those
# bytes that a decompressor may keep: zstd's own limit, and more than xz -9 needs
_WINDOW = 128 << 20
_MAX_SIZE = 1 << 60  # bytes of a member, whatever its header says
_BLOCK = 512
_PIECE = 1 << 20
_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_LONG_NAME, _EXTENDED = tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE
_HEADERS = (
    _LONG_NAME,
    tarfile.GNUTYPE_LONGLINK,
    _EXTENDED,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


class Allowance:
    """How many bytes may be kept of a file of `size` bytes with the name `where`."""

    def __init__(self, where: str, size: int) -> None:
        self.where = where
        self._left = max(FREE, size * RATIO)

    def take(self, size: int, what: str) -> None:
        """Keep so many more bytes; `Damaged` if that is too much."""
        self._left -= size
        if self._left < 0:
            raise Damaged(
                f"{self.where} would become much larger than it is: {what} does not fit into "
                f"{RATIO} times its size any more",
                hint=(
                    "No real checkpoint compresses so well. If you trust it, unpack it and show "
                    "the folder."
                ),
            )


class Member(Struct):
    """A regular file in an archive; `file` is valid until the next member is requested."""

    name: str
    size: int
    file: IO[bytes]


class _Part(io.RawIOBase):
    """The next `size` bytes of a stream."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream, self.left = stream, size

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data = self._stream.read(min(len(into), self.left))
        into[: len(data)] = data
        self.left -= len(data)
        return len(data)


class _Unxz(io.RawIOBase):
    """The decompressed content of an xz stream, in bounded memory."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._rest = b""
        self._of: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while True:
            if self._of is None or self._of.needs_input:
                self._rest = self._rest or self._raw.read(_PIECE)
                if not self._rest and self._of is None:
                    return 0
                if not self._rest:
                    raise EOFError("its compressed content was cut off")
            if self._of is None:
                self._of = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_WINDOW)
            data, self._rest = self._of.decompress(self._rest, len(into)), b""
            if self._of.eof:  # another stream may follow, after zeros
                self._rest, self._of = self._of.unused_data.lstrip(b"\0"), None
            if data:
                into[: len(data)] = data
                return len(data)


def _unpacked(raw: io.BufferedReader) -> tuple[IO[bytes], bool]:
    """Return the archive's bytes, decompressed, and whether it was compressed."""
    start = raw.peek(8)
    packer = next((name for magic, name in _MAGICS.items() if start.startswith(magic)), "")
    if packer == "gzip":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="rb")), True
    if packer == "bzip2":
        return bz2.BZ2File(raw), True
    if packer == "xz":
        return io.BufferedReader(_Unxz(raw), _PIECE), True
    if packer == "zstd":
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        return io.BufferedReader(
            decompressor.stream_reader(raw, read_across_frames=True), _PIECE
        ), True
    return raw, False


def members(raw: io.BufferedReader, allowance: Allowance) -> Iterator[Member]:
    """Yield the regular files of an archive, one after the other.

    `Damaged` for a part that is too large; `tarfile.TarError`, `EOFError`, and what decompressors
    raise, if it is no archive.
    """
    size = os.fstat(raw.fileno()).st_size
    most = _FREE_MEMBERS + size // _BYTES_EACH
    stream, packed = _unpacked(raw)
    name, length = "", -1  # from an extended header of the next member
    count = 0
    while block := stream.read(_BLOCK):
        if len(block) == _BLOCK and not any(block):
            return
        count += 1
        if count > most:
            raise Damaged(f"{allowance.where} has more than {most} members, in {size} bytes")
        about = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if about.type in _HEADERS:
            name, length = _extended(about, stream, allowance, name, length)
            continue
        held = length if length >= 0 else about.size
        held = held if about.type not in (tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE) else 0
        if not 0 <= held <= _MAX_SIZE or (not packed and held > size):
            raise EOFError(
                "a member is longer than what is left" if held > 0 else "a member has no size"
            )
        part = _Part(stream, held)
        if about.type in _REGULAR:
            yield Member(name or about.name, held, cast("IO[bytes]", part))
        name, length = "", -1
        _skip(stream, part.left + -held % _BLOCK, packed, size)
    if not count:
        raise tarfile.ReadError("it is empty")


def _extended(
    about: tarfile.TarInfo, stream: IO[bytes], allowance: Allowance, name: str, length: int
) -> tuple[str, int]:
    """Return name and size of the next member, where an extended header gives them."""
    if not 0 <= about.size <= _MAX_HEADER:
        raise Damaged(f"{allowance.where} has a header of {about.size} bytes")
    padded = about.size + -about.size % _BLOCK
    allowance.take(padded, "a header")
    content = stream.read(padded)
    if len(content) != padded:
        raise tarfile.ReadError("truncated header")
    content = content[: about.size]
    if about.type == _LONG_NAME:
        return content.partition(b"\0")[0].decode("utf-8", "surrogateescape"), length
    if about.type == _EXTENDED:
        records = dict(_records(content))
        path, said = records.get(b"path"), records.get(b"size")
        if said is not None and not (said.isdigit() and len(said) < 20):
            raise tarfile.ReadError("invalid size")
        name = name if path is None else path.decode("utf-8", "surrogateescape")
        length = length if said is None else int(said)
    return name, length


def _records(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of each record of an extended header: ``LENGTH KEY=VALUE`` and a
    newline.
    """
    at = 0
    while at < len(content):
        digits = content[at : at + 20].partition(b" ")[0]
        if (
            not digits.isdigit()
            or not (end := at + int(digits)) <= len(content)
            or content[end - 1 : end] != b"\n"
        ):
            raise tarfile.ReadError("invalid record")
        key, _equals, value = content[at + len(digits) + 1 : end - 1].partition(b"=")
        yield key, value
        at = end


def _skip(stream: IO[bytes], size: int, packed: bool, end: int) -> None:
    """Skip so many bytes; seeks where the archive is not compressed."""
    if not packed:
        if stream.seek(size, os.SEEK_CUR) > end + _BLOCK:
            raise EOFError("it was cut off")
        return
    while size:
        piece = stream.read(min(size, _PIECE))
        if not piece:
            raise EOFError("it was cut off")
        size -= len(piece)
