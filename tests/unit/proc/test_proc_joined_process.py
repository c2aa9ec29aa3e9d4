"""A program that is started as the child of another process, with files for what it prints."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl.proc import commandchild, joined_process
from criuctl.proc.tree import children

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="only known for x86-64")
ENV = {"PATH": os.environ["PATH"], "MARK": "here"}


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["tini", "-s", "--", "sleep", "1000"], stdin=subprocess.DEVNULL)
    while not children(child.pid):
        time.sleep(0.01)
    yield child
    child.terminate()
    child.wait()


def started(parent: int, words: list[str], stdin: bytes = b"", **order: Any) -> dict[str, Any]:
    """What the program answers; `files` are the command's."""
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("in")
    os.write(memory, stdin)
    program = [sys.executable, "-I", "-S", joined_process.__file__, str(theirs.fileno())]
    helper = subprocess.Popen([*program, str(parent)], pass_fds=[theirs.fileno()])
    theirs.close()
    child = [sys.executable, "-I", "-S", "-E", commandchild.__file__, "name", "/", "", "-"]
    body = {"argv": [*child, *words], "env": ENV, "files": [1, 2, 3], **order}
    socket.send_fds(ours, [json.dumps(body).encode()], [memory])
    ours.shutdown(socket.SHUT_WR)
    data, fds, _, _ = socket.recv_fds(ours, 1 << 16, 4)
    assert helper.wait() == (0 if fds else 1)
    ours.close()
    os.close(memory)
    return {**json.loads(data), "files": fds}


def printed(fd: int) -> bytes:
    return os.pread(fd, 1 << 16, 0)


def code(answer: dict[str, Any]) -> int:
    deadline = time.monotonic() + 30
    while not printed(answer["files"][2]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(printed(answer["files"][2]))


def test_a_command_below_an_init(init: subprocess.Popen[bytes]) -> None:
    script = "cat; echo $MARK; pwd; echo bad >&2; grep SigBlk /proc/self/status; sleep 0.3; exit 7"
    answer = started(init.pid, [script], b"some input\n")
    assert answer["pid"] in children(init.pid)
    assert code(answer) == 7
    out = printed(answer["files"][0])
    assert out == b"some input\nhere\n/\nSigBlk:\t0000000000000000\n"
    assert printed(answer["files"][1]) == b"bad\n"
    words = started(init.pid, ["printf", "%s|", "a b", "é"])
    assert code(words) == 0 and printed(words["files"][0]) == "a b|é|".encode()
    assert code(started(init.pid, ["kill -KILL $$"])) == 137
    assert Path(f"/proc/{init.pid}/status").read_text().count("TracerPid:\t0") == 1


def test_a_program_that_cannot_begin(init: subprocess.Popen[bytes]) -> None:
    before = children(init.pid)
    answer = started(init.pid, [], argv=["/no/such/program"])
    assert "No such file" in answer["error"]
    gone = started(1 << 22, ["true"])
    assert gone["error"]
    deadline = time.monotonic() + 30
    while children(init.pid) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children(init.pid) == before
