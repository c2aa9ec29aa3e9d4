"""Another user of the host: what criuctl listens on, and what it writes, is not for that user."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl, Home
from support.hooking import HookFolder
from support.keeper import Keeper, wait_until
from support.neighbour import NEIGHBOUR, as_neighbour
from support.operating import Operators
from support.zoo import Zoo

from criuctl.config import Config
from criuctl.ops.moving import rendezvous
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration

CANARY = "canary-9e1d-memory"


def opened_up(*folders: Path) -> None:
    """As if the folders above had been made too open, or an operator had opened them."""
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


def test_a_session_answers_only_its_user_and_root(operators: Operators, home: Home) -> None:
    """Though the socket and the folders above it were open to everybody."""
    operators("run", "-d", "--name", "work", "--", "sleep", "1000")
    (path,) = home.run.rglob("socket")
    assert path.stat().st_mode & 0o777 == 0o600
    opened_up(home.run)
    config = Config(run_dir=str(home.run), state_dir=str(home.path / "state"))
    assert "Forbidden" in as_neighbour(lambda: Session.connect("work", config=config, kind="human"))
    path.chmod(0o666)
    assert "SessionGone" in as_neighbour(
        lambda: Session.connect("work", config=config, kind="human")
    )

    def raw() -> bytes:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(str(path))
        sock.sendall(b"criuctl-session 1 1 x/1\n")
        return sock.recv(100)

    assert as_neighbour(raw).startswith(("returned b''", "BrokenPipeError", "ConnectionResetError"))
    assert operators("status", "work")["state"] == "running"


def test_a_migration_takes_its_word_from_nobody_else(home: Home) -> None:
    """Abstract sockets have no mode: any user can call, and can listen in the place of another."""
    (home.path / "state").mkdir()
    config = Config(state_dir=str(home.path / "state"))
    home.path.chmod(0o755)
    words: list[str] = []
    with rendezvous.listening(config, "a" * 32, lambda word: words.append(word) or {}):  # type: ignore[func-returns-value]
        assert "NotFound" in as_neighbour(lambda: rendezvous.tell(config, "a" * 32, "go"))
        assert words == []
        assert rendezvous.tell(config, "a" * 32, "go") == {}
    assert words == ["go"]


def test_nobody_else_can_answer_for_a_migration(home: Home) -> None:
    """A neighbour who listens there first is not believed, and does not receive the word."""
    (home.path / "state").mkdir()
    config = Config(state_dir=str(home.path / "state"))
    name = rendezvous._address(config, "b" * 32)
    program = (
        "import os, socket, sys\nos.setresuid(65534, 65534, 65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); "
        "s.listen()\nprint('ready', flush=True)\n"
        "c, _ = s.accept(); print(repr(c.recv(100)), flush=True)"
    )
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.execv(sys.executable, [sys.executable, "-IS", "-c", program, name[1:]])
    os.close(writing)
    with open(reading) as said:
        assert said.readline() == "ready\n"
        with pytest.raises(Exception, match="another user listens"):
            rendezvous.tell(config, "b" * 32, "go")
        assert said.readline() == "b''\n"
    os.waitpid(pid, 0)


def test_what_is_written_is_for_root_alone(operators: Operators, home: Home) -> None:
    """Keys, packs, manifests, logs, events, output: another user reads none of it, though the
    folders above are open.
    """
    operators("store", "init", "--encrypt")
    operators("run", "-d", "--name", "work", "--", "sh", "-c", f"echo {CANARY}; exec sleep 1000")
    operators("dump", "work")
    operators("restore", "work")
    operators("restore", "nobody", check=False)
    places = [
        place
        for name in ("state", "cache", "keys", "store")
        if (place := home.path / name).is_dir()
    ]
    assert {place.name for place in places} >= {"state", "keys", "store"}
    for place in places:
        assert place.stat().st_mode & 0o077 == 0, place
    home.path.chmod(0o755)
    for place in (*places, home.run):
        place.chmod(0o755)
    # a restored tree, of any user, reads about itself here; SECURITY.md says so
    public = home.run / "inside"
    files = [path for place in (*places, home.run) for path in place.rglob("*") if path.is_file()]
    found = [str(path) for path in files if public not in path.parents]
    assert len(found) > 10

    def readable() -> list[str]:
        return [path for path in found if os.access(path, os.R_OK)]

    assert as_neighbour(readable) == "returned []"


def test_a_hook_that_others_could_have_written_does_not_run(
    criuctl: Criuctl, zoo: Zoo, home: Home
) -> None:
    """Root runs hooks: one that another user owns, could change, or leads elsewhere is refused, and
    vetoes the dump.
    """
    hooks = HookFolder(home.path / "hooks")
    theirs = home.path / "theirs"
    theirs.write_text(f"#!/bin/sh\ntouch {home.path}/pwned\n")
    theirs.chmod(0o755)
    os.chown(theirs, NEIGHBOUR, NEIGHBOUR)
    animal = zoo.launch("counter.py")

    def owned() -> None:
        os.chown(hooks.sh("pre-dump", "look", f"touch {home.path}/pwned"), NEIGHBOUR, NEIGHBOUR)

    def writable() -> None:
        hooks.sh("pre-dump", "look", f"touch {home.path}/pwned").chmod(0o777)

    def linked() -> None:
        (hooks.path / "pre-dump").mkdir(exist_ok=True)
        (hooks.path / "pre-dump" / "look").symlink_to(theirs)

    def in_a_folder_of_theirs() -> None:
        hooks.sh("pre-dump", "look", f"touch {home.path}/pwned")
        os.chown(hooks.path / "pre-dump", NEIGHBOUR, NEIGHBOUR)

    for spoil in (owned, writable, linked, in_a_folder_of_theirs):
        spoil()
        answer = criuctl("dump", animal.pid, "--leave-running", check=False)
        assert (answer["exit_code"], (home.path / "pwned").exists()) == (10, False), spoil
        (hooks.path / "pre-dump" / "look").unlink()
    os.chown(hooks.path / "pre-dump", 0, 0)
    assert criuctl("dump", animal.pid, "--leave-running", check=False)["exit_code"] == 0


# -- the page
# ------------------------------------------------------------------------------------------


@pytest.fixture
def page(operators: Operators) -> Iterator[tuple[str, str]]:
    """The address and token of a `criuctl ui` that runs."""
    command = operators.start("ui", "--listen", "127.0.0.1:0", json_output=False)
    wait_until(lambda: "#token=" in command.out.read_text(), 60, "the page is served")
    match = re.search(r"(http://\S+/)#token=(\S+)", command.out.read_text())
    assert match
    yield match[1], match[2]
    command.process.kill(15)
    command.process.wait(60)


def asked(url: str, body: Any = None, **headers: str) -> int:
    data = None if body is None else json.dumps(body).encode()
    wanted = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **wanted})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


def test_the_page_tells_and_does_nothing_without_its_token(
    page: tuple[str, str], operators: Operators
) -> None:
    """Any user of the host reaches the port; only who was shown the address has the token."""
    url, token = page
    bearer = f"Bearer {token}"
    operators("run", "-d", "--name", "shell", "--", "sleep", "1000")
    kill = {"action": "pause", "session": "shell"}
    for path in ("about", "sessions/shell/tree", "newest", "live", "sessions/shell/terminal"):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {token}"},
            {"Cookie": f"token={token}"},
        ):
            assert asked(f"{url}api/{path}", **headers) == 401, (path, headers)
    assert asked(f"{url}api/actions", kill) == 401
    assert asked(f"{url}api/about?token={token}") == 401
    # A page of another site, in the browser of a user who has the token; and one under a name that
    # leads here by DNS.
    assert (
        asked(f"{url}api/actions", kill, Authorization=bearer, Origin="https://evil.example") == 403
    )
    assert asked(f"{url}api/about", Authorization=bearer, Origin="null") == 403
    assert asked(f"{url}api/about", Authorization=bearer, Host="evil.example") == 403
    assert asked(f"{url}api/about", Authorization=bearer) == 200
    assert operators("status", "shell")["state"] == "running"


def test_the_token_is_in_no_argument_or_environment(page: tuple[str, str]) -> None:
    """What other users see of a process is its command line."""
    _url, token = page
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                assert token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue  # it has ended
