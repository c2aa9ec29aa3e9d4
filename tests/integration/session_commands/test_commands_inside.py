"""criuctl at work inside of a session, as in any shell: the other sessions are not taken for gone,
and nothing runs twice.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support.operating import TIMEOUT, Operators
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

CRIUCTL = f"{sys.executable} -m criuctl"


@pytest.fixture
def tree(operators: Operators, zoo: Zoo) -> Animal:
    """One without a holder, whose processes nothing but their PIDs can tell of."""
    animal = zoo.launch("counter.py", "1")
    operators("dump", animal.pid, "--name", "tree", "--leave-running")
    return animal


def _within(operators: Operators, command: str) -> tuple[int, Any]:
    """What criuctl says inside of the session `outer`: exit code and result."""
    answer = operators(
        "exec", "outer", "--timeout", TIMEOUT, "--", f"{CRIUCTL} --json {command}", check=False
    )
    return answer["exit_code"], json.loads(answer["output"])


def test_the_other_sessions_are_not_taken_for_gone(operators: Operators, tree: Animal) -> None:
    operators.shell("outer")
    operators("run", "-d", "--name", "held", "--", "sleep", "1000")
    code, listed = _within(operators, "ls")
    assert code == 0 and {body["session"]: body["state"] for body in listed} == dict.fromkeys(
        ("held", "outer", "tree"), "running"
    )
    code, answer = _within(operators, "status tree")
    assert (code, answer["state"], answer["pid"], answer["command"]) == (0, "running", tree.pid, [])
    refused = [
        "restore tree",
        "restore tree --as copy",
        "forget held",
        "forget tree",
        "kill tree",
        "dump held",
        "check tree",
    ]
    refused += [
        "dump $$",
        "connections held",
        "fence --all",
        "recover --all",
        "supervise held",
        "migrate held ssh://none",
    ]
    for command in refused:
        code, answer = _within(operators, command)
        assert code == 9 and "inside session 'outer'" in answer["error"]["message"], command
    code, answer = _within(operators, "snapshot --all")
    assert code == 9 and {body["error"]["code"] for body in answer} == {"conflict"}
    tree.ask()
    assert {body["session"]: body["pid"] for body in operators("ls")}["tree"] == tree.pid
    assert len(operators("list")) == 1
    code, answer = _within(operators, "kill held --timeout 0")  # its holder does that
    assert code == 0 and answer["killed"] >= 1
    code, listed = _within(operators, "ls")
    assert {body["session"]: body["state"] for body in listed}["held"] == "exited"


def test_what_is_restored_does_not_become_a_part_of_a_session(
    operators: Operators, tree: Animal
) -> None:
    """It would end with it, and no dump of that session would be possible any more."""
    operators.shell("outer", "--host-pids")
    code, answer = _within(operators, "dump tree")  # whose processes can be seen
    assert code == 0, answer
    for command in ("restore tree", "restore tree --as copy", "recover --all"):
        code, answer = _within(operators, command)
        assert code == 9 and "inside session 'outer'" in answer["error"]["message"], command
    code, answer = _within(operators, "restore tree --dry-run")
    assert code == 0 and answer["ok"]
