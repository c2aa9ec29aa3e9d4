"""Old contents of files that are other ones now: ghosts in CRIU's images, and files without a
name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from support.foreignimages import image

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import Manifest, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.criu import schema
from criuctl.criu.ghostimages import Ghost, add_ghosts, remaps, write_ghost
from criuctl.criu.heldfiles import HeldFile, Use
from criuctl.criu.images import ImageSet
from criuctl.errors import Damaged
from criuctl.files import deleted_copies, deleted_files
from criuctl.files.judgement import Judgement
from criuctl.files.link_remaps import Provided
from criuctl.files.permission import Judge
from criuctl.proc.credentials import Credentials
from criuctl.proc.path_control import PathLookup

OLD = b"as it was at the freeze\n" * 10


class Reader:
    """A checkpoint in which every stream is the same."""

    def write_to(self, placements: Iterable[tuple[StreamRef, int, int]]) -> None:
        for _ref, fd, offset in placements:
            os.pwrite(fd, OLD, offset)


READER = cast("CheckpointReader", Reader())


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageSet]:
    """Three open files: two names of one, and another."""
    folder = tmp_path / "images"
    folder.mkdir()
    entry = schema.message("FILES")
    entries = []
    for number, name in ((5, "one"), (6, "other-name"), (7, "else")):
        made = entry(type=1, id=number)
        made.reg.id, made.reg.flags, made.reg.pos, made.reg.name = (
            number,
            os.O_RDONLY,
            10,
            str(tmp_path / name),
        )
        made.reg.fown.uid = made.reg.fown.euid = made.reg.fown.signum = made.reg.fown.pid_type = (
            made.reg.fown.pid
        ) = 0
        entries.append(made)
    (folder / "files.img").write_bytes(image("FILES", entries))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield ImageSet(fd)
    os.close(fd)


def judged(path: Path, verdict: str = "deleted-copy", **more: Any) -> Judgement:
    record = FileRecord(
        str(path),
        "read",
        size=len(OLD),
        mode=stat.S_IFREG | 0o6755,
        uid=1000,
        gid=1000,
        inode=9,
        device=8,
        data=StreamRef(len(OLD)),
    )
    return Judgement(record.with_use(**more), cast("Any", verdict))


def test_names_of_one_file_are_one_deleted_file(images: ImageSet, tmp_path: Path) -> None:
    found = [
        judged(tmp_path / "one"),
        judged(tmp_path / "other-name"),
        judged(tmp_path / "else", "moved-on"),
    ]
    deleted_copies.make(images, found, READER)
    assert images.remapped() == {5, 6}
    (number,) = {remap.target for remap in remaps(images)}
    with Ghost(images, number) as ghost:
        assert stat.S_IMODE(ghost.entry.mode) == 0o755  # it runs without set-user-ID rights
        assert (ghost.entry.uid, ghost.entry.gid) == (1000, 1000)
        copy = os.memfd_create("copy")
        ghost.write_to(copy)
        assert os.pread(copy, 1 << 20, 0) == OLD
        os.close(copy)


def test_nothing_is_edited_where_nothing_changed(images: ImageSet, tmp_path: Path) -> None:
    deleted_copies.make(images, [judged(tmp_path / "one", "same")], READER)
    assert images.names() == ["files.img"]


def test_a_manifest_names_no_large_file(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(Damaged):
        deleted_copies.make(images, [judged(tmp_path / "one", size=1 << 40)], READER)


def test_it_never_has_a_name(images: ImageSet, tmp_path: Path) -> None:
    """So a user's process gets it in a folder of root's, where it could have no deleted file that
    nothing proves.
    """
    deleted_copies.make(images, [judged(tmp_path / "one")], READER)
    (number,) = add_ghosts(images, [[7]])  # one of CRIU's, at the other path
    fd, offset = write_ghost(
        images, number, uid=0, gid=0, mode=stat.S_IFREG | stat.S_ISUID | 0o755, mtime_ns=0
    )
    os.pwrite(fd, OLD, offset)
    os.close(fd)
    uses = (Use(100, "descriptor", 3, os.O_RDONLY),)
    paths = {5: tmp_path / "one", 7: tmp_path / "else"}
    held = [
        HeldFile(one, str(path), stat.S_IFREG, os.O_RDONLY, uses, deleted=True)
        for one, path in paths.items()
    ]
    manifest = Manifest("0" * 32, SessionRef("id", "name"))
    user = Credentials(1000, 1000, frozenset(), 0)
    judge = Judge(manifest, {}, {}, {100: user}, certain=False)
    before = sorted(tmp_path.iterdir())
    with PathLookup() as lookup, ExitStack() as stack:
        objections = deleted_files.folder_objections(images, held, judge, lookup)
        assert [o.use for o in objections] == list(uses)  # of CRIU's one
        links = Provided({}, {}, ())
        made = deleted_files.made(images, held[:1], judge, lookup, links, stack)
        assert list(made) == [5]
        status = os.stat(f"/proc/self/fd/{made[5]}")
        assert (status.st_nlink, status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 1000, 0o755)
        assert Path(f"/proc/self/fd/{made[5]}").read_bytes() == OLD
    assert sorted(tmp_path.iterdir()) == before
