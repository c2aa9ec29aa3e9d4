"""`top`: a live list of sessions on a real terminal, and the keys that act on one."""

from __future__ import annotations

import contextlib
import re

import pexpect
import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators, ended, literally

from criuctl.session.screen.screen import Screen

pytestmark = pytest.mark.integration
BUSY = ("python3", "-c", "while True: pass")


class Top:
    """`criuctl top` and the screen that it draws."""

    def __init__(self, operators: Operators, columns: int = 100) -> None:
        self.window = operators.window("top", "--interval", "0.5", rows=12, columns=columns)
        self.screen = Screen(columns, 12)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until a line of the screen matches."""
        found: list[re.Match[str]] = []

        def shown() -> bool:
            with contextlib.suppress(pexpect.TIMEOUT):
                self.screen.feed(self.window.read_nonblocking(65536, 0.1))
            text = "\n".join(self.screen.text())
            found[:] = [match for match in (re.search(pattern, text, re.MULTILINE),) if match]
            return bool(found)

        wait_until(shown, TIMEOUT, f"top shows {pattern}")
        return found[0]


def test_a_live_list_with_keys(operators: Operators) -> None:
    operators.extra["CRIUCTL_KIND"] = "human"  # the lease is for windows as well
    operators("run", "-d", "--name", "busy", "--", *BUSY)
    operators.shell("work")
    operators("lease", "request", "work", "--hold", "10m")
    top = Top(operators)
    assert top.until(r"^SESSION .*").group().split()[:4] == ["SESSION", "STATE", "CPU", "MEMORY"]
    top.until(r"^busy +running +[1-9][0-9]*% ")
    top.until(r"^work +running +\d+% +\S+ \S?i?B +tester +never ")
    top.window.send(b"p")
    top.until(r"^busy +paused ")
    assert operators("status", "busy")["state"] == "paused"
    top.window.send(b"p")
    top.until(r"^busy +running ")
    # Not without a question.
    top.window.send(b"k")
    top.until(r"^kill busy\? y or n")
    top.window.send(b"n")
    top.until(r"^a attach ")
    top.window.send(b"k")
    top.until(r"^kill busy\? y or n")
    top.window.send(b"y")
    top.until(r"^1 session of ")
    assert operators("status", "busy")["state"] == "exited"
    top.window.send(b"s")
    top.until(r"^work: checkpoint [0-9a-f]{12}")
    top.until(r"^work +running .* tester +\d+ s ")
    top.window.send(b"f")
    top.until(r"^work: 1 copy of checkpoint ")
    top.until(r"^work-1 +running ")
    top.window.send(b"a")
    top.window.expect(literally("$"))
    top.window.send(b"echo $((41+1))\r")
    top.window.expect(rb"[\nH]42[\r\x1b]")  # as it is printed, or in a screen that is drawn again
    top.window.send(b"\x1d")
    top.window.expect(rb"detached from work")
    top.until(r"^a attach ")
    top.window.send(b"q")
    assert ended(top.window) == 0
    assert (top.window.before or b"").endswith(b"\x1b[?25h\x1b[?1049l")


def test_a_narrow_terminal_keeps_names_whole(operators: Operators) -> None:
    name = "web-frontend-production-a"
    operators("run", "-d", "--name", name, "--", "sleep", "1000")
    top = Top(operators, columns=40)
    assert top.until(rf"^{name} +running$")
    top.window.send(b"\x03")
    assert ended(top.window) == 0


def test_without_a_terminal_it_refuses(operators: Operators) -> None:
    answer = operators("top", check=False)
    assert answer["exit_code"] == 2 and "criuctl ps" in answer["error"]["hint"]
