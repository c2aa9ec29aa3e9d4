"""Copies of one checkpoint never go on with the same random numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.asking import Asked
from support.keeper import wait_until
from support.operating import TIMEOUT

pytestmark = pytest.mark.integration

_WAITING = """
import ctypes, json, mmap, os, random, select, ssl, sys
from criuctl import inside

path = os.environ["CRIUCTL_SESSION_DIR"] + "/generation"
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
assert watch >= 0 and libc.inotify_add_watch(watch, path.encode(), 0x8) > 0  # IN_CLOSE_WRITE
wiped = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
wiped.madvise(18)
wiped[:] = b"x" * 8192
random.seed(7)
ssl.RAND_bytes(1)
called = inside.on_copy(lambda: sys.argv.append("called")) and sys.argv

def values():
    return {
        "openssl": ssl.RAND_bytes(8).hex(),
        "random": random.random(),
        "wiped": wiped[:] == bytes(8192),
        "generation": inside.generation(),
    }

def tell():
    found = values()
    with open(f"{sys.argv[1]}/.{found['generation']}", "w") as file:
        json.dump(found, file)
    os.rename(file.name, f"{sys.argv[1]}/{found['generation']}")

print("ready", flush=True)
waiting = select.poll()
waiting.register(watch, select.POLLIN)
while True:
    waiting.poll()
    os.read(watch, 4096)
    while "called" not in sys.argv:
        select.select([], [], [], 0.01)
    tell()
"""


class Lives:
    """Each life of a session's program that waits for its generation number, and then shows what
    it has.
    """

    def __init__(self, asked: Asked, text: str, *options: str) -> None:
        self.asked, self.folder = asked, asked.home.path / "lives"
        self.folder.mkdir()
        program = asked.home.path / "waiting.py"
        program.write_text(text)
        command = ("--", sys.executable, program, self.folder)
        asked("run", "-d", "--name", "work", *options, *command)
        asked("wait", "work", "--match", "ready", "--timeout", TIMEOUT)

    def shown(self, count: int) -> Sequence[dict[str, Any]]:
        """What the lives have shown, when so many have."""
        wait_until(lambda: len(self._files()) >= count, 2 * TIMEOUT, f"{count} lives")
        return [json.loads(file.read_text()) for file in self._files()]

    def _files(self) -> list[Path]:
        return [file for file in self.folder.iterdir() if not file.name.startswith(".")]


def test_python(asked: Asked) -> None:
    """Twenty copies of a live session, and two restores of one checkpoint."""
    lives = Lives(asked, _WAITING)
    asked("fork", "work", "-n", 20)
    checkpoint = asked("dump", "work")["checkpoint"]
    for name in ("work", "other"):
        asked("restore", checkpoint, *(("--as", name) if name != "work" else ()))
    shown = lives.shown(22)
    for key in ("openssl", "random", "generation"):
        assert len({one[key] for one in shown}) == 22
    assert all(one["wiped"] for one in shown)


_OPENSSL = "__import__('ssl').RAND_bytes(8).hex()"


def test_a_copy_of_a_copy(asked: Asked) -> None:
    """Whose generator nothing has used since it was copied itself."""
    asked.begin("work")
    asked.ask("work", _OPENSSL)
    asked("fork", "work", "--as", "copy")
    asked("fork", "copy", "-n", 2)
    names = ["work", "copy", "copy-1", "copy-2"]
    assert len({asked.ask(name, _OPENSSL) for name in names}) == len(names)
