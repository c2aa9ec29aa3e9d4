"""Sessions that stand still: by each kind of freezer and without one, through a dump, and to the
store and back.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Home
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators
from support.oracle import read, tree
from support.pauses import paused

from criuctl.proc.tree import ProcessIdentity

pytestmark = pytest.mark.integration

# A job that was stopped before anybody paused anything, and a counter.
COUNTER = "sleep 1000 & kill -STOP $!; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.01; done"
# and which mounts hide it
METHODS = {"freezer-v2": (), "freezer-v1": ("cgroup2",), "SIGSTOP": ("cgroup2", "freezer")}


def _mounted(kind: str) -> list[str]:
    """Where hierarchies of version 2, or of version 1 with this controller, are mounted."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [
        fields[4]
        for fields in lines
        if fields[fields.index("-") + 1] == kind or kind in fields[-1].split(",")
    ]


@pytest.fixture(params=METHODS)
def method(
    request: pytest.FixtureRequest, keeper: Keeper, home: Home, operators: Operators
) -> Iterator[str]:
    """The way by which this test's sessions are paused: all commands run where the better ones are
    not mounted.
    """
    kinds = {"freezer-v2": "cgroup2", "freezer-v1": "freezer"}
    if request.param in kinds and not _mounted(kinds[request.param]):
        pytest.skip(f"no {request.param} here")
    hidden = [path for kind in METHODS[request.param] for path in _mounted(kind)]
    apart = None
    if hidden:
        ready = home.path / "hidden"
        script = f"umount {' '.join(hidden)} && touch {ready} && exec sleep 1000"
        environment = {"PATH": os.environ["PATH"], "CZOO_TOKEN": home.token}
        apart = keeper.spawn(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script], env=environment
        )
        wait_until(ready.exists, TIMEOUT, "the mount namespace is there")
        operators.prefix = ["nsenter", f"--mount=/proc/{apart.pid}/ns/mnt", "--"]
    yield request.param
    operators.prefix = []
    if apart is not None:
        apart.kill()


def _ticks(operators: Operators, name: str) -> list[int]:
    text = "\n".join(operators("capture", name, "--scrollback")["lines"])
    return [int(number) for number in re.findall(r"tick (\d+)\b", text)]


def _goes_on(operators: Operators, name: str, last: int) -> None:
    """The very next number comes after `last`, and many more."""
    operators("wait", name, "--match", rf"tick {last + 20}\b", "--timeout", TIMEOUT)
    ticks = _ticks(operators, name)
    assert ticks == list(range(1, len(ticks) + 1)) and len(ticks) >= last + 20


def _states(root: int) -> set[str]:
    """The states of all that lives; the shell's short sleeps come and go meanwhile."""
    stats = [read(f"/proc/{pid}/stat") for pid in tree(root)]
    return {stat.rpartition(")")[2].split()[0] for stat in stats if stat}


def test_a_paused_session_is_dumped_and_comes_back_paused(
    operators: Operators, method: str
) -> None:
    operators("run", "-d", "--name", "work", "--", "sh", "-c", COUNTER)
    assert operators("status", "work")["freezer"] == method
    operators("wait", "work", "--match", r"tick 5\b", "--timeout", TIMEOUT)
    assert operators("pause", "work")["method"] == method
    before = operators("status", "work")
    last = _ticks(operators, "work")[-1]
    operators("snapshot", "work")
    after = operators("status", "work")
    assert (after["state"], after["offset"], after["paused_by"]) == (
        "paused",
        before["offset"],
        before["paused_by"],
    )
    operators("resume", "work")
    _goes_on(operators, "work", last)
    operators("halt", "work")
    before = operators("status", "work")
    last = _ticks(operators, "work")[-1]
    operators("dump", "work")
    assert operators("status", "work")["state"] == "checkpointed"
    restored = operators("restore", "work")
    status = operators("status", "work")
    assert (status["state"], status["halted"], status["pid"]) == ("paused", True, restored["pid"])
    assert restored["state"] == "paused"
    operators("dump", "work")
    said = operators.text("restore", "work")
    assert "it is paused, as it was at the dump: criuctl resume work" in said
    status = operators("status", "work")
    assert status["offset"] == before["offset"] and status["paused_by"]["name"] == "tester"
    root = ProcessIdentity.of(status["pid"])
    operators("resume", "work")
    _goes_on(operators, "work", last)
    wait_until(
        lambda: "T" in _states(root.pid), TIMEOUT, "who was stopped before the pause still is"
    )
    operators("pause", "work")
    holder = ProcessIdentity.of(status["holder_pid"])
    os.kill(holder.pid, signal.SIGKILL)
    wait_until(lambda: not holder.alive(), TIMEOUT, "the holder is gone")
    operators("kill", "work", "--timeout", 0)
    assert not root.alive()


def test_a_criu_that_is_killed_does_not_let_a_paused_session_run(operators: Operators) -> None:
    """The kernel lets all go that CRIU held; the holder, whose dump comes to nothing, freezes them
    again.
    """
    operators("run", "-d", "--name", "work", "--", "sh", "-c", COUNTER)
    operators("wait", "work", "--match", r"tick 5\b", "--timeout", TIMEOUT)
    operators("pause", "work")
    with paused(operators, "frozen", "dump", "work") as held:
        held.kill_criu()
        held.go_on()
        assert held.command.process.wait(TIMEOUT) == 5, held.command.output()
        held.wait_settled()
    stands = operators("status", "work")
    assert stands["state"] == "paused"
    last = _ticks(operators, "work")[-1]
    assert (
        operators("wait", "work", "--match", rf"tick {last + 5}\b", "--timeout", 1, check=False)[
            "exit_code"
        ]
        == 12
    )
    assert operators("status", "work")["offset"] == stands["offset"]
    operators("resume", "work")
    _goes_on(operators, "work", last)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_while_its_snapshot_is_stored_a_session_is_as_any_other(
    operators: Operators, how: str
) -> None:
    """That may take minutes: it can be stopped, its end is reported at once, and then it has ended
    and is not checkpointed.
    """
    operators("run", "-d", "--name", "work", "--", "sh", "-c", "read line; exit 7")
    with paused(operators, "store", "dump", "work", "--leave-running") as held:
        assert operators("halt", "work")["processes"] > 0
        assert operators("resume", "work")["state"] == "running"
        if how == "exit":
            operators("send", "work", "--enter")
            assert operators("wait", "work", "--exit", "--timeout", TIMEOUT)["exit_code"] == 7
        else:
            assert operators("kill", "work", "--timeout", 0)["exit_code"] == 128 + signal.SIGKILL
        held.go_on()
        assert held.command.process.wait(TIMEOUT) == 0, held.command.output()
    wait_until(lambda: not operators("status", "work")["holder"], TIMEOUT, "its holder has ended")
    assert (operators("status", "work")["state"], len(operators("list", "work"))) == ("exited", 1)
    operators("run", "-d", "--name", "work", "--", "sleep", "1000")
