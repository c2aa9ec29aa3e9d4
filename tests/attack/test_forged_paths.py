"""An attacker who can write to a store that is not encrypted names files of root's in a user's
checkpoint.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.identity import inner_pid
from support.laboratory import Laboratory

from criuctl.checkpoint.manifest import ImageFile
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.criu import schema
from criuctl.criu.images import ImageSet, path_of, read, write
from criuctl.report import Reporter
from criuctl.restore.materialise import write_images
from criuctl.store import open_store

pytestmark = pytest.mark.integration
TERMINAL = 11  # FdTypes: TTY


@pytest.fixture(autouse=True)
def plain_store(lab: Laboratory) -> None:
    """Of its checkpoints nothing proves that this host has made them."""
    lab.criuctl("store", "init", "--no-encrypt")


@pytest.fixture
def shadow(lab: Laboratory) -> Iterator[Path]:
    """A file of root's, whose path is as long as that of the user's."""
    folder = lab.folder.parent / "roots!"
    folder.mkdir()
    file = folder / "shadow"
    file.write_text("the hashes")
    file.chmod(0o600)
    lab.as_user("mkdir d; printf 'the hashes' > d/shadow; chmod 600 d/shadow")
    yield file
    assert file.read_text() == "the hashes"


def forged(lab: Laboratory, report: Any, path: Path, other: Path | str, **changes: object) -> str:
    """A checkpoint that has `other` wherever this one has `path`, of the same length."""
    assert len(str(path)) == len(str(other))
    before, after = os.fsencode(path), os.fsencode(other)
    home = lab.criuctl.home.path
    keys, cache = str(home / "keys"), str(home / "cache")
    config = Config(store=str(lab.criuctl.store), key_dir=keys, cache_dir=cache)
    reporter = Reporter()
    with open_store(config.store, config) as store, Repository.open(store, config) as repository:
        manifest = repository.manifest(report["checkpoint"])
        data = bytes(repository.reader(reporter).read(manifest.image_data))
        assert before in data
        paths = [one.path.replace(str(path), str(other)) for one in manifest.files]
        pairs = zip(manifest.files, paths, strict=True)
        files = tuple(one.with_use(path=new) for one, new in pairs if not new.startswith("/proc/"))
        theirs = [
            one
            for one in manifest.inodes
            if one.path == str(path) and not str(other).startswith("/proc/")
        ]
        inodes = tuple(one.with_use(path=str(other), inode=os.stat(other).st_ino) for one in theirs)
        with repository.writer(reporter) as writer:
            writer.add_bytes("images", data.replace(before, after))
            writer.flush()
            made = manifest.with_use(
                id=os.urandom(16).hex(),
                image_data=writer.stream("images"),
                files=files,
                inodes=inodes,
                **changes,
            )
            writer.commit(made)
    return made.id


def edited(lab: Laboratory, report: Any, edit: Callable[[ImageSet], None]) -> str:
    """A checkpoint whose images `edit` has changed."""
    home = lab.criuctl.home.path
    config = Config(
        store=str(lab.criuctl.store), key_dir=str(home / "keys"), cache_dir=str(home / "cache")
    )
    reporter = Reporter()
    with ExitStack() as stack:
        store = stack.enter_context(open_store(config.store, config))
        repository = stack.enter_context(Repository.open(store, config))
        manifest = repository.manifest(report["checkpoint"])
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = os.open(place, os.O_RDONLY)
        stack.callback(os.close, folder)
        write_images(manifest, repository.reader(reporter), folder)
        edit(ImageSet(folder))
        writer = stack.enter_context(repository.writer(reporter))
        names = sorted(os.listdir(place))
        for name in names:
            writer.add_bytes("images", (place / name).read_bytes())
        writer.flush()
        images = tuple(ImageFile(name, (place / name).stat().st_size) for name in names)
        made = manifest.with_use(
            id=os.urandom(16).hex(),
            image_data=writer.stream("images"),
            images=images,
            files=(),
            inodes=(),
        )
        writer.commit(made)
    return made.id


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_file_of_root_s(lab: Laboratory, shadow: Path, flags: int) -> None:
    """Root alone controls its path, but nothing proves that the user's process had it."""
    own = lab.folder / "d/shadow"
    report = lab.dump(lab.start((own, flags)))
    answer = lab.restore(forged(lab, report, own, shadow), check=False)
    assert answer["exit_code"] == 4, answer
    assert "nothing proves" in answer["error"]["message"]
    assert lab.processes() == []


@pytest.mark.parametrize(
    "way",
    [
        "/proc/{pid}/root",
        "/proc/{pid}/task/{pid}/root",
        "/proc/{pid}/fd/../root",  # opened by the process itself, when all is there
        "/proc/./{pid}/root",
        "/proc/self/root",
        "/proc/thread-self/root",
    ],
)
def test_a_file_of_root_s_by_a_link_of_procfs(lab: Laboratory, shadow: Path, way: str) -> None:
    """CRIU follows such a link with root's rights; the kernel never gives an open file such a
    name.
    """
    folder = lab.folder / ("d" * 60)
    lab.as_user(f"mkdir {folder}; printf 'the hashes' > {folder}/shadow; chmod 600 {folder}/shadow")
    own = folder / "shadow"
    pid = lab.start((own, os.O_RDONLY))
    os.chown(lab.folder / "output", lab.uid, lab.uid)
    link = way.format(pid=inner_pid(pid))
    report = lab.dump(pid)
    other = link + str(shadow).rjust(len(str(own)) - len(link), "/")
    answer = lab.restore(forged(lab, report, own, other), check=False)
    assert answer["exit_code"] == 8, answer
    assert "not the name of an open file" in answer["error"]["message"]
    assert lab.processes() == []


@pytest.mark.parametrize("excuse", ["inherited", "terminal", "held-terminal"])
def test_a_file_of_root_s_that_is_said_to_be_another_thing(
    lab: Laboratory, shadow: Path, excuse: str
) -> None:
    """CRIU opens what it does not find inherited by its name, and a terminal by the name of its
    node, which it gives a mode.
    """

    def edit(images: ImageSet) -> None:
        entries = images.files()
        mine = next(
            entry for entry in entries if entry.HasField("reg") and path_of(entry.reg) == str(own)
        )
        mine.reg.name = str(shadow)
        mine.reg.ClearField("size")
        mine.reg.mode = stat.S_IFREG | 0o666
        if excuse == "inherited":
            mine.reg.ext = True
        else:
            number = max(entry.id for entry in entries) + 1
            terminal = schema.message("FILES")(type=TERMINAL, id=number)
            terminal.tty.id, terminal.tty.tty_info_id, terminal.tty.flags, terminal.tty.regf_id = (
                number,
                8,
                os.O_RDWR,
                mine.id,
            )
            terminal.tty.fown.CopyFrom(mine.reg.fown)
            entries.append(terminal)
            info = schema.message("TTY_INFO")(
                id=8, type=1, locked=False, exclusive=False, packet_mode=False
            )
            info.sid, info.pgrp, info.rdev, info.pty.index = 0, 0, os.makedev(136, 4), 4
            write(images.folder, "tty-info.img", "TTY_INFO", [info])
            if excuse == "held-terminal":
                mine.id, terminal.id = terminal.id, mine.id
                mine.reg.id, terminal.tty.id, terminal.tty.regf_id = mine.id, terminal.id, mine.id
                for name in (name for name in images.names() if name.startswith("fdinfo-")):
                    held = read(images.folder, name, "FDINFO")
                    for one in held:
                        one.type = TERMINAL if one.id == terminal.id else one.type
                    write(images.folder, name, "FDINFO", held)
        write(images.folder, "files.img", "FILES", entries)

    own = lab.folder / "shadow"
    lab.as_user("printf 'the hashes' > shadow; chmod 600 shadow")
    pid = lab.start((own, os.O_RDONLY))
    os.chown(lab.folder / "output", lab.uid, lab.uid)
    report = lab.dump(pid)
    answer = lab.restore(edited(lab, report, edit), check=False)
    assert answer["exit_code"] in (4, 8), answer
    assert str(shadow) in answer["error"]["message"]
    assert lab.processes() == []
    assert stat.S_IMODE(shadow.stat().st_mode) == 0o600


def test_what_root_opened_for_the_user_comes_back(lab: Laboratory, shadow: Path) -> None:
    """The host that has made the checkpoint knows that the process had it."""
    pid = lab.start((shadow, os.O_RDONLY), uid=0, inside=True)
    lab.ask(pid, f"os.chown({str(lab.folder / 'ask')!r}, 1001, 1001)")
    ids = "os.setgroups([]), os.setresgid(1001, 1001, 1001), os.setresuid(1001, 1001, 1001)"
    lab.ask(pid, f"{ids}, __import__('ctypes').CDLL(None).prctl(4, 1, 0, 0, 0)")
    report = lab.dump(pid)
    pid = lab.restore(report["checkpoint"])["pid"]
    assert os.stat(f"/proc/{pid}").st_uid == 1001
    assert lab.ask(pid, "os.read(opened[0], 100)") == "b'the hashes'"
