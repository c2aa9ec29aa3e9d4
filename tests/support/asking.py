"""Sessions of a Python program that evaluates what is typed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .command import Home
from .keeper import Keeper, Launched, wait_until
from .operating import TIMEOUT, Operators

_PROGRAM = """
import hashlib, os, random, socket, sys
data = bytearray(random.Random(7).randbytes(int(sys.argv[1]) << 20))
kept = []
digest = lambda of: hashlib.blake2b(of, digest_size=8).hexdigest()  # the terminal is narrow
print("ready", flush=True)
for line in sys.stdin:
    number, _, text = line.partition(" ")
    print(f"={number}= {eval(text)}", flush=True)
"""


class Asked(Operators):
    """Sessions of that program."""

    def __init__(self, keeper: Keeper, home: Home) -> None:
        super().__init__(keeper, home)
        self._number = 0
        self.program = home.path / "program.py"
        self.program.write_text(_PROGRAM)

    def begin(self, name: str, *options: str, mib: int = 1) -> None:
        """Start it, with so many MiB of data."""
        self("run", "-d", "--name", name, *options, "--", sys.executable, self.program, mib)
        self("wait", name, "--match", "ready", "--timeout", TIMEOUT)

    def ask(self, name: str, text: str) -> str:
        """What the program of a session makes of an expression."""
        self._number += 1
        self("send", name, "--text", f"{self._number} {text}", "--enter")
        pattern = f"={self._number}= ([^\\r\\n]*)[\\r\\n]"
        self("wait", name, "--match", pattern, "--timeout", TIMEOUT)
        found = re.search(pattern, self.text("capture", name, "--scrollback") + "\n")
        assert found is not None
        return found.group(1).strip()

    def names(self) -> set[str]:
        """The names of the sessions that run."""
        return {one["session"] for one in self("ls") if one["state"] == "running"}

    def keepers(self) -> list[Path]:
        """The sockets of keepers."""
        folder = self.home.run / "templates"
        return list(folder.iterdir()) if folder.exists() else []

    def occupy(self, keeper: Keeper, pid: int) -> Launched:
        """A sleeping process with exactly this PID."""
        for _ in range(50):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            got = keeper.spawn(["sleep", "600"], env=self.environment(), cwd=self.home.path)
            if got.pid == pid:
                return got
            got.kill()
        raise AssertionError(f"could not get a process of PID {pid}")

    def hook(self, text: str) -> None:
        """Add a pre-restore hook with these cases of sessions."""
        hook = self.home.path / "hooks" / "pre-restore" / "10-hook"
        hook.parent.mkdir(parents=True)
        hook.write_text(f'#!/bin/sh\ncase "$CRIUCTL_HOOK_SESSION" in {text} esac\n')
        hook.chmod(0o700)


class Team:
    """A group of three such sessions: ``agent`` has connections to ``db`` and ``tool``."""

    NAMES = ("db", "agent", "tool")
    UNIX = "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"

    def __init__(self, asked: Asked, *options: str) -> None:
        self._asked = asked
        for name in self.NAMES:
            asked.begin(name, "--group", "team", *options)
        for number, server in enumerate(("db", "tool")):
            path = asked.home.path / server
            asked.ask(server, f"kept.append({self.UNIX}) or kept[0].bind('{path}')")
            asked.ask(server, "kept[0].listen()")
            asked.ask("agent", f"kept.append({self.UNIX}) or kept[{number}].connect('{path}')")
            asked.ask(server, "kept.insert(0, kept[0].accept()[0])")

    def talk(self, words: str, copy: str = "") -> None:
        """Have the agent (of a set of copies) send to both, and both answer in capitals."""
        ask = self._asked.ask
        for number, server in enumerate(("db", "tool")):
            ask(f"agent{copy}", f"kept[{number}].send(b'{words} {server}')")
            answer = "(got := kept[0].recv(99), kept[0].send(got.upper()))[0]"
            assert ask(f"{server}{copy}", answer) == str(f"{words} {server}".encode())
            got = ask(f"agent{copy}", f"kept[{number}].recv(99)")
            assert got == str(f"{words} {server}".upper().encode())

    def connect_again(self, copy: str = "") -> None:
        """Have the agent make a new connection to the path at which ``db`` waits."""
        ask, path = self._asked.ask, self._asked.home.path / "db"
        ask(f"agent{copy}", f"(new := {self.UNIX}).connect('{path}') or kept.append(new)")
        ask(f"agent{copy}", f"kept[-1].send(b'new of agent{copy}')")
        got = ask(f"db{copy}", "kept.append(kept[1].accept()[0]) or kept[-1].recv(99)")
        assert got == f"b'new of agent{copy}'"

    def groups(self) -> dict[str, set[str]]:
        """The sessions that run, by their groups."""
        found: dict[str, set[str]] = {}
        for one in self._asked("ls"):
            if one["state"] == "running":
                found.setdefault(one["labels"].get("group", ""), set()).add(one["session"])
        return found

    @classmethod
    def copies(cls, number: int) -> set[str]:
        """The sessions of one set."""
        return {f"{name}-{number}" for name in cls.NAMES}


@pytest.fixture
def asked(keeper: Keeper, home: Home) -> Iterator[Asked]:
    """Such sessions, with a store; no keeper of a template is left of them."""
    sessions = Asked(keeper, home)
    sessions("store", "init")
    yield sessions
    sessions.close()
    wait_until(lambda: not sessions.keepers(), TIMEOUT, "no keeper is left")
