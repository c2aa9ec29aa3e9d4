"""Reading small parts of a checkpoint without the rest: one of CRIU's images, a range of a
process's memory.
"""

from __future__ import annotations

import os
from functools import cached_property

from ...checkpoint.manifest import Manifest, MemoryImage
from ...checkpoint.reader import CheckpointReader
from ...criu import image_records
from ...criu.pages import WINDOW, unpack_entries
from ...errors import Damaged
from .diff_memory import Windows, windows

Variables = list[tuple[str, str]]
# bytes of an environment; by default the kernel allows no more for arguments and environment
# together
_LONGEST = 8 << 20


class Images:
    """CRIU's metadata images of a checkpoint, which are stored as one stream."""

    def __init__(self, manifest: Manifest, reader: CheckpointReader) -> None:
        self._manifest, self._reader = manifest, reader

    def get(self, name: str) -> bytes | None:
        """Return an image, or None if there is none of this name.

        Only its own chunks are read, because the other images may be large.
        """
        if name not in self._places:
            return None
        start, end = self._places[name]
        wanted = [
            (at, chunk, size) for at, chunk, size in self._chunks if at < end and at + size > start
        ]
        contents = self._reader.some({chunk: size for _at, chunk, size in wanted})
        data = b"".join(contents[chunk] for _at, chunk, _size in wanted)
        return data[start - wanted[0][0] :][: end - start] if wanted else b""

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """The place of each image in the stream: its first byte, and the byte after its last."""
        found, position = {}, 0
        for image in self._manifest.images:
            found[image.name] = position, position + image.size
            position += image.size
        return found

    @cached_property
    def _chunks(self) -> list[tuple[int, bytes, int]]:
        """The chunks of the stream: first byte, id, size of each."""
        found, position = [], 0
        for chunk, size in self._reader.entries(self._manifest.image_data):
            found.append((position, chunk, size))
            position += size
        return found


def memory_windows(image: MemoryImage, reader: CheckpointReader) -> Windows:
    """Return the windows of a memory image; raise `Damaged`."""
    try:
        entries = unpack_entries(reader.read(image.entries))
    except ValueError as error:
        raise Damaged(f"page entries of image {image.id}: {error}") from error
    return windows(entries, reader.extents(image.data))


def memory(image: MemoryImage, reader: CheckpointReader, start: int, end: int) -> bytes:
    """Return the memory at ``start <= address < end``; zeros where nothing is stored."""
    found = bytearray(end - start)
    every = memory_windows(image, reader)
    for number in range(start // WINDOW, -(-end // WINDOW)):
        pieces = every.get(number, ())
        contents = reader.some({piece.chunk: piece.whole for piece in pieces})
        for piece in pieces:
            at = piece.skip
            for address, length in piece.runs:
                low, high = max(address, start), min(address + length, end)
                if low < high:
                    found[low - start : high - start] = contents[piece.chunk][
                        at + low - address : at + high - address
                    ]
                at += length
    return bytes(found)


def environments(manifest: Manifest, reader: CheckpointReader) -> dict[int, Variables]:
    """Return the environment that each process was started with, by the tree's own PIDs.

    It is read from the process's memory. Variables that a program set later are stored elsewhere
    and are not found. A program that writes its title over the environment has destroyed a part of
    it; that part is left out.
    """
    images = {image.id: image for image in manifest.memory if image.kind == "task"}
    found = {}
    for pid, (start, end) in image_records.environments(Images(manifest, reader).get).items():
        if pid not in images:
            continue
        if not 0 <= end - start <= _LONGEST:
            raise Damaged(f"the environment of process {pid} is said to have {end - start} bytes")
        words = memory(images[pid], reader, start, end).split(b"\0")
        found[pid] = [
            (os.fsdecode(name), os.fsdecode(value))
            for name, equals, value in (w.partition(b"=") for w in words)
            if equals
        ]
    return found
