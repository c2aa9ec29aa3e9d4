"""Durable steps on the command line, and over dumps, restores and forks with real CRIU."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.stepping import exists, run_program, said, steps_of, wait_for, wait_for_step

pytestmark = pytest.mark.integration

STEP = f"{sys.executable} -m criuctl step run"


def script(operators: Operators, text: str) -> None:
    """Run a shell script as the session `work`."""
    path = operators.home.path / "work.sh"
    path.write_text(text)
    operators("run", "-d", "--name", "work", "--", "sh", path)


def test_a_command_is_run_once(operators: Operators) -> None:
    out = operators.home.path / "out"
    script(
        operators,
        f"""
for n in 1 2 3; do {STEP} backup -- sh -c 'echo $CRIUCTL_STEP $CRIUCTL_STEP_KEY >> {out}'; done
{STEP} fails -- sh -c 'exit 7'; echo code $?
{STEP} fails -- sh -c 'exit 0'; echo code $?
{STEP} none -- /no/such/program; echo code $?
{STEP} killed -- sh -c 'kill -9 $$'; echo code $?
{STEP} killed -- true; echo code $?
{STEP} killed --verify 'test $CRIUCTL_STEP_KEY' -- sh -c 'echo never >> {out}'; echo code $?
{STEP} again -- sh -c 'kill -9 $$'
{STEP} again --verify 'exit 1' -- sh -c 'echo again $CRIUCTL_STEP_KEY >> {out}'
{STEP} keyed -- sh -c 'kill -9 $$'
{STEP} keyed --by-key -- sh -c 'echo keyed $CRIUCTL_STEP_KEY >> {out}'
{STEP} odd -- sh -c 'kill -9 $$'
{STEP} odd --verify 'exit 5' -- true; echo code $?
echo ready; read line
""",
    )
    text = wait_for(operators, "work", "ready")
    codes = [line.split()[1] for line in text.splitlines() if line.startswith("code ")]
    assert codes == ["7", "0", "3", "137", "9", "0", "9"], text
    known = steps_of(operators, "work")
    assert out.read_text().splitlines() == [
        f"backup {known['backup']['key']}",
        f"again {known['again']['key']}",
        f"keyed {known['keyed']['key']}",
    ]
    assert {name: step["state"] for name, step in known.items()} == {
        "backup": "done", "fails": "done", "none": "failed", "killed": "done", "again": "done",
        "keyed": "done", "odd": "unknown",
    }  # fmt: skip
    assert known["killed"]["result"] == {"exit_code": 0, "verified": True}
    assert (known["again"]["attempts"], known["backup"]["attempts"]) == (2, 1)
    status = operators("status", "work")["steps"]
    assert status == {"running": 0, "done": 5, "unknown": 1, "failed": 1, "waiting": 0}
    assert "5 done, 1 unknown, 1 failed" in operators.text("status", "work")
    assert "odd" in operators.text("step", "list", "work")
    assert "ended by SIGKILL" in operators.text("step", "show", "work", "odd")
    entries = [one for one in operators("log", "work") if one["what"] == "step"]
    assert [one["how"] for one in entries if one["id"] == "killed"] == [
        "began",
        "failed",
        "verified",
    ]


def test_an_operator_resolves_a_step(operators: Operators) -> None:
    script(operators, f"{STEP} odd -- sh -c 'kill -9 $$'; echo ready; read line")
    wait_for(operators, "work", "ready")
    step = operators("step", "resolve", "work", "odd", "done", "--result", '{"found": 1}')
    assert (step["state"], step["result"]) == ("done", {"found": 1})
    assert operators("step", "resolve", "work", "odd", "failed", check=False)["exit_code"] == 9
    assert operators("step", "show", "work", "never", check=False)["exit_code"] == 3
    assert (
        operators("step", "resolve", "work", "odd", "done", "--result", "{", check=False)[
            "exit_code"
        ]
        == 2
    )
    assert operators("step", "list", "never", check=False)["exit_code"] == 3


def test_a_step_of_a_session_from_outside(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "sleep", "1000")
    done = operators("step", "run", "load", "--session", "work", "--", "sh", "-c", "echo hi")
    assert (done["state"], done["ran"], done["exit_code"]) == ("done", True, 0)
    again = operators("step", "run", "load", "--session", "work", "--", "false")
    assert (again["state"], again["ran"]) == ("done", False)
    sleeping = operators.start("step", "run", "long", "--session", "work", "--", "sleep", "1000")
    wait_for_step(operators, "work", "long", "began")
    busy = operators("step", "run", "long", "--session", "work", "--", "true", check=False)
    assert busy["exit_code"] == 9 and "under way" in busy["error"]["message"]
    sleeping.process.kill(signal.SIGKILL)
    wait_for_step(operators, "work", "long", "unknown")
    operators("dump", "work")
    operators("step", "resolve", "work", "long", "done")
    assert steps_of(operators, "work")["long"]["state"] == "done"
    assert operators("restore", "work", "--detach")["incarnation"] == 2
    assert steps_of(operators, "work")["long"]["state"] == "done"


def test_outside_any_session_a_file_is_needed(operators: Operators) -> None:
    assert operators("step", "run", "x", "--", "true", check=False)["exit_code"] == 2
    file = operators.home.path / "own.steps"
    for ran in (True, False):
        done = operators("step", "run", "y", "--", "true", env={"CRIUCTL_STEPS_FILE": str(file)})
        assert (done["state"], done["ran"]) == ("done", ran)


COUNTS = """
number = 0
while True:
    # A kill between effect and record leaves a step unknown: then the file is looked at.
    with inside.step(f"n{number}", verify=lambda key: key in open(sys.argv[1]).read()) as s:
        if not s.done:
            s.result = number
            fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(fd, f"{number} {s.key}\\n".encode())
            os.close(fd)
    number += 1
    time.sleep(0.002)
"""


def effects(path: Path) -> list[list[str]]:
    """What the program has done: number and key."""
    return [line.split() for line in path.read_text().splitlines()]


def test_a_program_that_goes_back_in_time_repeats_nothing(operators: Operators) -> None:
    out = operators.home.path / "out"
    run_program(operators, "work", COUNTS, str(out))
    for _ in range(3):
        count = len(effects(out)) if out.exists() else 0
        wait_until(lambda: out.exists() and len(effects(out)) > count + 20, TIMEOUT, "it counts")  # noqa: B023
        operators("snapshot", "work")
        at = len(effects(out))
        wait_until(lambda: len(effects(out)) > at + 20, TIMEOUT, "it counts")  # noqa: B023
        operators("kill", "work")
        operators("restore", "work", "--detach")
    count = len(effects(out))
    wait_until(lambda: len(effects(out)) > count + 20, TIMEOUT, "it counts")
    operators("kill", "work")
    numbers = [int(number) for number, _ in effects(out)]
    assert numbers == list(range(len(numbers))), "each once, and in order"
    known = steps_of(operators, "work")
    assert all(known[f"n{number}"]["key"] == key for number, key in effects(out))
    assert {known[f"n{number}"]["state"] for number in numbers[:-1]} == {"done"}


def test_a_fork_has_other_keys_from_then_on(operators: Operators) -> None:
    out = operators.home.path / "out"
    run_program(operators, "work", COUNTS, str(out))
    exists(out)
    wait_until(lambda: len(effects(out)) > 20, TIMEOUT, "it counts")
    operators("dump", "work")
    before = dict(effects(out))
    operators("restore", "work", "--detach", "--as", "fork")
    wait_until(lambda: len(effects(out)) > len(before) + 20, TIMEOUT, "it counts")
    operators("kill", "fork")
    fork = steps_of(operators, "fork")
    operators("restore", "work", "--detach")
    last = f"n{len(effects(out)) - 1}"
    wait_until(lambda: last in steps_of(operators, "work"), TIMEOUT, "it has come as far")
    work = steps_of(operators, "work")
    for number in range(len(before)):
        assert work[f"n{number}"]["key"] == fork[f"n{number}"]["key"] == before[str(number)]
    later = [f"n{number}" for number in range(len(before), len(before) + 10)]
    assert all(work[name]["key"] != fork[name]["key"] for name in later)


IN_FLIGHT = """
with inside.step("long") as s:
    say("begun", s.done, s.key)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    s.result = "finished"
with inside.step("long") as s:
    say("then", s.done, s.result)
time.sleep(1000)
"""


def test_a_step_in_flight_is_reported_after_a_restore(operators: Operators) -> None:
    go = operators.home.path / "go"
    run_program(operators, "work", IN_FLIGHT, str(go))
    wait_for(operators, "work", "begun False")
    dumped = operators("dump", "work")
    assert any("must not be repeated" in str(one) for one in dumped["warnings"])
    restored = operators("restore", "work", "--detach")
    assert any("under way" in str(one) and "long" in str(one) for one in restored["warnings"])
    assert steps_of(operators, "work")["long"]["state"] == "began"
    go.touch()
    wait_for(operators, "work", "then True finished")
    entries = [one["how"] for one in operators("log", "work") if one["what"] == "step"]
    assert entries == ["began", "restored", "done"]
    # now from the same checkpoint, in the middle of a step that is done
    operators("kill", "work")
    again = operators("restore", "work@1", "--detach")
    assert any("done already" in str(one) for one in again["warnings"])
    wait_until(lambda: said(operators, "work").count("then True finished") == 1, TIMEOUT, "so")


def test_steps_move_to_another_host_with_a_checkpoint(operators: Operators) -> None:
    """The journal of this host is gone: the checkpoint has what was done before."""
    out = operators.home.path / "out"
    run_program(operators, "work", COUNTS, str(out))
    exists(out)
    wait_until(lambda: len(effects(out)) > 20, TIMEOUT, "it counts")
    operators("dump", "work")
    known = steps_of(operators, "work")
    holder = operators("status", "work")["holder_pid"]
    os.kill(holder, signal.SIGKILL)
    (journal,) = (operators.home.path / "state").rglob("holders/work/steps")
    journal.unlink()
    operators("restore", "work", "--detach")
    now = steps_of(operators, "work")
    assert all(
        now[name]["state"] == "done" and now[name]["key"] == one["key"]
        for name, one in known.items()
    )
    assert now["n0"]["result"] == 0
