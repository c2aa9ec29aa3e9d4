"""What a session's terminal waits for, as `status` and `wait --reading` report it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

ASKS = "import getpass, time; time.sleep(0.3); getpass.getpass('Secret: '); time.sleep(1000)"


def foreground(operators: Operators, name: str = "work") -> dict[str, Any]:
    found: dict[str, Any] = operators("status", name)["foreground"]
    return found


def test_a_program_that_asks(operators: Operators) -> None:
    """It reads the terminal only while it waits for an answer."""
    operators("run", "-d", "--name", "work", "--", sys.executable, "-c", ASKS)
    asks = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
    assert asks["argv"][:2] == [sys.executable, "-c"] and asks["cwd"] == str(operators.home.path)
    assert (asks["reading_tty"], asks["echo"]) == (True, False)
    assert operators.text("status", "work").count("waits for input, no echo") == 1
    operators("pause", "work")
    assert foreground(operators)["reading_tty"] is False
    operators("resume", "work")
    operators("wait", "work", "--reading", "--timeout", TIMEOUT)
    operators("send", "work", "--text", "it", "--enter")
    late = operators("wait", "work", "--reading", "--timeout", "0.5", check=False)
    assert late["exit_code"] == 12
    asleep = foreground(operators)
    assert (asleep["pid"], asleep["reading_tty"], asleep["echo"]) == (asks["pid"], False, True)


def test_a_program_that_ends_instead_of_asking(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "sleep", "0.5")
    gone = operators("wait", "work", "--reading", "--timeout", TIMEOUT, check=False)
    assert gone["exit_code"] == 3 and "ended before" in gone["error"]["message"]


def test_the_foreground_is_what_the_shell_runs(operators: Operators) -> None:
    """Of a pipeline whose leader has ended, another process."""
    operators.shell("work")
    assert foreground(operators)["argv"][0] == "bash"
    operators("send", "work", "--text", "cd /; true | sleep 1000", "--enter")
    operators.runs("work", "sleep")
    found = foreground(operators)
    assert (found["argv"], found["cwd"], found["reading_tty"]) == (["sleep", "1000"], "/", False)
    operators("signal", "work", "INT")
    operators("send", "work", "--text", "true | cat - /dev/tty", "--enter")
    operators.runs("work", "cat")
    found = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
    assert found["argv"] == ["cat", "-", "/dev/tty"]


def test_it_is_the_same_after_a_restore(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "cat")
    operators("wait", "work", "--reading", "--timeout", TIMEOUT)
    operators("dump", "work")
    operators("restore", "work", "--detach")
    found = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
    assert (found["argv"], found["echo"]) == (["cat"], True)
