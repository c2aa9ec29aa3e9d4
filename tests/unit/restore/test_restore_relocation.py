"""A restore whose workspace is elsewhere: what names a path in it names the other place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import FileRecord, LinkRecord
from criuctl.checkpoint.manifest import Manifest, ProcessRecord, SessionRef
from criuctl.checkpoint.terminal_records import HolderRecord
from criuctl.criu import schema
from criuctl.criu.images import ImageSet, write
from criuctl.errors import PreflightRefused
from criuctl.restore.relocation import Relocation

MOVE = Relocation("/srv/work", "/srv/work.a-1")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def _file(number: int, name: str) -> Any:
    entry = schema.message("FILES")(type=1, id=number)
    entry.reg.SetInParent()
    for field, value in (("id", number), ("flags", 0), ("pos", 0), ("name", name)):
        setattr(entry.reg, field, value)
    entry.reg.fown.uid = entry.reg.fown.euid = entry.reg.fown.signum = 0
    entry.reg.fown.pid_type = entry.reg.fown.pid = 0
    return entry


@pytest.mark.parametrize(
    ("path", "moved"),
    [
        ("/srv/work", "/srv/work.a-1"),
        ("/srv/work/a/b", "/srv/work.a-1/a/b"),
        ("/srv/workshop", "/srv/workshop"),
        ("/srv", "/srv"),
        ("", ""),
    ],
)
def test_paths(path: str, moved: str) -> None:
    assert MOVE.path(path) == moved


def test_the_manifest() -> None:
    process = ProcessRecord(pid=7, ns_pid=7, cwd="/srv/work", exe="/usr/bin/python3")
    made = Manifest(
        id="0" * 32,
        session=SessionRef("a", "1" * 32),
        root=process,
        processes=(process,),
        holder=HolderRecord(workspace="/srv/work"),
        files=(FileRecord("/srv/work/log", "written"), FileRecord("/etc/hosts", "read")),
        links=(LinkRecord("/srv/work/gone", data=None, sibling="/srv/work/b", handle="1:aa"),),  # type: ignore[arg-type]
        connections=(
            ConnectionRecord(pid=7, fd=3, family="unix", local="/srv/work/s", peer="/srv/work/p"),
            ConnectionRecord(pid=7, fd=4, family="inet", local="127.0.0.1:80"),
        ),
    )
    moved = MOVE.manifest(made)
    assert moved.root is not None and moved.root.cwd == "/srv/work.a-1"
    assert moved.processes[0].exe == "/usr/bin/python3"
    assert moved.holder is not None and moved.holder.workspace == "/srv/work.a-1"
    assert [one.path for one in moved.files] == ["/srv/work.a-1/log", "/etc/hosts"]
    assert (moved.links[0].path, moved.links[0].handle) == ("/srv/work.a-1/gone", "")
    # A peer outside has not moved.
    assert [one.local for one in moved.connections] == ["/srv/work.a-1/s", "127.0.0.1:80"]
    assert moved.connections[0].peer == "/srv/work/p"


def test_the_images(folder: int) -> None:
    names = ["/srv/work/log", "srv/work/relative", "/srv/workshop/x"]
    entries = [_file(number, name) for number, name in enumerate(names, 1)]
    write(folder, "files.img", "FILES", entries)
    MOVE.images(ImageSet(folder))
    moved = [entry.reg.name for entry in ImageSet(folder).files()]
    assert moved == ["/srv/work.a-1/log", "srv/work.a-1/relative", "/srv/workshop/x"]


def test_a_socket_whose_path_becomes_too_long() -> None:
    bound = schema.message("FILES")().usk
    bound.name = b"/srv/work/" + b"s" * 90 + b"\0"
    MOVE._bound(bound)
    assert bound.name == b"/srv/work.a-1/" + b"s" * 90 + b"\0"
    with pytest.raises(PreflightRefused) as refused:
        Relocation("/srv", "/srv/a-long-name")._bound(bound)
    assert "too long" in refused.value.message
