"""Text that others choose never commands the terminal, and never a shell when it is copied from a
hint.

Processes name themselves, their files, folders and sockets as they like; a manifest in a store or
an archive says what its writer wants it to say.  Each command that shows such text is run, with its
output to a file and to a terminal, and what it wrote is looked through for control characters.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import checkpoints as kit
from support.command import Home
from support.keeper import wait_until
from support.operating import Operators

from criuctl.checkpoint.manifest import Manifest
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.report import Reporter
from criuctl.store import open_store

pytestmark = pytest.mark.integration

# Sets the title, clears the screen, goes back in the line, begins a line of its own, turns the text
# around; a command.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nforged: line\u202e\x9b31m;rm -rf ~;$(reboot)`reboot`'\""
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# what rich and criuctl write
_STYLE = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[2?K|\x1b\[1A|\r\x1b\[2K")


def looked_through(text: str, where: str) -> None:
    """Neither control characters nor lines that the text itself has begun."""
    found = _CONTROL.search(text)
    assert found is None, (
        f"{where}: {found[0]!r} in {text[max(0, found.start() - 80) : found.end() + 20]!r}"
    )
    assert not [line for line in text.splitlines() if line.startswith("forged")], where


def shown(operators: Operators, *words: str | int | Path) -> str:
    """What a command writes, to files and then to a terminal, both looked through."""
    command = operators.start(*words, json_output=False)
    command.process.wait(120)
    text = command.out.read_text(errors="surrogateescape") + command.err.read_text(
        errors="surrogateescape"
    )
    looked_through(text, f"{words}")
    window = operators.window(*map(str, words), columns=200)
    seen = window.read().decode(errors="surrogateescape")
    plain = _STYLE.sub("", seen).replace("\r\n", "\n").replace("\n\r", "\n")
    looked_through(plain, f"{words} on a terminal")
    return text


@pytest.fixture
def operators(keeper: Any, home: Home) -> Any:
    operators = Operators(keeper, home)
    yield operators
    operators.close()


# Names itself, its arguments, folder, files and sockets in a hostile way.
PROGRAM = """
import ctypes, os, socket, sys, time
hostile = sys.argv[1]
ctypes.CDLL(None).prctl(15, b"\\x1b]0;own\\x07\\n\\x9b1", 0, 0, 0)
os.mkdir(hostile.replace("/", "."))
os.chdir(hostile.replace("/", "."))
written = open("log" + hostile.replace("/", "."), "w")
written.write("x"); written.flush()
server = socket.socket(socket.AF_UNIX)
server.bind("s" + hostile.replace("/", ".")[:60])
server.listen()
other = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
open(sys.argv[3], "w").close()
time.sleep(10000)
"""


def test_names_that_a_process_chooses(
    operators: Operators, home: Home, request: pytest.FixtureRequest
) -> None:
    peer = socket.create_server(("127.0.0.1", 0))
    request.addfinalizer(peer.close)
    ready = home.path / "ready"
    argv = [sys.executable, "-c", PROGRAM, HOSTILE, str(peer.getsockname()[1]), str(ready)]
    body = operators(
        "run", "-d", "--name", "work", "--host-pids", "--label", f"a={HOSTILE}", "--", *argv
    )
    wait_until(ready.exists, 60, "the program is ready")
    shown(operators, "check", "work")
    shown(operators, "check", body["pid"])
    shown(operators, "connections", "work")
    shown(operators, "status", "work")
    shown(operators, "ls")
    shown(operators, "snapshot", "work")
    shown(operators, "dump", "work", "--leave-running", "-v", "--label", f"b={HOSTILE}")
    for words in (
        ("list",),
        ("show", "work"),
        ("show", "work", "--env"),
        ("diff", "work@1", "work@2"),
        ("verify", "--all"),
    ):
        shown(operators, *words)
    shown(operators, "dump", "work")
    (folder,) = (path for path in home.path.iterdir() if "forged" in path.name)
    folder.rename(home.path / "away")
    refused = shown(operators, "restore", "work")
    assert "is here" in refused or "missing" in refused
    shown(operators, "restore", "work", "--dry-run")
    shown(operators, "events")
    shown(operators, "log", "work")


def test_commands_to_copy_take_a_path_as_one_word(operators: Operators, home: Home) -> None:
    """A folder that others may write to is named in a hint, with ``chmod``: pasted into a shell it
    changes that folder alone.
    """
    folder = home.path / ("x;touch pwned;'$(touch pwned)`touch pwned`\x1b[2J")
    (folder / "pre-dump").mkdir(parents=True)
    hook = folder / "pre-dump" / "look"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o777)
    operators.extra["CRIUCTL_HOOK_DIRS"] = str(folder)
    (listed,) = (one for one in operators("hooks", "list") if one["name"] == "look")
    hint = listed["hint"]
    assert hint.startswith("chmod go-w ") and hint.isprintable()
    ran = operators.keeper.spawn(
        ["bash", "-c", hint], env={"PATH": os.environ["PATH"]}, cwd=home.path
    )
    assert ran.wait(20) == 0
    assert (hook.stat().st_mode & 0o777, list(home.path.glob("pwned"))) == (0o755, [])
    shown(operators, "hooks", "list")


# Fields whose values are checked: of these the reader's refusal is what is shown.
_PATHS = {"database", "mount"}  # empty, or an absolute path
_CHECKED = {"id", "session_id", "digest", "handle", "mac", "inodes_mac", "created", "parent"}


def poisoned(value: Any, field: str = "") -> Any:
    """The record with every text in it made hostile."""
    if isinstance(value, msgspec.Struct):
        changed = {
            name: poisoned(getattr(value, name), name)
            for name in value.__struct_fields__
            if name not in _KEPT
        }
        return msgspec.structs.replace(value, **changed)
    if field in _PATHS:
        return f"/{HOSTILE}"
    if isinstance(value, str):
        return value + HOSTILE if field not in _CHECKED else value
    if isinstance(value, tuple):
        return tuple(poisoned(one, field) for one in value)
    if isinstance(value, dict):
        return {poisoned(k, "key"): poisoned(v, field) for k, v in value.items()}
    return value


_KEPT = {
    "session",
    "kind",
    "images",
    "image_data",
    "memory",
    "data",
    "features",
    "master",
    "policy",
    "xattrs",
}


def test_texts_that_the_writer_of_a_manifest_chooses(operators: Operators, home: Home) -> None:
    config = Config(
        store=str(operators.store),
        key_dir=str(home.path / "keys"),
        cache_dir=str(home.path / "cache"),
        state_dir=str(home.path),
    )
    with (
        open_store(config.store, config) as store,
        Repository.open(store, config, create_local=True) as repository,
    ):
        for _ in range(2):
            with repository.writer(Reporter()) as writer:
                manifest: Manifest = poisoned(kit.fill(writer, kit.SMALL))
                writer.commit(manifest)
    assert HOSTILE in operators("show", "web")["host"]
    for words in (
        ("list",),
        ("show", "web"),
        ("show", "web", "--files"),
        ("show", "web", "--connections"),
        ("show", "web", "--terminals"),
        ("show", "web", "--tree"),
        ("diff", "web@1", "web@2"),
        ("verify", "--all"),
        ("restore", "web"),
        ("restore", "web", "--dry-run"),
        ("restore", "web", "-v", "--as", "copy"),
        ("store", "info"),
        ("prune", "--keep-last", "1", "--dry-run"),
        ("export", "web", home.path / "exported"),
        ("show", home.path / "exported"),
        ("pin", "web"),
        ("rm", "web@1"),
    ):
        shown(operators, *words)


def test_an_object_s_name_in_a_store(operators: Operators, home: Home) -> None:
    """An attacker who can write to the folder can put files there under any name."""
    operators("store", "init")
    for folder in (operators.store, operators.store / "checkpoints", operators.store / "packs"):
        folder.mkdir(exist_ok=True)
        (folder / HOSTILE.replace("/", ".")).write_bytes(HOSTILE.encode())
    for words in (
        ("list",),
        ("verify", "--all"),
        ("gc",),
        ("store", "info"),
        ("doctor",),
        ("recover", "--all"),
    ):
        shown(operators, *words)


def test_the_search_finds_control_characters() -> None:
    for text in ("\x1b[2J", "a\rb", "\x9b1m", "\u202e", "x\nforged: line"):
        with pytest.raises(AssertionError):
            looked_through(text, "here")
    looked_through(shlex.quote("a b\n"), "here")
