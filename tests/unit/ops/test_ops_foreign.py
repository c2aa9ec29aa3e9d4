"""Images that another program has made: folders of CRIU's, podman's archives, and folders that are
neither.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support import checkpoints as kit

from criuctl.checkpoint.repository import Repository
from criuctl.criu import images, plain, schema
from criuctl.errors import Damaged, DataError, NoSuchCheckpoint, UnsupportedFormat
from criuctl.ops import transfer
from criuctl.ops.inspect import show
from criuctl.ops.shown import Shown
from criuctl.report import Reporter
from criuctl.store.local import LocalStore

PAGE = 4096
CONFIG = {"name": "db-1", "rootfsImageName": "docker.io/library/postgres"}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def fown() -> dict[str, int]:
    return {"uid": 0, "euid": 0, "signum": 0, "pid_type": 0, "pid": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A shell and its stopped child, with a file, a connection, and memory."""
    made = tmp_path / "images"
    made.mkdir()
    with opened(made) as fd:

        def write(name: str, kind: str, *bodies: dict[str, Any]) -> None:
            images.write(fd, name, kind, [schema.message(kind)(**body) for body in bodies])

        write(
            "pstree.img",
            "PSTREE",
            {"pid": 10, "ppid": 0, "pgid": 10, "sid": 10, "threads": [10]},
            {"pid": 11, "ppid": 10, "pgid": 11, "sid": 10, "threads": [11, 12]},
        )
        tc = {"exit_code": 0, "personality": 0, "flags": 0, "blk_sigset": 0}
        for pid, command, state in ((10, "sh", 1), (11, "worker\x1b[2J", 3)):
            core = {"mtype": 1, "tc": {**tc, "task_state": state, "comm": command}}
            write(f"core-{pid}.img", "CORE", core)
            ids = dict.fromkeys(("vm_id", "files_id", "fs_id", "sighand_id"), pid)
            write(f"ids-{pid}.img", "IDS", ids)
            write(f"fs-{pid}.img", "FS", {"cwd_id": 3, "root_id": 4})
        write(
            "fdinfo-10.img",
            "FDINFO",
            {"id": 1, "flags": 0, "type": 1, "fd": 5},
            {"id": 2, "flags": 0, "type": 4, "fd": 6},
        )
        reg = {"flags": os.O_WRONLY | os.O_APPEND, "pos": 7, "fown": fown()}
        inet = {
            "ino": 9,
            "family": socket.AF_INET,
            "type": 1,
            "proto": 6,
            "state": 1,
            "src_port": 80,
            "dst_port": 5000,
        }
        words = [int.from_bytes(socket.inet_aton(a), "little") for a in ("10.0.0.1", "10.0.0.2")]
        opts = {
            "so_sndbuf": 1,
            "so_rcvbuf": 1,
            "so_snd_tmo_sec": 0,
            "so_snd_tmo_usec": 0,
            "so_rcv_tmo_sec": 0,
            "so_rcv_tmo_usec": 0,
        }
        more = {
            "flags": 2,
            "backlog": 0,
            "src_addr": words[:1],
            "dst_addr": words[1:],
            "fown": fown(),
            "opts": opts,
        }
        write(
            "files.img",
            "FILES",
            {"type": 1, "id": 1, "reg": {**reg, "id": 1, "name": "/srv/log"}},
            {"type": 4, "id": 2, "isk": {**inet, **more, "id": 2}},
            {"type": 1, "id": 3, "reg": {**reg, "id": 3, "name": "/srv"}},
        )
    run = {"vaddr": 0x7000, "compat_nr_pages": 3, "nr_pages": 3, "flags": 4}
    parts = [schema.message("PAGEMAP_HEAD")(pages_id=1), schema.message("PAGEMAP")(**run)]
    # in a parent image
    parts.append(schema.message("PAGEMAP")(vaddr=0x9000_0000, compat_nr_pages=5, flags=1))
    data = schema.magic("IMG_COMMON").to_bytes(4, "little") + schema.magic("PAGEMAP").to_bytes(
        4, "little"
    )
    for part in parts:
        body = part.SerializeToString()
        data += len(body).to_bytes(4, "little") + body
    (made / "pagemap-10.img").write_bytes(data)
    (made / "pages-1.img").write_bytes(bytes(3 * PAGE))
    return made


def archive(folder: Path, inside: str = "checkpoint") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(folder, inside)
        config = json.dumps(CONFIG).encode()
        info = tarfile.TarInfo("config.dump")
        info.size = len(config)
        tar.addfile(info, io.BytesIO(config))
    return out.getvalue()


def look(path: Path, *, maps: bool = False) -> Shown:
    return show(kit.config(path.parent), str(path), maps=maps)


def judge(shown: Shown) -> None:
    body = shown.to_dict()
    found = [
        (p["pid"], p["ppid"], p["command"], p["threads"], p["state"], p["cwd"])
        for p in body["processes"]
    ]
    assert found == [(10, 0, "sh", 1, "S", "/srv"), (11, 10, "worker\x1b[2J", 2, "T", "/srv")]
    assert [(f["path"], f["kind"], f["holders"]) for f in body["files"]] == [
        ("/srv/log", "written", [[10, 5]])
    ]
    (connection,) = body["connections"]
    assert (connection["pid"], connection["fd"], connection["state"], connection["external"]) == (
        10,
        6,
        "established",
        True,
    )
    assert (connection["local"], connection["peer"]) == ("10.0.0.1:80", "10.0.0.2:5000")
    assert [(m["kind"], m["id"], m["bytes"]) for m in body["memory"]] == [("task", 10, 3 * PAGE)]
    assert {i["name"]: i["size"] for i in body["images"]}["pages-1.img"] == 3 * PAGE
    assert body["id"] == ""


def test_a_folder_of_images_is_shown(folder: Path) -> None:
    judge(look(folder))
    (maps,) = look(folder, maps=True).maps.values()
    assert maps == [{"address": 0x7000, "pages": 3, "bytes": 3 * PAGE, "flags": ["present"]}]
    (folder / "core-11.img").unlink()
    assert [p.command for p in look(folder).manifest.processes] == ["sh", ""]


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.compress]
)
def test_an_archive_of_podman_s_is_shown_however_it_is_packed(
    folder: Path, pack: Callable[[bytes], bytes]
) -> None:
    file = folder.parent / "web.tar"
    file.write_bytes(pack(archive(folder)))
    shown = look(file)
    judge(shown)
    assert (shown.manifest.session.name, shown.manifest.labels) == (
        "db-1",
        {"image": CONFIG["rootfsImageName"]},
    )
    whole = file.read_bytes()
    for part in (1, 2, 3):
        file.write_bytes(whole[: len(whole) * part // 4])
        with pytest.raises(DataError):
            look(file)


def test_a_folder_as_podman_keeps_it_is_shown(folder: Path) -> None:
    outer = folder.parent / "outer"
    outer.mkdir()
    folder.rename(outer / "checkpoint")
    (outer / "config.dump").write_text(json.dumps(CONFIG))
    assert look(outer).manifest.session.name == "db-1"
    judge(look(outer))


def test_what_an_archive_says_leads_nowhere(folder: Path) -> None:
    """Links, devices and paths in an archive are passed over; nothing is written anywhere."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, link in (
            ("checkpoint/pstree.img", tarfile.SYMTYPE, "/etc/passwd"),
            ("checkpoint/files.img", tarfile.CHRTYPE, ""),
            ("../checkpoint/pstree.img", tarfile.REGTYPE, ""),
            ("/pstree.img", tarfile.REGTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            tar.addfile(info)
    file = folder.parent / "links.tar"
    file.write_bytes(out.getvalue())
    before = sorted(path.name for path in folder.parent.rglob("*"))
    with pytest.raises(UnsupportedFormat):
        look(file)
    assert sorted(path.name for path in folder.parent.rglob("*")) == before
    (folder / "pstree.img").unlink()
    (folder / "pstree.img").symlink_to("core-10.img")
    with pytest.raises(UnsupportedFormat):
        look(folder)


def test_images_that_are_too_large_or_broken_are_refused(folder: Path) -> None:
    os.truncate(folder / "files.img", 33 << 20)
    with pytest.raises(Damaged, match="too large"):
        look(folder)
    (folder / "files.img").write_bytes(b"no image")
    with pytest.raises(Damaged, match=r"files\.img"):
        look(folder)


def test_what_holds_no_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n" * 999)
    (tmp_path / "empty").touch()
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("text", "empty", "nothing", "fifo"):
        with pytest.raises(UnsupportedFormat):
            look(tmp_path / name)
    with pytest.raises(NoSuchCheckpoint):
        look(tmp_path / "absent")
    assert plain.PlainImages("").get("files.img") is None


def test_an_exported_file_is_shown_without_a_store(tmp_path: Path) -> None:
    config = kit.config(tmp_path, store=str(tmp_path / "store"))
    with Repository.init(LocalStore(config.store), encryption=True, config=config) as repository:
        written = kit.write(repository)
    transfer.export(config, "web", tmp_path / "file", reporter=Reporter())
    shown = show(
        config.with_options(store="/proc/nonexistent/store"), str(tmp_path / "file"), maps=True
    )
    assert (shown.manifest.id, shown.store) == (written.id, str(tmp_path / "file"))
    assert shown.to_dict()["origin"]["number"] == 1
    assert list(shown.maps) == [0]
