"""The warm process behind the API: interrupted, killed, and left without its program."""

from __future__ import annotations

import os
import signal

import pytest
from support import oracle
from support.api import Shell, program
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.pauses import paused_program

from criuctl import Session
from criuctl.sdk import worker

pytestmark = pytest.mark.integration

SNAPSHOT = """
from criuctl import Session
from criuctl.errors import CriuctlError

s = Session.connect("work", kind="agent")
try:
    print(s.snapshot().number)
except KeyboardInterrupt:
    print("interrupted")
except CriuctlError as error:
    print(type(error).__name__)
print(s.exec("echo $x").output, end="")
"""
# What an operation imports in its own process.
IMPORTED = """
import json, sys
from criuctl.config import load
from criuctl.proc import forked
from criuctl.report import Reporter
from criuctl.sdk import worker_process

worker_process.load()
config = load()


def imported(operation, *arguments):
    def work():
        before = set(sys.modules)
        operation(config, Reporter(), *arguments)
        return {"new": sorted(set(sys.modules) - before)}

    [ended] = forked.run_all([("", work)], at_once=1)
    return ended.answer["new"] if ended.answer else ended.bug


options = {"env": {}, "size": [24, 80], "name": "started"}
found = {
    "run": imported(worker_process.run, ["bash"], options),
    "snapshot": imported(worker_process.dump, "work", {"leave_running": True}),
    "dump": imported(worker_process.dump, "work", {}),
    "restore": imported(worker_process.restore, "work", {}),
    "copy": imported(worker_process.restore, "work", {"new_name": "copy"}),
}
print(json.dumps(found))
"""


@pytest.fixture
def work(shell: Shell) -> Session:
    """A session `work`, with a variable."""
    session = shell("work")
    session.exec("x=42")
    return session


@pytest.mark.parametrize("step", ["frozen", "store"])
def test_an_interrupt_is_a_clean_up(operators: Operators, work: Session, step: str) -> None:
    """The program gets its KeyboardInterrupt when the session runs on."""
    with paused_program(operators, step, lambda env: program(operators, SNAPSHOT, env)) as held:
        held.kill(signal.SIGINT)
        held.command.process.wait(TIMEOUT)
    assert held.command.out.read_text() == "interrupted\n42\n", held.command.output()
    assert work.checkpoints() == []
    assert work.snapshot().number == 1
    held.wait_settled()


def test_a_program_that_is_killed_undoes_its_operations(
    operators: Operators, work: Session
) -> None:
    with paused_program(operators, "frozen", lambda env: program(operators, SNAPSHOT, env)) as held:
        held.kill()
        held.wait_settled()
    assert work.exec("echo $x").output == "42\n"
    assert work.checkpoints() == []
    assert work.snapshot().number == 1


def test_a_worker_that_is_killed(operators: Operators, work: Session) -> None:
    """Its operations are undone, and reported as failed; the next one starts another worker."""
    with paused_program(operators, "frozen", lambda env: program(operators, SNAPSHOT, env)) as held:
        [server] = [
            pid
            for pid, _ in held.descendants
            if oracle.read(f"/proc/{pid}/status").count(f"PPid:\t{held.command.process.pid}\n")
        ]
        os.kill(server, signal.SIGKILL)
        held.command.process.wait(TIMEOUT)
        held.wait_settled()
    assert held.command.out.read_text() == "CommandFailed\n42\n", held.command.output()
    used = worker._worker
    assert used is not None
    os.kill(used._child.pid, signal.SIGKILL)
    wait_until(lambda: used._child.poll() is not None, TIMEOUT, "the worker has ended")
    assert work.snapshot().number == 1
    assert work.checkpoints()[0].number == 1


def test_an_operation_imports_nothing(operators: Operators, work: Session) -> None:
    """So a snapshot costs no start of an interpreter, nor the loading of a module."""
    command = program(operators, IMPORTED)
    assert command.process.wait(4 * TIMEOUT) == 0, command.output()
    assert command.json() == {
        operation: [] for operation in ("run", "snapshot", "dump", "restore", "copy")
    }
