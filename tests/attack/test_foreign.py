"""Archives and folders of images that an attacker controls: links, pipes, devices, names, and
changes while they are read.
"""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import Criuctl
from support.foreignimages import header, image, pstree

from criuctl.criu import plain, schema
from criuctl.errors import CriuctlError, Damaged, UnsupportedFormat

SECONDS = 30  # for a criuctl that is never kept waiting
SECRET = "name-that-only-root-may-read"


def core(command: str) -> bytes:
    cls = schema.message("CORE")
    made = cls(mtype=1)
    for name in ("task_state", "exit_code", "personality", "flags", "blk_sigset"):
        setattr(made.tc, name, 1)
    made.tc.comm = command
    return image("CORE", [made])


@pytest.fixture
def folder(criuctl: Criuctl) -> Path:
    """A process whose images are sound."""
    made = criuctl.home.path / "images"
    made.mkdir()
    (made / "pstree.img").write_bytes(pstree(1))
    (made / "core-1.img").write_bytes(core("sound"))
    return made


@pytest.fixture
def secret(criuctl: Criuctl) -> Path:
    """An image that the one who asks may read, and who made the folder may not."""
    path = criuctl.home.path / "elsewhere"
    path.mkdir(mode=0o700)
    file = path / "core-1.img"
    file.write_bytes(core(SECRET[:15]))
    file.chmod(0o600)
    return file


def linked(folder: Path, secret: Path) -> None:
    (folder / "core-1.img").symlink_to(secret)


def piped(folder: Path, _secret: Path) -> None:
    os.mkfifo(folder / "core-1.img")


def listened(folder: Path, _secret: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "core-1.img"))


def device(folder: Path, _secret: Path) -> None:
    os.mknod(folder / "core-1.img", 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def nested(folder: Path, _secret: Path) -> None:
    (folder / "core-1.img").mkdir()


@pytest.mark.parametrize("instead", [linked, piped, listened, device, nested])
def test_what_is_no_regular_file_is_not_read(
    instead: Callable[[Path, Path], None], folder: Path, secret: Path, criuctl: Criuctl
) -> None:
    (folder / "core-1.img").unlink()
    instead(folder, secret)
    shown = criuctl("show", folder, timeout=SECONDS)
    assert [p["command"] for p in shown["processes"]] == [""]


def test_a_link_in_the_place_of_the_folder_inside_leads_nowhere(
    folder: Path, secret: Path, criuctl: Criuctl
) -> None:
    """``checkpoint``, which lies next to podman's config."""
    (secret.parent / "pstree.img").write_bytes(pstree(1))
    (folder / "pstree.img").unlink()
    (folder / "checkpoint").symlink_to(secret.parent)
    assert criuctl("show", folder, check=False, timeout=SECONDS)["exit_code"] == 8


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_config_that_is_no_regular_file_is_not_read(
    kind: str, folder: Path, criuctl: Criuctl
) -> None:
    inside = folder / "checkpoint"
    inside.mkdir()
    for file in list(folder.glob("*.img")):
        file.rename(inside / file.name)
    config = folder / "config.dump"
    if kind == "fifo":
        os.mkfifo(config)
    else:
        (folder.parent / "secret.json").write_text(json.dumps({"name": SECRET}))
        config.symlink_to(folder.parent / "secret.json")
    shown = criuctl("show", folder, timeout=SECONDS)
    assert shown["session"] == "images"


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_what_is_neither_file_nor_folder_keeps_nobody_waiting(kind: str, criuctl: Criuctl) -> None:
    path = criuctl.home.path / "it"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    assert criuctl("show", path, check=False, timeout=SECONDS)["exit_code"] in (3, 8)


def test_a_folder_that_changes_while_it_is_read_leads_nowhere(folder: Path, secret: Path) -> None:
    """A sound image, a link to a secret one and a pipe take turns, as fast as the one who owns the
    folder can.
    """
    name, stop = folder / "core-1.img", threading.Event()
    sound = name.read_bytes()

    def swap() -> None:
        other = folder / "next"
        while not stop.is_set():
            for make in (
                lambda: other.symlink_to(secret),
                lambda: os.mkfifo(other),
                lambda: other.write_bytes(sound),
            ):
                make()
                os.rename(other, name)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        seen: set[bytes | None] = set()
        reads, until = 0, time.monotonic() + 20
        while (reads < 400 or len(seen) < 2) and time.monotonic() < until:
            found = plain.read(folder).images.get("core-1.img")
            assert found in (None, sound), "the secret one was read"
            seen.add(found)
            reads += 1
        assert seen == {None, sound}, "it has changed"
    finally:
        stop.set()
        swapping.join()


def test_a_folder_that_is_replaced_by_a_link_meanwhile_is_the_one_that_was_opened(
    folder: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst moment: between the list of its files and the first of them."""
    (secret.parent / "pstree.img").write_bytes(pstree(1, 2))
    listing = os.listdir

    def listed(where: int | str) -> list[str]:
        names = listing(where)
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(secret.parent)
        return names

    monkeypatch.setattr(os, "listdir", listed)
    found = plain.read(folder)
    assert found.images["pstree.img"] == pstree(1)
    assert SECRET.encode()[:15] not in found.images["core-1.img"]


# -- archives
# ---------------------------------------------------------------------------------------------


def member(name: bytes, content: bytes, kind: bytes = b"0") -> bytes:
    return header(name, kind, len(content)) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def read(path: Path, *members: bytes) -> plain.PlainImages:
    path.write_bytes(b"".join(members) + bytes(1024))
    return plain.read(path)


@pytest.mark.parametrize(
    "name",
    [
        b"../core-1.img",
        b"checkpoint/../core-1.img",
        b"/checkpoint/core-1.img",
        b"a/checkpoint/core-1.img",
    ],
)
def test_a_name_that_leads_elsewhere_is_no_image(name: bytes, tmp_path: Path) -> None:
    found = read(
        tmp_path / "bad.tar", member(b"checkpoint/pstree.img", pstree(1)), member(name, core("bad"))
    )
    assert set(found.sizes) == {"pstree.img"}
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.tar"], "nothing is written"


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6", b"S", b"D", b"Z"])
def test_a_member_of_another_kind_is_no_image(kind: bytes, tmp_path: Path) -> None:
    content = b"" if kind in b"125" else core("bad")
    found = read(
        tmp_path / "bad.tar", member(b"core-1.img", content, kind), member(b"pstree.img", pstree(1))
    )
    assert set(found.sizes) == {"pstree.img"}


def test_an_image_stands_in_an_archive_once(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"two images core-1\.img"):
        read(
            tmp_path / "bad.tar",
            member(b"core-1.img", core("a")),
            member(b"core-1.img", core("b")),
            member(b"pstree.img", b""),
        )


@pytest.mark.parametrize("size", [-1, 1 << 40, (1 << 63) - 1, 1 << 80])
def test_a_size_that_is_none_ends_it(size: int, tmp_path: Path) -> None:
    block = bytearray(header(b"checkpoint/pages-1.img", b"0", 0))
    block[124:136] = (
        b"\xff" * 12 if size < 0 else b"\x80" + (size & (1 << 88) - 1).to_bytes(11, "big")
    )
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    with pytest.raises((Damaged, UnsupportedFormat)):
        read(tmp_path / "bad.tar", member(b"pstree.img", pstree(1)), bytes(block))


@pytest.mark.parametrize(
    "records",
    [
        b"9 size=-1\n",
        b"99999 path=a\n",
        b"x",
        b"0 path=\n",
        b"24 size=" + b"9" * 15 + b"\n",
        b"-5 a=b\n",
    ],
)
def test_an_extended_header_that_is_none_ends_it(records: bytes, tmp_path: Path) -> None:
    with pytest.raises((Damaged, UnsupportedFormat)):
        read(
            tmp_path / "bad.tar",
            member(b"pstree.img", pstree(1)),
            member(b"pax", records, b"x"),
            member(b"checkpoint/core-1.img", core("a")),
        )


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_every_form_are_read(form: int, tmp_path: Path) -> None:
    """Names, and sizes, that need more than a header."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for name, content in (
            ("checkpoint/pstree.img", pstree(1)),
            ("x/" + "y" * 90, b"other"),
            ("checkpoint/core-1.img", core("a")),
        ):
            about = tarfile.TarInfo(f"./{name}" if form == tarfile.GNU_FORMAT else name)
            about.size = len(content)
            if form == tarfile.PAX_FORMAT:
                about.pax_headers = {
                    "mtime": "1.5",
                    "SCHILY.xattr.user.a": "b" * 3000,
                    "path": name,
                    "size": str(len(content)),
                }
            tar.addfile(about, io.BytesIO(content))
        if form != tarfile.USTAR_FORMAT:
            tar.addfile(tarfile.TarInfo("z" * 300))
    path = tmp_path / "good.tar"
    path.write_bytes(made.getvalue())
    found = plain.read(path)
    assert found.images == {"pstree.img": pstree(1), "core-1.img": core("a")}


def test_an_import_of_what_is_no_export_reads_nothing_of_it(folder: Path, criuctl: Criuctl) -> None:
    for path in (folder, folder / "pstree.img"):
        assert criuctl("import", path, check=False, timeout=SECONDS)["exit_code"] in (2, 8)
    with pytest.raises(CriuctlError):
        plain.read(folder / "core-1.img")
