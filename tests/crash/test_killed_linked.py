"""criuctl is killed in the middle of a dump or a restore of a group: all of it runs, or none, and
no half of a group checkpoint is listed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.keeper import wait_until
from support.linked import Exchange
from support.operating import Operators
from support.pauses import paused, steps_of

pytestmark = [pytest.mark.crash, pytest.mark.slow]

RUNNING = {"serve": "running", "connect": "running"}
ENDED = {"serve": "checkpointed", "connect": "checkpointed"}


@pytest.fixture
def exchange(operators: Operators) -> Iterator[Exchange]:
    exchange = Exchange(operators)
    exchange.start()
    yield exchange
    exchange.end()


def group_steps(operators: Operators, *command: str) -> list[str]:
    """The steps of the coordinator in this command."""
    return [step for step in steps_of(operators, *command) if step.startswith("group-")]


def test_a_snapshot(exchange: Exchange, operators: Operators) -> None:
    """All run on, at whatever step; the checkpoint of the group is there from the last one on."""
    steps = group_steps(operators, "snapshot", "--group", "work")
    assert steps == [
        *("group-ready", "group-frozen", "group-images", "group-stored", "group-commit"),
        "group-done",
    ]
    listed = 1
    for step in steps:
        with paused(operators, step, "snapshot", "--group", "work") as held:
            held.kill()
            held.wait_settled()
        exchange.goes_on()
        listed += step == "group-done"
        assert len(exchange.listed()) == listed, step
    operators("snapshot", "--group", "work")
    exchange.goes_on()
    exchange.kill()
    operators("restore", "--group", "work", "--files", "keep")
    exchange.goes_on()


def test_a_dump(exchange: Exchange, operators: Operators) -> None:
    """Before the decision all run on; after it all are ended, and the checkpoint is there."""
    steps = group_steps(operators, "dump", "--group", "work")
    assert steps.index("group-committed") < steps.index("group-commit")
    assert steps.index("group-commit") < steps.index("group-decided")
    listed = 1
    for step in ("group-images", "group-committed", "group-decided"):
        operators("restore", "--group", "work", "--files", "keep", check=False)
        exchange.goes_on()
        with paused(operators, step, "dump", "--group", "work") as held:
            held.kill()
            held.wait_settled()
        if step == "group-decided":
            listed += 1
            wait_until(lambda: exchange.states() == ENDED, 60, "both are checkpointed")
        else:
            exchange.goes_on()
            assert exchange.states() == RUNNING
        assert len(exchange.listed()) == listed, step
    operators("restore", "--group", "work", "--files", "keep")
    exchange.goes_on()


def test_a_restore(exchange: Exchange, operators: Operators) -> None:
    """Before the decision none is left; after it all run."""
    operators("snapshot", "--group", "work")
    exchange.kill()
    steps = group_steps(operators, "restore", "--group", "work", "--files", "keep")
    assert steps == ["group-placed", "group-running", "group-decided", "group-done"]
    exchange.goes_on()
    for step in steps[:-1]:
        exchange.kill()
        with paused(operators, step, "restore", "--group", "work", "--files", "keep") as held:
            held.kill()
            held.command.process.wait(120)
        if step == "group-decided":
            wait_until(lambda: exchange.states() == RUNNING, 60, "both run")
            exchange.goes_on()
        else:
            wait_until(
                lambda: "running" not in exchange.states().values(), 60, f"none runs after {step}"
            )
            operators("restore", "--group", "work", "--files", "keep")
            exchange.goes_on()


def test_one_member_s_criuctl(exchange: Exchange, operators: Operators) -> None:
    """The processes that dump them, and CRIU, are killed while all stand still: all run on."""
    with paused(operators, "group-frozen", "snapshot", "--group", "work") as held:
        held.kill_criu()
        held.go_on()
        assert held.command.process.wait(120) == 5
        held.wait_settled()
    exchange.goes_on()
    assert not exchange.listed() and not operators("list")
