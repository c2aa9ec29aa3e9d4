"""Sessions that are checkpointed and restored while a client is attached to them, and what the
client sees.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.operating import TIMEOUT, Operators, ended

pytestmark = pytest.mark.integration


def test_an_attached_client_is_informed_and_follows(operators: Operators) -> None:
    operators.shell("work")
    operators("exec", "work", "--", "kept=yes")
    window = operators.window("attach", "work")
    window.expect(rb"\$")
    window.send(b"echo be''fore; half-ty")
    window.expect(rb"half-ty")
    dumped = operators("dump", "work")
    window.expect(rb"work is checkpointed \(" + dumped["checkpoint"][:12].encode())
    status = operators("status", "work")
    assert (status["state"], status["pid"], status["checkpoint"]["id"]) == (
        "checkpointed",
        None,
        dumped["checkpoint"],
    )
    assert operators("exec", "work", "--take", "--", "true", check=False)["exit_code"] == 9
    assert operators("run", "-d", "--name", "work", "--", "true", check=False)["exit_code"] == 9
    restored = operators("restore", "work")
    window.expect(rb"work: restored, incarnation 2, from")
    window.send(b"\x15echo $kept | tr a-z A-Z\r")
    window.expect(rb"YES\r\n")
    status = operators("status", "work")
    assert (status["state"], status["pid"], status["incarnation"]) == (
        "running",
        restored["pid"],
        2,
    )
    late = operators.window("attach", "work", "--read-only")
    late.expect(rb"restored, incarnation 2")
    recording = [
        json.loads(line) for line in operators.text("log", "work", "--export", "cast").splitlines()
    ][1:]
    marks = [data for _, code, data in recording if code == "m"]
    assert re.match(f"checkpointed {dumped['checkpoint'][:12]}", marks[0]) and marks[1].startswith(
        "restored"
    )
    window.send(b"exit 8\r")
    assert ended(window) == 8


def test_restoring_attached(operators: Operators) -> None:
    operators.shell("work")
    operators("exec", "work", "--", "kept=yes")
    operators("dump", "work")
    window = operators.window("restore", "work", "--attach")
    window.expect(rb"work: restored as PID")
    window.expect(rb"\$")
    window.send(b"echo $kept | tr a-z A-Z\r")
    window.expect(rb"YES\r\n")
    window.send(b"\x1d")
    window.expect(rb"detached from work")
    assert ended(window) == 0
    assert operators("status", "work")["state"] == "running"
    operators("dump", "work")
    waiting = operators.start("restore", "work", "--attach")
    operators("wait", "work", "--prompt", "--timeout", 30)
    operators("send", "work", "--text", "exit 5", "--enter")
    assert waiting.process.wait(30) == 5


def test_terminals_inside_of_sessions_that_are_restored_at_once(operators: Operators) -> None:
    """Each restore chooses numbers that are free; meanwhile no other one, and no new session, takes
    them.
    """
    names = [f"one{number}" for number in range(6)]
    for name in names:
        operators(
            "run",
            "-d",
            "--name",
            name,
            "--",
            "script",
            "-q",
            "-c",
            "bash --norc --noprofile",
            "/dev/null",
        )
    for name in names:
        operators("wait", name, "--match", "[#$]", "--since", 0, "--timeout", TIMEOUT)
    for name in names:
        operators("dump", name)
    with ThreadPoolExecutor(len(names) + 2) as pool:
        restores = [pool.submit(operators, "restore", name) for name in names]
        starts = [pool.submit(operators, "run", "-d", "--", "cat") for _ in range(2)]
        for future in restores + starts:
            future.result()
    for name in names:
        sent = operators("send", name, "--text", "echo li$((1))ves", "--enter")
        operators(
            "wait", name, "--match", "li1ves", "--since", sent["offset"], "--timeout", TIMEOUT
        )
