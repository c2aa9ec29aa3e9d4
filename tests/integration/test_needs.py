"""What a live tree needs, asked of this host: all of it is here; and what is taken away is missed,
as a restore misses it.

One program uses a library of its own, files in several ways, a working folder, a port, a named unix
socket.  It is dumped once; then the host is spoilt in one way after the other.  For each the
preflight must have an error, and the restore must fail; with everything as it was the preflight has
none, and the restore succeeds.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.zoo import Animal, Zoo

from criuctl.checkpoint.manifest import SessionRef
from criuctl.config import Config
from criuctl.ops.moving.needs import gather
from criuctl.ops.moving.target_check import examine
from criuctl.report import Finding

pytestmark = pytest.mark.integration

PROGRAM = """
import ctypes, os, signal, socket, sys
os.mkdir('place'); os.chmod('place', 0o750); os.mkdir('sockets')
ctypes.CDLL(os.path.abspath('lib.so'))
kept = [open('book'), open('log', 'a'), os.open('place', os.O_RDONLY)]
kept += [os.open('fifo', os.O_RDWR), open('/dev/zero')]
kept[1].write('a line'); kept[1].flush()
listener = socket.create_server(('127.0.0.1', 0))
named = socket.socket(socket.AF_UNIX); named.bind(os.path.abspath('sockets/name')); named.listen()
where = os.path.abspath('ready')
os.chdir('place')
with open(where + '.new', 'w') as file: file.write(str(listener.getsockname()[1]))
os.rename(where + '.new', where)
while True: signal.pause()
"""


@pytest.fixture
def config(home: Home) -> Config:
    return Config(
        state_dir=str(home.path / "target"),
        cache_dir=str(home.path / "cache"),
        hook_dirs=(),
        files="carry",
    )


@pytest.fixture
def user(zoo: Zoo, home: Home) -> Animal:
    """The program, ready."""
    folder = home.path / "user"
    folder.mkdir()
    mapped = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libz" in line
    )
    shutil.copy(mapped, folder / "lib.so")
    (folder / "book").write_bytes(bytes(2 << 20))  # too large to travel
    os.mkfifo(folder / "fifo")
    animal = zoo.launch([sys.executable, "-S", "-c", PROGRAM], name="user", ready=False)
    wait_until((folder / "ready").exists, 60, "the program is ready")
    return animal


def needs_of(animal: Animal, config: Config, **options: Any) -> dict[str, Any]:
    needs: dict[str, Any] = json.loads(
        json.dumps(gather(config, animal.pid, session=SessionRef("user", "1" * 32), **options))
    )
    return needs


def errors(needs: dict[str, Any], config: Config) -> list[Finding]:
    return [f for f in examine(needs, config, time.time()) if f.level == "error"]


@contextmanager
def instead(path: Path, make: Callable[[Path], object] | None) -> Iterator[None]:
    """Something else, or nothing, is at `path`; what was there comes back, the very same."""
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    try:
        if make is not None:
            make(path)
        yield
    finally:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


@contextmanager
def listening(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


@contextmanager
def mode(path: Path, other: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(other)
    try:
        yield
    finally:
        path.chmod(before)


def another_build(of: Path, build: str) -> Callable[[Path], object]:
    """The same library with one bit of its build-id changed."""
    content, permissions = of.read_bytes(), of.stat().st_mode
    raw = bytes.fromhex(build)
    assert content.count(raw) == 1

    def make(path: Path) -> None:
        path.write_bytes(content.replace(raw, raw[:-1] + bytes([raw[-1] ^ 1])))
        path.chmod(permissions)

    return make


def test_what_is_missed_is_what_a_restore_would_miss(
    user: Animal, config: Config, criuctl: Criuctl, zoo: Zoo
) -> None:
    folder = user.folder
    port = int((folder / "ready").read_text())
    needs = needs_of(user, config)
    used = {
        (f["use"], Path(f["path"]).name)
        for f in needs["files"]
        if f["path"].startswith(str(folder))
    }
    assert used >= {
        ("mapped", "lib.so"),
        ("read", "book"),
        ("written", "log"),
        ("cwd", "place"),
        ("folder", "sockets"),
    }
    assert {f["path"] for f in needs["files"] if f["travels"]} == {
        str(folder / "log"),
        str(folder / "output"),
    }
    (library,) = [f for f in needs["files"] if f["path"] == str(folder / "lib.so")]
    assert [f.code for f in errors(needs, config)] == ["port-taken"], "it runs here itself"
    report = criuctl("dump", user.pid)
    wait_until(lambda: not user.alive(), 60, "the tree is gone")
    assert errors(needs, config) == []

    spoilt = [
        (
            "build-id",
            instead(folder / "lib.so", another_build(folder / "lib.so", library["build_id"])),
        ),
        ("file-refuse", instead(folder / "lib.so", lambda path: path.write_bytes(b"short"))),
        ("file-missing", instead(folder / "lib.so", None)),
        ("file-missing", instead(folder / "book", None)),
        ("folder-missing", instead(folder / "place", None)),
        ("file-missing", instead(folder / "fifo", None)),
        ("port-taken", listening(port)),
    ]
    for code, change in spoilt:
        with change:
            found = errors(needs, config)
            assert {f.code for f in found} == {code}, found
            named = f"PID {os.getpid()} " if code == "port-taken" else str(folder)
            assert all(named in f.text for f in found)
            answer = criuctl("restore", report["checkpoint"], check=False)
            assert answer["exit_code"] == (6 if code == "build-id" else 4), (code, answer)
            if code == "build-id":  # which CRIU alone compares
                assert "lib.so" in answer["error"]["message"]
                assert Path(answer["error"]["log"]).stat().st_mode & 0o777 == 0o600
    with mode(folder / "book", 0o600), mode(folder / "place", 0o700):
        assert errors(needs, config) == [], (
            "other permissions do not matter to a process that has it open"
        )
        zoo.adopt(criuctl("restore", report["checkpoint"])["pid"], user)


def test_what_travels_need_not_be_there(user: Animal, config: Config) -> None:
    """Programs with --carry-binaries; a folder with all that is below it, the working folder
    included, with --with-files.
    """
    folder = user.folder
    alone = needs_of(user, config, written_travel=False)
    along = needs_of(
        user, config, with_files=[str(folder)], carry_binaries=True, connections="hangup"
    )
    along["connections"] = alone["connections"] = []  # it runs here itself
    assert {f["use"] for f in along["files"] if f["path"].startswith(f"{folder}/")} == {"carried"}
    user.end()
    aside = folder.with_name("aside")
    folder.rename(aside)
    missing = {f.text.partition(":")[0] for f in errors(alone, config)}
    assert {Path(path).name for path in missing} == {
        "lib.so",
        "book",
        "log",
        "output",
        "fifo",
        "place",
        "sockets",
    }
    assert errors(along, config) == []
