"""Steps of real programs in real sessions: over the socket that a tree sees, and over the
protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import PROJECT
from support.holding import TIMEOUT, Holders, until
from support.keeper import wait_until

from criuctl.errors import Conflict, NotFound, WrongState
from criuctl.ops.new_session import SPAWNER
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration

PROGRAM = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from criuctl import inside
def say(*words): print(*words, flush=True)
"""


def start(holders: Holders, program: str, name: str = "s") -> Session:
    """A session that runs a Python program."""
    options = {"run_dir": holders.config.run_dir, "host_pids": True}
    argv = (sys.executable, "-u", "-c", PROGRAM + program)
    holders.start(*argv, name=name, spawner=SPAWNER, options=options)
    return holders.connect(name)


def said(client: Session, text: bytes) -> bytes:
    """The output up to `text`."""
    client.attach("start")
    return until(client, lambda data: text in data)[1]


def test_a_program_s_steps(holders: Holders) -> None:
    client = start(
        holders,
        """
with inside.step("charge") as s:
    say("first", s.done, s.key, s.attempts)
    s.result = {"paid": 42}
with inside.step("charge") as s:
    say("second", s.done, s.result)
try:
    with inside.step("fails", kind="safe"):
        raise ValueError("no")
except ValueError:
    pass
try:
    with inside.step("unclear"):
        raise TimeoutError("late")
except TimeoutError:
    pass
try:
    with inside.step("unclear"):
        say("never")
except inside.StepUnknown as error:
    say("unknown", error.details["key"])
with inside.step("unclear", verify=lambda key: "found") as s:
    say("verified", s.done, s.result)
with inside.step("job", kind="resumable", cursor=0) as s:
    s.mark_progress(0.5, cursor=[1, 2])
    say("cursor", inside.progress("job").cursor)
inside.mark_progress("import", 0.4, cursor=1200)
say(inside.progress("import"), inside.progress("other").cursor)
say("ready")
sys.stdin.read()
""",
    )
    lines = said(client, b"ready").decode().splitlines()
    key = lines[0].split()[2]
    assert len(key) == 32
    assert lines[0].startswith("first False ") and lines[0].endswith(" 1")
    assert lines[1] == "second True {'paid': 42}"
    assert lines[2].startswith("unknown ") and lines[3] == "verified True found"
    assert lines[4] == "cursor [1, 2]"
    assert lines[5] == "Progress(fraction=0.4, cursor=1200, state='began') None"
    known = {one["id"]: one for one in client.request("step-list")["steps"]}
    assert {name: one["state"] for name, one in known.items()} == {
        "charge": "done", "fails": "failed", "unclear": "done", "job": "done", "import": "began",
    }  # fmt: skip
    assert known["charge"]["key"] == key and known["fails"]["error"] == "ValueError: no"
    counts = {"running": 1, "done": 3, "unknown": 0, "failed": 1, "waiting": 0}
    assert client.status()["steps"] == counts
    how = [e["how"] for e in client.audit() if e["what"] == "step" and e["id"] == "unclear"]
    assert how == ["began", "failed", "verified"]


def test_a_killed_program_s_step_is_resolved_by_an_operator(holders: Holders) -> None:
    client = start(
        holders,
        """
import os, time
if os.fork() == 0:
    with inside.step("charge") as s:
        say("begun", os.getpid())
        time.sleep(1000)
time.sleep(1000)
""",
    )
    pid = int(said(client, b"\r\n").split()[1])
    with pytest.raises(Conflict):
        client.request("step-begin", step="charge", attempt="mine", kind="once", again=True)
    with pytest.raises(Conflict):
        client.request("step-resolve", step="charge", outcome="done")
    os.kill(pid, 9)
    wait_until(lambda: client.status()["steps"]["unknown"], TIMEOUT, "the loss was noticed")
    answer = client.request("step-begin", step="charge", attempt="mine", kind="once")
    assert (answer["state"], answer["run"]) == ("unknown", False)
    found = client.request("step-resolve", step="charge", outcome="done", result=7)["step"]
    assert (found["state"], found["result"]) == ("done", 7)
    with pytest.raises(WrongState):
        client.request("step-resolve", step="charge", outcome="failed")
    with pytest.raises(NotFound):
        client.request("step-show", step="other")


def test_steps_go_on_over_a_re_exec(holders: Holders) -> None:
    client = start(
        holders,
        """
import time
for number in range(100000):
    with inside.step(f"n{number}") as s:
        assert not s.done
    say(number)
    time.sleep(0.005)
""",
    )
    client.attach("start")
    for _ in range(3):
        before = client.status()["steps"]["done"]
        client.request("reexec", timeout=TIMEOUT)
        wait_until(
            lambda before=before: client.status()["steps"]["done"] > before + 5,
            TIMEOUT,
            "steps went on",
        )
    assert client.status()["state"] == "running"


def test_no_connection_is_open_while_a_checkpoint_is_made(holders: Holders) -> None:
    client = start(
        holders,
        """
import os, time
say("ready")
number = 0
while True:
    with inside.step(f"n{number}", kind="safe"):
        number += 1
""",
    )
    said(client, b"ready")
    dumping = holders.connect(operator="dumping")
    for _ in range(20):
        assert dumping.request("step-quiet", seconds=5)["in_flight"] is not None
        dumping.request("checkpoint-prepare")
        pid = client.status()["pid"]
        with open("/proc/net/unix") as file:
            ends = f"{holders.config.run_dir}/holders/s/inside/steps"
            open_here = [line for line in file if line.rstrip().endswith(ends)]
        assert not open_here, "neither listening nor connected"
        dumping.request("checkpoint-abort")
        before = client.status()["steps"]["done"]
        wait_until(
            lambda before=before: client.status()["steps"]["done"] > before,
            TIMEOUT,
            "steps went on",
        )
        assert pid


def test_another_language_needs_a_socket_and_json(holders: Holders) -> None:
    client = start(
        holders,
        """
import json, os, socket
def ask(**message):
    sock = socket.socket(socket.AF_UNIX)
    os.chdir(os.environ["CRIUCTL_SESSION_DIR"])
    sock.connect("steps")
    sock.sendall(json.dumps(message).encode() + b"\\n")
    return json.loads(sock.makefile().readline())
say(json.dumps(ask(op="step-begin", step="x", attempt="a", kind="once")))
say(json.dumps(ask(op="step-done", step="x", attempt="a", result=[1])))
say(json.dumps(ask(op="step-list")), "ready")
sys.stdin.read()
""",
    )
    begun, done, refused = said(client, b"ready").decode().splitlines()[:3]
    answer: dict[str, Any] = json.loads(begun)
    assert answer["ok"] and answer["run"] and answer["state"] == "began"
    assert json.loads(done)["result"] == [1]
    assert json.loads(refused.removesuffix(" ready"))["error"]["code"] == "unknown-operation"


def test_only_the_tree_reaches_the_socket(
    holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start(holders, "say('ready'); sys.stdin.read()")
    said(client, b"ready")
    (path,) = Path(holders.config.run_dir).rglob("inside/steps")
    monkeypatch.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
        sock.connect("steps")
        sock.sendall(b'{"op": "step-begin", "step": "x", "attempt": "a"}\n')
        sock.settimeout(10)
        assert sock.recv(100) == b""
    assert client.request("step-list")["steps"] == []
