"""criuctl is killed in the middle of a session's dump or restore: the session runs, or is in its
checkpoint, and says which.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from support import oracle
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.pauses import Paused, paused, steps_of

from criuctl.proc.tree import ProcessIdentity

pytestmark = [pytest.mark.integration, pytest.mark.crash]

# Does harm when CRIU is about to let go of the tree: before (or after) the word to the holder, to
# itself or to the tree's root.
HARM = """
import os, signal, sys, time
from criuctl.cli.main import program
from criuctl.restore.restoring import Restoring
last, (when, victim, number) = Restoring._release, sys.argv[1:4]

def harm(self):
    pid = os.getpid() if victim == "criuctl" else self.placed.root.pid
    os.kill(pid, int(number))
    while victim == "root" and self.placed.root.alive():
        time.sleep(0.01)

def about_to_run(self):
    if when == "before":
        harm(self)
    tracer = last(self)
    if when == "after":
        harm(self)
    return tracer

Restoring._release = about_to_run
sys.argv[1:] = sys.argv[7:]
program()
"""
TICKS = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done"


def _goes_on(operators: Operators) -> None:
    offset = operators("capture", "work")["offset"]
    operators("wait", "work", "--since", offset, "--match", "tick", "--timeout", TIMEOUT)


def _kill_criu(*parents: int) -> None:
    """It is criuctl's child, or the holder's."""
    found = [
        pid
        for parent in parents
        for pid in oracle.tree(parent)
        if "criu: restore" in oracle.read(f"/proc/{pid}/cmdline")
    ]
    assert found
    for pid in reversed(found):
        os.kill(pid, signal.SIGKILL)


def _settled(operators: Operators, held: Paused) -> str:
    """Kill criuctl; the state that the session has when all that it had started is over."""
    held.kill()
    held.command.process.wait(TIMEOUT)
    held.go_on()

    def state() -> str:
        status = operators("status", "work")
        return (
            ""
            if status["checkpointing"] or any(o["kind"] == "service" for o in status["operators"])
            else str(status["state"])
        )

    return str(wait_until(state, TIMEOUT, "no dump and no restore is under way"))


def test_kill_9_at_every_step(operators: Operators) -> None:
    """Of a dump and of a restore: the session runs on, or it is checkpointed and comes back, and
    its status says which.
    """
    operators("run", "-d", "--name", "work", "--", "sh", "-c", TICKS)
    operators("wait", "work", "--since", "0", "--match", "tick 3", "--timeout", TIMEOUT)
    steps = {verb: steps_of(operators, verb, "work") for verb in ("dump", "restore")}
    fates: dict[str, list[str]] = {"dump": [], "restore": []}
    for step in steps["dump"]:
        with paused(operators, step, "dump", "work") as held:
            fates["dump"].append(_settled(operators, held))
        if fates["dump"][-1] == "checkpointed":
            operators("restore", "work")
        _goes_on(operators)
    operators("dump", "work")
    for step in steps["restore"]:
        with paused(operators, step, "restore", "work") as held:
            fates["restore"].append(_settled(operators, held))
        if fates["restore"][-1] == "checkpointed":
            operators("restore", "work")
        _goes_on(operators)
        operators("dump", "work")
    assert {state for states in fates.values() for state in states} == {"running", "checkpointed"}
    assert fates["dump"][: steps["dump"].index("commit")] == ["running"] * steps["dump"].index(
        "commit"
    )
    reached = steps["restore"].index("resume") + 1
    assert fates["restore"][:reached] == ["checkpointed"] * reached
    assert (fates["dump"][-1], fates["restore"][-1]) == ("checkpointed", "running")


@pytest.mark.parametrize(
    ("killed", "holder", "where", "stands"),
    [
        ("criuctl", "waits", (), "running"),
        ("criuctl", "is new", (), "paused"),
        ("criu", "waits", ("--host-pids",), "paused"),
        ("criu", "is new", (), "running"),
        ("criuctl", "is new", ("--host-pids",), "running"),
    ],
)
def test_a_restore_that_is_broken_off_when_the_holder_has_the_tree(
    killed: str, holder: str, where: tuple[str, ...], stands: str, operators: Operators
) -> None:
    """CRIU has not let go of it: nothing was restored, and the session is in its checkpoint
    still.
    """
    operators("run", "-d", "--name", "work", *where, "--", "sh", "-c", TICKS)
    operators("wait", "work", "--since", "0", "--match", "tick 3", "--timeout", TIMEOUT)
    if stands == "paused":
        operators("pause", "work")
    waiting = ProcessIdentity.of(operators("status", "work")["holder_pid"])
    checkpoint = operators("dump", "work")["checkpoint"]
    if holder == "is new":
        os.kill(waiting.pid, signal.SIGTERM)
        wait_until(lambda: not waiting.exists(), TIMEOUT, "it is not waited for")

    with paused(operators, "resume", "restore", "work") as held:
        adopted = operators("status", "work")
        assert (adopted["state"], adopted["incarnation"]) == (stands, 2)
        held.kill() if killed == "criuctl" else _kill_criu(
            held.command.process.pid, adopted["holder_pid"]
        )
        held.go_on()
        code = held.command.process.wait(TIMEOUT)
        assert code == (-signal.SIGKILL if killed == "criuctl" else 6), held.command.output()
        wait_until(
            lambda: operators("status", "work")["state"] != stands,
            TIMEOUT,
            "what was restored is killed",
        )

    left = operators("status", "work")
    assert (left["state"], left["checkpoint"]["id"], left["pid"]) == (
        "checkpointed",
        checkpoint,
        None,
    )
    if holder == "waits":
        assert (left["holder_pid"], left["restored"]) == (waiting.pid, None)
        assert waiting.exists()
    else:
        wait_until(
            lambda: not operators("status", "work")["holder"],
            TIMEOUT,
            "the holder that was made for it has ended",
        )

    operators("restore", "work")
    back = operators("status", "work")
    assert (back["state"], back["restored"]["checkpoint"]) == (stands, checkpoint)
    if stands == "paused":
        operators("resume", "work")
    _goes_on(operators)


def _dumped(operators: Operators, *where: str, program: str = TICKS) -> None:
    operators("run", "-d", "--name", "work", *where, "--", "sh", "-c", program)
    operators("wait", "work", "--since", "0", "--match", "tick 3", "--timeout", TIMEOUT)
    operators("dump", "work")


def _harmed(operators: Operators, when: str, victim: str, number: signal.Signals) -> int:
    """A restore to which this is done; its exit code."""
    operators.prefix = [sys.executable, "-c", HARM, when, victim, str(int(number))]
    code = operators.start("restore", "work").process.wait(TIMEOUT)
    operators.prefix = []
    return code


@pytest.mark.parametrize("where", [(), ("--host-pids",)])
def test_asked_to_end_when_there_is_no_way_back(
    where: tuple[str, ...], operators: Operators
) -> None:
    """It ends when the tree runs."""
    _dumped(operators, *where)
    assert _harmed(operators, "after", "criuctl", signal.SIGTERM) == 128 + signal.SIGTERM
    assert operators("status", "work")["state"] == "running"
    _goes_on(operators)


def test_killed_before_the_holder_hears_of_the_point_of_no_return(operators: Operators) -> None:
    """CRIU lets go of the tree, which is the session then: it can be paused at once, and ended."""
    _dumped(operators, "--host-pids")
    assert _harmed(operators, "before", "criuctl", signal.SIGKILL) == -signal.SIGKILL
    assert operators("status", "work")["state"] == "running"
    operators("pause", "work")
    operators("resume", "work")
    _goes_on(operators)
    assert operators("kill", "work", "--timeout", "0")["exit_code"] == 128 + signal.SIGKILL


def test_the_root_is_killed_when_there_is_no_way_back(operators: Operators) -> None:
    """CRIU, whose child it is still, takes its exit status."""
    _dumped(operators)
    assert _harmed(operators, "after", "root", signal.SIGKILL) == 0
    ended = operators("wait", "work", "--exit", "--timeout", TIMEOUT)
    assert (ended["state"], ended["exit_code"], ended["exit_signal"]) == (
        "exited",
        128 + signal.SIGKILL,
        signal.SIGKILL,
    )


@pytest.mark.parametrize("where", [(), ("--host-pids",)])
def test_of_a_tree_whose_holder_is_killed_before_it_runs_nothing_runs(
    where: tuple[str, ...], operators: Operators
) -> None:
    done = operators.home.path / "done"
    writes = (
        f"n = 0\nfile = open('{done}', 'a', 1)\nwhile 1: n += 1; print('tick', n, file=file); "
        "print('tick', n)"
    )
    _dumped(operators, *where, program=f'exec python3 -uc "{writes}"')
    size = done.stat().st_size
    with paused(operators, "resume", "restore", "work") as held:
        os.kill(operators("status", "work")["holder_pid"], signal.SIGKILL)
        held.go_on()
        assert held.command.process.wait(TIMEOUT) not in (0, 1), held.command.output()
    assert done.stat().st_size == size
    operators("restore", "work")
    _goes_on(operators)
