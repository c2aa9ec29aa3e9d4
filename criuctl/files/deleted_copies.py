"""Old contents of files that a tree only reads, given to it as deleted files.

A script that was replaced, or mapped data that was rewritten, stays as it is on the host: the tree
has not changed it.  The tree's open file is made from the contents in the checkpoint, and is a
deleted file, as if the file had been replaced while the tree ran.  In CRIU's images a deleted file
is a *ghost* (`criuctl.criu.ghostimages`).  So `make` writes such ghosts before anything is judged
by the images: the present file is not looked up any more.  CRIU itself does not make these:
`deleted_files` makes a file that never has a name, and hands it over.

The new file belongs to the owner of the old one, and never runs with the rights of that owner.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from ..checkpoint.file_records import FileRecord
from ..checkpoint.reader import CheckpointReader
from ..criu.ghostimages import add_ghosts, write_ghost
from ..criu.images import ImageSet, path_of
from ..errors import Damaged
from .judgement import Judgement
from .read_only_files import HASH_TOTAL


def make(images: ImageSet, judged: Iterable[Judgement], reader: CheckpointReader) -> None:
    """Have CRIU make the files with the verdict ``deleted-copy``; several names of one file become
    one file.
    """
    wanted = {
        j.record.path: j.record
        for j in judged
        if j.verdict == "deleted-copy" and j.record.data is not None
    }
    if not wanted:
        return
    remapped = images.remapped()
    made: dict[tuple[int, int], list[int]] = {}  # device and inode at the dump -> ids in files.img
    records: dict[tuple[int, int], FileRecord] = {}
    for entry in images.files():
        if (
            entry.HasField("reg")
            and not entry.reg.ext
            and entry.id not in remapped
            and path_of(entry.reg) in wanted
        ):
            record = wanted[path_of(entry.reg)]
            records[record.device, record.inode] = record
            made.setdefault((record.device, record.inode), []).append(entry.id)
    ghosts = add_ghosts(images, list(made.values()))
    own_users = any(name.startswith("userns-") for name in images.names())
    for key, number in zip(made, ghosts, strict=True):
        _write(images, number, records[key], reader, own_users=own_users)


def _write(
    images: ImageSet, number: int, record: FileRecord, reader: CheckpointReader, *, own_users: bool
) -> None:
    # Images number users as the tree does; the owner of a deleted file matters little to a process
    # that has it open.
    if record.size > HASH_TOTAL:
        raise Damaged(f"{record.path}: no file of {record.size} bytes that is only read travels")
    uid, gid = (0, 0) if own_users else (record.uid, record.gid)
    mode = stat.S_IFREG | stat.S_IMODE(record.mode) & ~(stat.S_ISUID | stat.S_ISGID)
    fd, offset = write_ghost(images, number, uid=uid, gid=gid, mode=mode, mtime_ns=record.mtime_ns)
    try:
        assert record.data is not None  # `make`
        reader.write_to([(record.data, fd, offset)])
        os.ftruncate(fd, offset + record.size)
    finally:
        os.close(fd)
