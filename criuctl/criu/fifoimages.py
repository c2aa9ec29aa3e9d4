"""Named pipes (FIFOs) in CRIU's images: what was queued in each, and where CRIU opens it.

CRIU saves the queue of a named pipe that the tree could read from (``fifo-data.img``: entries, each
followed by its bytes), and writes it back, with its size, into whatever is open under that path at
the restore.  Entries are told apart by the lower half of the inode's number; of all files of
files.img with that number the first one's path is where CRIU writes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Mapping
from typing import Any

from msgspec import Struct

from ..errors import Damaged
from . import schema
from .images import ImageSet, magics, path_of, read

_IMAGE, _KIND = "fifo-data.img", "FIFO_DATA"
# RemapType: a name of the file that was deleted, in place of which there is another one
_LINKED = 0
_NUMBERS = (1 << 32) - 1


class SavedQueue(Struct, frozen=True):
    """What one named pipe held at the dump."""

    number: int  # CRIU's pipe_id
    data: bytes
    size: int  # bytes that had room in it
    # under which the tree had it open, the one where CRIU writes first; none if it is made anew
    paths: tuple[str, ...]
    holders: tuple[tuple[int, int], ...]  # (PID, descriptor)
    own_name: bool  # its path can be changed in the images

    def of(self, inode: int) -> bool:
        """Whether a file of this inode may be the pipe."""
        return inode & _NUMBERS == self.number


def saved_queues(images: ImageSet) -> list[SavedQueue]:
    """The named pipes that CRIU would fill."""
    saved = _entries(images)
    if not saved:
        return []
    files = images.files()
    regular = {e.id: e.reg for e in files if e.HasField("reg")}
    remaps = (
        read(images.folder, "remap-fpath.img", "REMAP_FPATH")
        if images.size("remap-fpath.img")
        else []
    )
    moved = {e.orig_id: e.remap_id if e.remap_type == _LINKED else None for e in remaps}
    held = images.holders()
    found = []
    for entry, data in saved:
        same = [e for e in files if e.HasField("fifo") and e.fifo.pipe_id == entry.pipe_id]
        ids = [e.fifo.regf_id if e.fifo.HasField("regf_id") else e.fifo.id for e in same]
        opened = [regular.get(moved.get(number, number)) for number in ids]
        known = [reg for reg in opened if reg is not None]
        holders = [holder for e in same for holder in held.get(e.id, ())]
        own_name = (
            len(known) == len(ids)
            and not any(n in moved for n in ids)
            and all(isinstance(r.name, str) for r in known)
        )
        paths = dict.fromkeys(map(path_of, known)) if opened and opened[0] is not None else ()
        found.append(
            SavedQueue(entry.pipe_id, data, entry.size, tuple(paths), tuple(holders), own_name)
        )
    return found


def drop_queues(
    images: ImageSet, numbers: Container[int], sizes: Mapping[int, int] | None = None
) -> None:
    """Have CRIU open these named pipes as they are, with what is in them, and give others of these
    `sizes`.
    """
    parts = [magics(_KIND)]
    for entry, data in _entries(images):
        if entry.pipe_id not in numbers:
            entry.size = (sizes or {}).get(entry.pipe_id, entry.size)
            body = entry.SerializeToString()
            parts += [struct.pack("<I", len(body)), body, data]
    with os.fdopen(
        os.open(_IMAGE, os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, dir_fd=images.folder), "wb"
    ) as file:
        file.write(b"".join(parts))


def _entries(images: ImageSet) -> list[tuple[Any, bytes]]:
    """Each entry with its bytes."""
    if not images.size(_IMAGE):
        return []
    with open(os.open(_IMAGE, os.O_RDONLY | os.O_CLOEXEC, dir_fd=images.folder), "rb") as file:
        content = file.read()
    begin = magics(_KIND)
    if not content.startswith(begin):
        raise Damaged(f"image {_IMAGE} is not a CRIU image of kind {_KIND}")
    found = []
    position = len(begin)
    while position < len(content):
        (length,) = struct.unpack_from("<I", content.ljust(position + 4, b"\0"), position)
        position += 4 + length
        entry = schema.message(_KIND)()
        try:
            entry.ParseFromString(content[position - length : position])
        except Exception as error:  # as in `images.parse`
            raise Damaged(f"image {_IMAGE} cannot be parsed: {error}") from error
        data = content[position : position + entry.bytes]
        position += entry.bytes
        if position > len(content):
            raise Damaged(f"image {_IMAGE} is cut off")
        found.append((entry, data))
    return found


def taken_for_one(one: str, other: str, number: int) -> tuple[str, str]:
    """What is told of two FIFOs of the same number, and what to do."""
    text = (
        f"the named pipes {one} and {other} have inodes of the same number, {number}; CRIU takes "
        "them for one, and "
    )
    return (
        f"{text}loses what is unread in one of them",
        f"Have the program read it, or make {other} anew (`mkfifo`) and open it again.",
    )
