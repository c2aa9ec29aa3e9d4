"""What a command has started in the background ends with it, however it is ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

# A development server: jobs, one whose parent has ended, one with a session of its own, and one
# that ignores all signals that can be ignored.
SERVER = """\
#!/bin/bash
sleep 41711 &
( sleep 41712 & )
setsid sleep 41713 &
(trap '' INT TERM HUP; while :; do sleep 41714; done) &
wait
"""


def _left(operators: Operators) -> set[str]:
    """The sleeping processes of this test."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            mine = operators.home.token.encode() in (path.parent / "environ").read_bytes()
        except OSError:
            continue
        if mine and words[0] == b"sleep":
            found.add(words[1].decode())
    return found


@pytest.mark.parametrize("where", ["shell", "new"])
@pytest.mark.parametrize("how", ["kill", "on-timeout", "at-once"])
def test_nothing_of_a_killed_command_is_left(operators: Operators, where: str, how: str) -> None:
    server = operators.home.path / "server"
    server.write_text(SERVER)
    server.chmod(0o755)
    operators.shell("work")
    operators("exec", "work", "--", "sleep 41700 & echo")  # a job of the user's own
    new = ["--new"] if where == "new" else []
    if how == "on-timeout":
        limits = ("--timeout", "1", "--on-timeout", "kill")
        operators("exec", "work", *new, *limits, "--", server, check=False)
    else:
        command = operators("exec", "work", *new, "--detach", "--", server)["command_id"]
        wait_until(lambda: len(_left(operators)) == 5, TIMEOUT, "the server runs")
        grace = ("--timeout", "0" if how == "at-once" else "1")
        operators("kill", "work", "--command", command, *grace, check=False)
    assert _left(operators) == {"41700"}
    assert operators("exec", "work", "--", "jobs")["output"].count("Running") == 1


@pytest.mark.parametrize("line", ["echo 'open", "if true; then", "cat <<END"])
def test_an_incomplete_command_says_so(operators: Operators, line: str) -> None:
    operators.shell("work")
    answer = operators("exec", "work", "--", line, check=False)
    assert (answer["error"]["exit_code"], answer["error"]["code"]) == (2, "usage"), answer
    assert "incomplete" in answer["error"]["message"]
    assert operators("exec", "work", "--", "echo next")["output"] == "next\n"
