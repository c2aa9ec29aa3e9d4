"""Named pipes (FIFOs) in CRIU's images: the queued data of each, and where CRIU opens it.

CRIU saves the queue of a named pipe that the tree could read from (``fifo-data.img``: entries, each
followed by its bytes). At the restore it writes it back, with its size, into the file that is open
under that path. Entries are identified by the lower half of the inode's number; CRIU writes to the
path of the first file in files.img with that number.
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
# RemapType: a deleted name of a file, replaced by another one
_LINKED = 0
_NUMBERS = (1 << 32) - 1


class SavedQueue(Struct, frozen=True):
    """The content of one named pipe at the dump."""

    number: int  # CRIU's pipe_id
    data: bytes
    size: int  # its capacity in bytes
    # under which the tree had it open, first the one where CRIU writes; none if it is made again
    paths: tuple[str, ...]
    holders: tuple[tuple[int, int], ...]  # (PID, descriptor)
    own_name: bool  # its path can be changed in the images

    def of(self, inode: int) -> bool:
        """Return whether a file with this inode may be the pipe."""
        return inode & _NUMBERS == self.number


def saved_queues(images: ImageSet) -> list[SavedQueue]:
    """Return the named pipes that CRIU would fill."""
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
    """Make CRIU open these named pipes with their present content, and set these `sizes` of
    others.
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
    """Return each entry with its bytes."""
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
    """Return the message and the hint for two FIFOs of the same number."""
    text = (
        f"the named pipes {one} and {other} have inodes of the same number, {number}; CRIU takes "
        "them for one pipe, and "
    )
    return (
        f"{text}loses unread data in one of them",
        f"Let the program read it, or make {other} again (`mkfifo`) and reopen it.",
    )
