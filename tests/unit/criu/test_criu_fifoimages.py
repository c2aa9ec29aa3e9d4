"""Named pipes in CRIU's images: read, and left unchanged."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl.criu import schema
from criuctl.criu.fifoimages import SavedQueue, drop_queues, saved_queues
from criuctl.criu.images import ImageSet, magics, write
from criuctl.errors import Damaged

ONE, OTHER, GHOST, MOVED = 0x10, 0x20, 0x30, 0x40
QUEUES = {ONE: b"unread", OTHER: b"", GHOST: b"\0" * 5000, MOVED: b"m"}


def entry(kind: str, **fields: Any) -> Any:
    return schema.message(kind)(**fields)


def regular(number: int, name: str) -> Any:
    made = schema.message("FILES")(type=1, id=number)
    made.reg.id, made.reg.flags, made.reg.pos, made.reg.name = number, 0, 0, name
    made.reg.fown.uid = made.reg.fown.euid = made.reg.fown.signum = made.reg.fown.pid_type = (
        made.reg.fown.pid
    ) = 0
    return made


def fifo(number: int, pipe: int, path: int) -> Any:
    made = schema.message("FILES")(type=17, id=number)
    made.fifo.id, made.fifo.pipe_id, made.fifo.regf_id = number, pipe, path
    return made


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageSet]:
    folder = os.open(tmp_path, os.O_RDONLY)
    content = [magics("FIFO_DATA")]
    for number, data in QUEUES.items():
        body = entry("FIFO_DATA", pipe_id=number, bytes=len(data), size=65536).SerializeToString()
        content += [struct.pack("<I", len(body)), body, data]
    (tmp_path / "fifo-data.img").write_bytes(b"".join(content))
    files = [
        regular(101, "one"),
        fifo(1, ONE, 101),
        regular(102, "link"),
        fifo(2, ONE, 102),
        regular(103, "other"),
    ]
    files += [fifo(3, OTHER, 103), regular(104, "ghost"), fifo(4, GHOST, 104)]
    files += [regular(105, "moved"), fifo(5, MOVED, 105), regular(106, "link_remap.1")]
    write(folder, "files.img", "FILES", files)
    remaps = [entry("REMAP_FPATH", orig_id=104, remap_id=1, remap_type=1)]
    remaps += [entry("REMAP_FPATH", orig_id=105, remap_id=106, remap_type=0)]
    write(folder, "remap-fpath.img", "REMAP_FPATH", remaps)
    write(folder, "pstree.img", "PSTREE", [])
    yield ImageSet(folder)
    os.close(folder)


def test_what_is_saved_of_each(images: ImageSet) -> None:
    assert saved_queues(images) == [
        SavedQueue(ONE, b"unread", 65536, ("/one", "/link"), (), True),
        SavedQueue(OTHER, b"", 65536, ("/other",), (), True),
        SavedQueue(GHOST, b"\0" * 5000, 65536, (), (), False),  # made again
        SavedQueue(MOVED, b"m", 65536, ("/link_remap.1",), (), False),
    ]
    assert saved_queues(images)[0].of(ONE) and saved_queues(images)[0].of(ONE + (1 << 32))


def test_some_are_left_as_they_are(images: ImageSet, tmp_path: Path) -> None:
    drop_queues(images, {ONE, GHOST})
    assert [(q.number, q.data) for q in saved_queues(images)] == [(OTHER, b""), (MOVED, b"m")]
    drop_queues(images, {OTHER, MOVED})
    assert saved_queues(images) == []
    assert (tmp_path / "fifo-data.img").read_bytes() == magics("FIFO_DATA")


@pytest.mark.parametrize("cut", [1, 3, 5000])
def test_a_damaged_image(cut: int, images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "fifo-data.img"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Damaged):
        saved_queues(images)
    path.write_bytes(b"another kind")
    with pytest.raises(Damaged):
        saved_queues(images)
