"""A name that another session has had: status and kill are about the session that has it now."""

from __future__ import annotations

import pytest
from support.keeper import wait_until
from support.operating import Operators
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


@pytest.fixture
def tree(zoo: Zoo) -> Animal:
    """One without a holder."""
    return zoo.launch("counter.py", "1")


def _ended(operators: Operators, name: str) -> None:
    """A session with only its holder left, and its exit code."""
    operators("run", "-d", "--name", name, "--", "true")
    wait_until(lambda: operators("status", name)["state"] == "exited", 60, f"{name} has ended")


def _speak_of(operators: Operators, name: str, pid: int) -> None:
    status = operators("status", name)
    assert (status["state"], status["pid"]) == ("running", pid)
    assert operators("kill", name, "--timeout", 0)["killed"] >= 1


def test_a_tree_is_dumped_under_the_name_of_a_session_that_has_ended(
    operators: Operators, tree: Animal
) -> None:
    _ended(operators, "work")
    operators("dump", tree.pid, "--name", "work", "--leave-running")
    _speak_of(operators, "work", tree.pid)


@pytest.mark.parametrize("options", [("own",), ("other", "--as", "own")], ids=["own", "as"])
def test_a_tree_comes_back_under_the_name_of_a_session_that_has_ended(
    options: tuple[str, ...], operators: Operators, tree: Animal
) -> None:
    name, *copy = options
    operators("dump", tree.pid, "--name", name)
    if not copy:
        operators("kill", name)  # it is given up, and its name is free
    _ended(operators, "own")
    pid = operators("restore", name, *copy)["pid"]
    _speak_of(operators, "own", pid)


@pytest.mark.parametrize("held", [True, False], ids=["held", "tree"])
def test_the_name_of_a_checkpointed_session_is_not_given_to_a_copy(
    held: bool, operators: Operators, zoo: Zoo, tree: Animal
) -> None:
    operators("dump", tree.pid, "--name", "other")
    if held:
        operators("run", "-d", "--name", "work", "--", "sleep", "1000")
        operators("dump", "work")
        second = zoo.launch("counter.py", "1")
        assert operators("dump", second.pid, "--name", "work", check=False)["exit_code"] == 9
        second.ask()
    else:
        operators("dump", zoo.launch("counter.py", "1").pid, "--name", "work")
    before = operators("status", "work")
    assert operators("restore", "other", "--as", "work", check=False)["exit_code"] == 9
    after = operators("status", "work")
    assert (after["state"], after["id"]) == ("checkpointed", before["id"])
    operators("restore", "work")
    operators("kill", "work", "--timeout", 0)
