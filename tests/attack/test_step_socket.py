"""The socket of a session's steps: who reaches it, and what a hostile peer gains there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import PROJECT, Home
from support.holding import TIMEOUT, Holders, until
from support.keeper import wait_until
from support.neighbour import NEIGHBOUR, as_neighbour

from criuctl.ops.new_session import SPAWNER
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration

SMALL = b'{"op": "step-begin", "step": "x", "attempt": "a"}\n'

# Talks to the socket from inside of the tree; each line of input is a Python expression.
INSIDE = f"""
import json, os, socket, sys, time
sys.path.insert(0, {str(PROJECT)!r})
from criuctl import inside
os.chdir(os.environ["CRIUCTL_SESSION_DIR"])
def opened():
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect("steps")
    return sock
def ask(data):
    with opened() as sock:
        try:
            sock.sendall(data)
            return sock.makefile("rb").readline()
        except OSError as error:
            return type(error).__name__
def begin_with_cursor(value):
    message = {{"op": "step-begin", "step": "big", "attempt": "a", "cursor": value}}
    return json.dumps(message).encode() + b"\\n"
def begin(name):
    with inside.step(name) as s:
        return s.key
def as_other(do, uid={NEIGHBOUR}):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            text = repr(do())
        except Exception as error:
            text = f"{{type(error).__name__}}: {{error}}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    return open(reading).read()
held = []
print("ready", flush=True)
for line in sys.stdin:
    print("=>", eval(line), flush=True)
"""


@pytest.fixture
def holders(home: Home) -> Iterator[Holders]:
    made = Holders(home)
    yield made
    made.close()


class Inside:
    """A program in a session that evaluates each line of its input."""

    def __init__(self, holders: Holders, home: Home) -> None:
        home.run.chmod(0o755)
        options = {"run_dir": holders.config.run_dir, "host_pids": True}
        argv = (sys.executable, "-u", "-c", INSIDE)
        holders.start(*argv, spawner=SPAWNER, options=options)
        self.client: Session = holders.connect()
        (self.path,) = Path(holders.config.run_dir).rglob("inside/steps")
        for folder in (home.path, home.run, *self.path.parents):
            if folder.is_relative_to(home.run):
                folder.chmod(0o755)
        self.client.attach("start")
        until(self.client, lambda data: b"ready" in data)

    def __call__(self, expression: str) -> str:
        """What the expression is, inside."""
        self.client.send(expression + "\n")
        output = until(self.client, lambda data: b"=> " in data and data.endswith(b"\n"))[1]
        return output.partition(b"=> ")[2].decode().strip()


@pytest.fixture
def inside(holders: Holders, home: Home) -> Inside:
    return Inside(holders, home)


def raw(path: Path, data: bytes) -> bytes:
    """What the socket answers to this process."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT)
        folder = os.open(path.parent, os.O_PATH)
        try:
            sock.connect(f"/proc/self/fd/{folder}/steps")
            sock.sendall(data)
            return sock.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        finally:
            os.close(folder)


def line(message: dict[str, Any]) -> bytes:
    """A request."""
    return json.dumps(message).encode() + b"\n"


def steps(inside: Inside) -> dict[str, Any]:
    found = inside.client.request("step-list")["steps"]
    return {one["id"]: one for one in found}


def test_a_process_outside_the_tree(inside: Inside) -> None:
    """Though it is root, and the socket takes every user."""
    assert inside.path.stat().st_mode & 0o777 == 0o666
    assert raw(inside.path, SMALL) == b""
    assert steps(inside) == {}
    assert "ok" in inside(f"ask({SMALL!r})")


def test_another_user_s_process(inside: Inside) -> None:
    assert as_neighbour(lambda: raw(inside.path, SMALL)) == "returned b''"
    assert steps(inside) == {}


def test_another_user_s_process_in_the_tree(inside: Inside) -> None:
    """It may have steps of its own, and learns and changes nothing of another user's."""
    key = inside("begin('mine')")
    assert key.strip("'") == steps(inside)["mine"]["key"]
    refused = inside("as_other(lambda: begin('mine'))")
    assert "belongs to the user" in refused and key not in refused
    for op, more in (("done", {"result": 1}), ("show", {}), ("progress", {"fraction": 0.5})):
        message = {"op": f"step-{op}", "step": "mine", "attempt": "a", **more}
        answer = inside(f"as_other(lambda: ask({line(message)!r}))")
        assert "forbidden" in answer
    inside("as_other(lambda: begin('theirs'))")
    assert "belongs to the user" in inside("as_other(lambda: begin('theirs'), 0 + 4)")
    assert (steps(inside)["theirs"]["uid"], steps(inside)["mine"]["uid"]) == (NEIGHBOUR, 0)


def test_no_operator_s_operation(inside: Inside) -> None:
    """Not those of the other socket, and none of those on steps that are an operator's."""
    names = ("hello", "kill", "input", "spawn", "adopt", "step-resolve", "step-merge", "step-list")
    for name in (*names, "step-replicate", "step-quiet", "step-replica-stop", "nonsense"):
        message = {"op": name, "id": 1, "kind": "human", "name": "x", "role": "admin", "step": "x"}
        assert "unknown-operation" in inside(f"ask({line(message)!r})")
    preface = b"criuctl-session 1 1 x/1\n"
    assert "protocol" in inside(f"ask({preface!r})")


def test_large_requests(inside: Inside) -> None:
    assert "at most 98304" in inside("ask(b'x' * 200000)")
    assert "protocol" in inside("ask(b'[' * 90000 + b'\\n')")
    assert "protocol" in inside("ask(b'9' * 90000 + b'\\n')")
    for value in ('"x" * 65535', '"\\u1234" * 12000', "[0] * 40000"):
        answer = inside(f"ask(begin_with_cursor({value}))")
        assert "at most 4096" in answer or "at most 98304" in answer, answer
    long = line({"op": "step-begin", "step": "x" * 201, "attempt": "a"})
    assert "bad-request" in inside(f"ask({long!r})")
    assert inside.client.status()["state"] == "running" and steps(inside) == {}


def test_another_user_asks_for_a_checkpoint(inside: Inside) -> None:
    """It has none made, keeps none from being made, makes none stale, and has root run nothing."""
    for call in (
        "inside.checkpoint()",
        "inside.invalidate_if(age='7d')",
        "inside.invalidate_if(output='true')",
        "inside._answer({'op': 'callbacks', 'events': ['before-checkpoint']})",
    ):
        answer = inside(f"as_other(lambda: {call})")
        assert "StepError: only the user of this session may ask for that" in answer
    assert inside.client.request("inside")["conditions"] == []
    called = inside.client.request("callbacks-call", event="before-checkpoint", seconds=60)
    assert (called["called"], called["vetoes"], called["failures"]) == (0, [], [])


def test_slow_peers(inside: Inside, holders: Holders) -> None:
    """Connections that say nothing, half a request, or take no answer."""
    flood = "as_other(lambda: [held.append(opened()) for _ in range(200)] and begin('late'))"
    inside.client.send(flood + "\n")
    time.sleep(0.3)
    other = holders.connect(operator="other")
    began = time.monotonic()
    assert other.status()["state"] == "running"
    assert time.monotonic() - began < 2, "the holder serves operators"
    until(inside.client, lambda data: b"=> " in data and data.endswith(b"\n"))
    inside("[held.append(opened()) for _ in range(3)] and held[0].send(b'{\"op\"')")
    assert "ok" in inside(f"ask({SMALL!r})")
    status = Path(f"/proc/{other.status()['holder_pid']}/fd")
    wait_until(
        lambda: sum("socket" in os.readlink(fd) for fd in existing(status)) < 10,
        TIMEOUT,
        "connections that say nothing were closed",
    )


def existing(folder: Path) -> list[Path]:
    """The descriptors that are there now."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            os.readlink(path)
            found.append(path)
    return found
