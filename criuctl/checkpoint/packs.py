"""Packs: many sealed chunks in one object that describes itself.

    header   8 s magic, u16 version, u16 zero, u32 zero, 16 s the pack's random name
    records  32 s chunk id, u32 plain size, u32 stored size, u32 number, u8 codec, 3 zero bytes;
             then the payload
    index    sealed: 32 s chunk id, u32 offset of the record, u32 stored size, u32 plain size, for
             each record
    footer   u32 stored size of the index, u32 number of records, u64 offset of the index, 8 s magic

The sealed payload carries its record header as associated data. In an encrypted store a pack has
version 2: record headers and the footer's numbers are masked (`PackSealer.mask`), so a reader
without the key sees the size of the pack and nothing of its chunks. Version 1 has them in the
clear. A pack that was cut off lacks its
footer; the index of a whole store can be made again from the packs alone (`read_index`). A pack's
name is random and never used twice, so no reader ever sees a changed pack. With the keys, the name
shows the pack's domain.

`PackBuilder` fills a buffer that is reused from pack to pack: touching new memory is slow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from ..errors import Damaged, UnsupportedFormat
from .chunks import MAX_CHUNK
from .codec import PACK_NAME_SIZE, TAG_SIZE, Decompressor, PackSealer, SealBroken, Sealer, broken

if TYPE_CHECKING:
    from ..store import Buffer, Store

MAGIC, END = b"CRIUCTLP", b"CRIUEND\n"
CLEAR, MASKED = 1, 2  # versions
NAME_SIZE = PACK_NAME_SIZE
HEADER = struct.Struct("<8sHHI16s")
RECORD = struct.Struct("<32sIIIB3x")
PACK_ENTRY = struct.Struct("<32sIII")  # id, offset, stored size, plain size
FOOTER = struct.Struct("<IIQ8s")
MAX_PACK = 256 << 20  # bytes; a larger pack is refused
MAX_RECORDS = 1 << 20


def object_name(pack: bytes) -> str:
    """Return the object name of the pack with this 16-byte name."""
    name = pack.hex()
    return f"packs/{name[:2]}/{name}"


def pack_of(object: str) -> bytes | None:
    """Return the name of the pack in `object`, the inverse of `object_name`; None for an object
    that is not a pack.
    """
    parts = object.split("/")
    try:
        pack = bytes.fromhex(parts[-1])
    except ValueError:
        return None
    return pack if len(pack) == NAME_SIZE and object_name(pack) == object else None


class PackIndex(Struct, frozen=True):
    """The content of one pack: its name, its size in bytes, and an `PACK_ENTRY` per record."""

    pack: bytes
    size: int
    entries: bytes

    def __iter__(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield (chunk id, offset, stored size, plain size) of each record."""
        return PACK_ENTRY.iter_unpack(self.entries)

    def __len__(self) -> int:
        return len(self.entries) // PACK_ENTRY.size

    def check(self, where: str) -> None:
        """Raise `Damaged` unless every record can be at its offset; `where` is the object that
        lists them.
        """
        limit = self.size - FOOTER.size
        if (
            not HEADER.size <= self.size <= MAX_PACK
            or len(self.entries) % PACK_ENTRY.size
            or len(self) > MAX_RECORDS
        ):
            raise broken(where, f"it lists impossible sizes of pack {self.pack.hex()}")
        for _name, offset, stored, plain in self:
            sizes = 0 < plain <= MAX_CHUNK and stored <= plain + TAG_SIZE
            if not (sizes and HEADER.size <= offset <= limit - RECORD.size - stored):
                raise broken(where, f"it lists an impossible record in pack {self.pack.hex()}")


def check_writer(index: PackIndex, sealer: Sealer, where: str) -> None:
    """Raise `Damaged` unless pack and chunks are of the domain that `sealer` is of; an object
    sealed by the store's own keys may list anything.

    Chunk ids are readable in packs. A write-only host must not be able to claim that another host's
    chunk is in a pack of its own.
    """
    if sealer.domain and not (
        sealer.owns(index.pack) and all(sealer.owns_chunk(chunk) for chunk, *_ in index)
    ):
        raise broken(where, "it lists packs or chunks that its writer has not made")


class PackBuilder:
    """Fills `buffer` with one pack after another; used by one thread at a time."""

    def __init__(self, sealer: Sealer, buffer: memoryview) -> None:
        self._buffer = buffer
        self.pack = sealer.new_pack()
        self._seal = sealer.pack(self.pack)
        self._entries: list[bytes] = []
        self._end = HEADER.size
        version = MASKED if sealer.encrypted else CLEAR
        buffer[: HEADER.size] = HEADER.pack(MAGIC, version, 0, 0, self.pack)

    def __len__(self) -> int:
        """Return the number of records so far."""
        return len(self._entries)

    @property
    def size(self) -> int:
        """The number of bytes so far."""
        return self._end

    def fits(self, plain: int) -> bool:
        """Return whether one more chunk of `plain` bytes fits, even if it does not compress."""
        index = (len(self._entries) + 1) * PACK_ENTRY.size + TAG_SIZE + FOOTER.size
        return self._end + RECORD.size + plain + TAG_SIZE + index <= len(self._buffer)

    def add(self, chunk: bytes, plain: int, codec: int, payload: Buffer) -> int:
        """Append a chunk; return the stored bytes that it takes."""
        number = len(self._entries)
        start = self._end
        stored = len(payload) + self._seal.overhead
        header = RECORD.pack(chunk, plain, stored, number, codec)
        body = start + RECORD.size
        self._buffer[start:body] = self._seal.mask(start, header)
        self._end = body + stored
        self._seal.seal_into(number, payload, header, self._buffer[body : self._end])
        self._entries.append(PACK_ENTRY.pack(chunk, start, stored, plain))
        return RECORD.size + stored

    def finish(self) -> tuple[PackIndex, memoryview]:
        """Return the pack as it is to be stored (in the builder's buffer) and its index; the
        builder is then empty.
        """
        entries = b"".join(self._entries)
        footer = FOOTER.pack(len(entries) + TAG_SIZE, len(self._entries), self._end, END)
        sealed = self._seal.seal_index(entries, footer)
        total = self._end + len(sealed) + len(footer)
        self._buffer[self._end : total] = sealed + mask_footer(footer, self._seal)
        return PackIndex(self.pack, total, entries), self._buffer[:total]


def mask_footer(footer: bytes, seal: PackSealer) -> bytes:
    """Mask the numbers of a footer, or take the mask off; its magic stays, which shows whether a
    pack was cut off.
    """
    numbers = FOOTER.size - len(END)
    return seal.mask(MAX_PACK, footer[:numbers]) + footer[numbers:]


class Place(Struct, frozen=True):
    """Where a chunk is: offset and sizes of its record, and name and size of the pack."""

    chunk: bytes
    pack: bytes
    offset: int
    stored: int
    plain: int
    pack_size: int = 0

    @property
    def end(self) -> int:
        """The offset of the end of the record."""
        return self.offset + RECORD.size + self.stored


def damaged_chunk(place: Place, what: str) -> Damaged:
    """Return the error for one record."""
    name = object_name(place.pack)
    return Damaged(
        f"{name} is damaged: chunk {place.chunk.hex()[:16]} at offset {place.offset}: {what}",
        hint="`criuctl verify --all` shows which checkpoints need it.",
        object=name,
        chunk=place.chunk.hex(),
    )


def open_record(
    place: Place, record: memoryview, sealer: Sealer, seal: PackSealer, decompress: Decompressor
) -> Buffer:
    """Return the verified plain content of the chunk whose record is `record`; raise `Damaged`.

    The result may be a view into `record`.
    """
    header = record[: RECORD.size].tobytes()
    if not header.startswith(place.chunk):  # not of version 1
        header = seal.mask(place.offset, header)
    chunk, plain, stored, number, codec = RECORD.unpack(header)
    if (chunk, plain, stored) != (place.chunk, place.plain, place.stored):
        raise damaged_chunk(place, "its record is not the one that the index lists")
    try:
        content = decompress(codec, seal.open_record(number, record[RECORD.size :], header), plain)
    except SealBroken:
        raise damaged_chunk(place, "its seal does not fit its content") from None
    if not sealer.matches(content, chunk):
        raise damaged_chunk(place, "its content is another one")
    return content


def read_index(store: Store, name: str, size: int, sealer: Sealer) -> PackIndex:
    """Return the index of a pack of `size` bytes; raise `Damaged`, `UnsupportedFormat` or
    `Foreign`.
    """
    pack = pack_of(name)
    if pack is None or not HEADER.size + FOOTER.size <= size <= MAX_PACK:
        raise broken(name, "it is no pack")
    own = sealer.of_pack(pack)
    magic, version, flags, zero, inner = HEADER.unpack(store.get_range(name, 0, HEADER.size))
    if magic != MAGIC:
        raise broken(name, "it is no pack")
    if version not in ((CLEAR, MASKED) if own.encrypted else (CLEAR,)) or flags or zero:
        raise UnsupportedFormat(
            f"{name} has pack format {version} (flags {flags:#x}); this criuctl reads {CLEAR} and, "
            f"in encrypted stores, {MASKED}",
            hint="Use the criuctl that wrote it, or a newer one.",
            object=name,
        )
    footer = store.get_range(name, size - FOOTER.size, FOOTER.size)
    seal = own.pack(pack)
    if version == MASKED:
        footer = mask_footer(footer, seal)
    stored, count, offset, end = FOOTER.unpack(footer)
    if end != END or inner != pack:
        raise broken(name, "it was cut off, or is another pack")
    if (
        offset < HEADER.size
        or offset + stored != size - FOOTER.size
        or stored != count * PACK_ENTRY.size + TAG_SIZE
    ):
        raise broken(name, "the sizes in its footer are not possible")
    try:
        entries = seal.open_index(store.get_range(name, offset, stored), footer)
    except SealBroken:
        raise broken(name, "the seal of its index does not fit") from None
    found = PackIndex(pack, size, entries)
    found.check(name)
    check_writer(found, own, name)
    return found


__all__ = [
    "PackBuilder",
    "PackIndex",
    "Place",
    "check_writer",
    "object_name",
    "open_record",
    "pack_of",
    "read_index",
]
