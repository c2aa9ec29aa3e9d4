"""Deleted files in CRIU's images.

``remap-fpath.img`` says of each file that was open under a deleted name how it is made: from a
*ghost*, saved whole in ``ghost-file-N.img`` (its metadata, then its bytes, or entries of chunks
each followed by its bytes), or from a *helper link*, another entry of files.img.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ..errors import Damaged
from . import schema
from .images import ImageSet, magics, read, write

_IMAGE, _KIND = "remap-fpath.img", "REMAP_FPATH"
_LINKED, _GHOST = 0, 1  # RemapType
_PIECE = 1 << 20


class Remap(Struct, frozen=True):
    """A file that was open under a deleted name."""

    id: int  # its id in files.img
    target: int  # of a helper link: its id in files.img; of a ghost: its own number
    ghost: bool


def remaps(images: ImageSet) -> list[Remap]:
    """Return all ghosts and helper links of the images."""
    if not images.size(_IMAGE):
        return []
    return [
        Remap(entry.orig_id, entry.remap_id, entry.remap_type == _GHOST)
        for entry in read(images.folder, _IMAGE, _KIND)
        if entry.remap_type in (_LINKED, _GHOST)
    ]


def point_watches(images: ImageSet, descriptors: Mapping[int, int]) -> list[str]:
    """Make CRIU watch these descriptors of this process, which are the deleted files of those ids
    of files.img; return the kinds of the descriptors that watch them (inotify, fanotify).

    Without its remap CRIU does not find a deleted file for a watch; but it opens a path that the
    watch has (criu/fsnotify.c, get_mark_path).
    """
    places = {
        _inode(images, remap): descriptors[remap.id]
        for remap in remaps(images)
        if remap.ghost and remap.id in descriptors
    }
    found: list[str] = []

    def edit(entry: Any) -> None:
        for inode, mark in _marks(entry):
            if inode in places:
                mark.f_handle.path = f"/proc/{os.getpid()}/fd/{places[inode]}"
                found.append("inotify" if entry.ify.wd else "fanotify")

    if places:
        images.edit_files(edit)
    return found


def watched_ghosts(images: ImageSet) -> set[int]:
    """Return the ids in files.img of deleted files that inotify or fanotify watches."""
    ghosts = {remap.id: _inode(images, remap) for remap in remaps(images) if remap.ghost}
    marks = {inode for entry in images.files() for inode, _ in _marks(entry)} if ghosts else set()
    return {number for number, inode in ghosts.items() if inode in marks}


def _inode(images: ImageSet, remap: Remap) -> tuple[int, int]:
    """Return device and inode of a ghost at the dump."""
    with Ghost(images, remap.target) as ghost:
        return ghost.entry.dev, ghost.entry.ino


def _marks(entry: Any) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield device and inode of each file that an entry of files.img watches, and what has its
    handle.
    """
    for watch in entry.ify.wd:
        yield (watch.s_dev, watch.i_ino), watch
    for mark in entry.ffy.mark:
        if mark.HasField("ie"):
            yield (mark.s_dev, mark.ie.i_ino), mark.ie


def drop_remaps(images: ImageSet, ids: Container[int]) -> None:
    """Make CRIU treat these files of files.img as ordinary ones."""
    entries = read(images.folder, _IMAGE, _KIND)
    write(images.folder, _IMAGE, _KIND, [e for e in entries if e.orig_id not in ids])


def add_ghosts(images: ImageSet, groups: Sequence[Collection[int]]) -> list[int]:
    """Make CRIU treat these files of files.img as deleted ones, each group as one.

    Returns the number of each group's ghost.
    """
    if not groups:
        return []
    entries = read(images.folder, _IMAGE, _KIND) if images.size(_IMAGE) else []
    first = max((entry.remap_id for entry in entries if entry.remap_type == _GHOST), default=0) + 1
    numbers = list(range(first, first + len(groups)))
    make = schema.message(_KIND)
    for number, ids in zip(numbers, groups, strict=True):
        entries += [make(orig_id=one, remap_id=number, remap_type=_GHOST) for one in ids]
    write(images.folder, _IMAGE, _KIND, entries)
    return numbers


def is_nameless(images: ImageSet, remap: Remap) -> bool:
    """Return whether the ghost was made by `write_ghost`.

    It has no inode of the dump, and must get no name.
    """
    if not remap.ghost:
        return False
    with Ghost(images, remap.target) as ghost:
        entry = ghost.entry
    return (
        not entry.ino
        and stat.S_ISREG(entry.mode)
        and not entry.mode & (stat.S_ISUID | stat.S_ISGID)
    )


def write_ghost(
    images: ImageSet, number: int, *, uid: int, gid: int, mode: int, mtime_ns: int
) -> tuple[int, int]:
    """Begin the image of a regular file.

    Returns a descriptor, and the offset at which its contents are to be written.
    """
    head = schema.message("GHOST_FILE")(uid=uid, gid=gid, mode=mode, dev=0, ino=0)
    for time in (head.atim, head.mtim):
        time.tv_sec, time.tv_usec = mtime_ns // 10**9, mtime_ns % 10**9 // 1000
    name = f"ghost-file-{number:x}.img"
    write(images.folder, name, "GHOST_FILE", [head])
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=images.folder)
    return fd, os.fstat(fd).st_size


class Ghost:
    """A deleted file that was saved whole; a context manager."""

    def __init__(self, images: ImageSet, number: int) -> None:
        self._name = f"ghost-file-{number:x}.img"
        fd = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=images.folder)
        self._file = os.fdopen(fd, "rb")
        head = magics("GHOST_FILE")
        if self._file.read(len(head)) != head:
            self._file.close()
            raise Damaged(f"image {self._name} is not a CRIU image of kind GHOST_FILE")
        self.entry = self._message("GHOST_FILE")

    def __enter__(self) -> Ghost:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _message(self, kind: str) -> Any:
        """Return the next message; None at the end."""
        size = self._file.read(4)
        if not size and kind != "GHOST_FILE":
            return None
        message = schema.message(kind)()
        try:
            (length,) = struct.unpack("<I", size)
            message.ParseFromString(self._take(length))
        except Damaged:
            raise
        except Exception as error:  # protobuf's DecodeError, as in `images.parse`
            raise Damaged(f"image {self._name} cannot be parsed: {error}") from error
        return message

    def _take(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) != length:
            raise Damaged(f"image {self._name} is cut off")
        return data

    def write_to(self, fd: int) -> None:
        """Write its contents into an empty file."""
        if not self.entry.chunks:
            while piece := self._file.read(_PIECE):
                _write(fd, piece)
            return
        os.ftruncate(fd, self.entry.size)
        while (chunk := self._message("GHOST_CHUNK")) is not None:
            done = 0
            while done < chunk.len:
                piece = self._take(min(_PIECE, chunk.len - done))
                os.pwrite(fd, piece, chunk.off + done)
                done += len(piece)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
