"""The hint of a refused command leads on: what it says can be done, and helps."""

from __future__ import annotations

import re
import shlex

import pytest
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration


def _hint(operators: Operators, *words: str, **env: str) -> str:
    answer = operators(*words, check=False, env=env or None)
    return str(answer["error"].get("hint", ""))


def _follow(operators: Operators, hint: str, **env: str) -> None:
    (command,) = re.findall("`criuctl (.*?)`", hint.rpartition("at a terminal: ")[2])
    operators(*shlex.split(command), env=env or None)


@pytest.mark.parametrize("how", [("exec",), ("exec", "--new"), ("exec", "--force")])
def test_a_paused_session(how: tuple[str, ...], operators: Operators) -> None:
    operators.shell("work")
    operators("pause", "work")
    words = (how[0], "work", *how[1:], "--", "echo", "done")
    _follow(operators, _hint(operators, *words))
    assert "done" in str(operators(*words))


def test_a_session_that_has_ended(operators: Operators) -> None:
    """With a checkpoint it comes back; without one, its last screen is left, and a new one."""
    for name in ("bare", "kept"):
        operators.shell(name)
    operators("snapshot", "kept")
    for name in ("bare", "kept"):
        operators("kill", name, "--timeout", "0")
    for words in (
        ("exec", "bare", "--", "ls"),
        ("send", "bare", "--text", "x"),
        ("resume", "bare"),
    ):
        hint = _hint(operators, *words)
        assert (
            "criuctl run --name bare" in hint
            and "restore" not in hint
            and "`criuctl ls`" not in hint
        )
    operators("capture", "bare")
    hint = _hint(operators, "exec", "kept", "--", "ls")
    _follow(operators, hint.partition("brings back")[0])
    assert operators("exec", "kept", "--", "echo", "done")["output"].strip() == "done"


def test_agents_that_stay_out(operators: Operators) -> None:
    """A person lets one in again; the hint does not send the agent to a command it may not use."""
    operators.shell("work")
    operators("halt", "work")
    operators("resume", "work", "--agent-stays-out", env={"CRIUCTL_KIND": "human"})
    agent = {"CRIUCTL_KIND": "agent", "CRIUCTL_OPERATOR": "builder"}
    typed = _hint(operators, "send", "work", "--text", "x", **agent)
    assert typed == _hint(operators, "role", "work", "agent:builder", "write", **agent)
    assert "A person lifts" in typed and "SESSION" not in typed
    _follow(operators, typed, CRIUCTL_KIND="human")
    operators("exec", "work", "--timeout", TIMEOUT, "--", "true", env=agent)
    operators("kill", "work", "--timeout", "0", env={"CRIUCTL_KIND": "human"})


def test_rm_asks_at_a_terminal(operators: Operators) -> None:
    """Where a name alone has several checkpoints; a script, and --yes, are not asked."""
    operators.shell("work")
    for _ in range(4):
        operators("snapshot", "work")
    window = operators.window("rm", "work")
    window.expect(r"work has 4 checkpoints. Remove the newest, work@4 \(\w{12}\)\?")
    window.sendline("n")
    window.expect("nothing was removed")
    window.wait()
    window = operators.window("rm", "work")
    window.expect("Remove the newest")
    window.sendline("y")
    window.expect("removed work@4")
    window.wait()
    for words in (("--yes", "work"), ("work@1",)):
        window = operators.window("rm", *words)
        window.expect("removed work@")
        window.wait()
    operators("rm", "work")
    assert operators("list") == []


def test_a_command_that_does_not_exist_leaves_no_name(operators: Operators) -> None:
    answer = operators("run", "-d", "--name", "none", "--", "no-such-program", check=False)
    assert answer["exit_code"] == 3
    assert [path.name for path in operators.home.path.rglob("none*")] == []
    assert [path.name for path in operators.home.run.rglob("none*")] == []


def test_options_of_the_command_itself(operators: Operators) -> None:
    for words in (("run", "work", "bash", "-c", "true"), ("exec", "work", "ls", "--all")):
        assert "come after --" in _hint(operators, *words)


def test_colours_only_where_the_terminal_takes_them(operators: Operators) -> None:
    for terminal, coloured in (("xterm", True), ("dumb", False)):
        window = operators.window("status", "nobody", env={"TERM": terminal})
        window.expect("no session")
        assert ((window.before or b"").count(b"\x1b") > 0) is coloured
        window.wait()


def test_where_a_session_starts(operators: Operators) -> None:
    folder = operators.home.path / "here"
    folder.mkdir()
    operators.shell("work", "--cwd", str(folder))
    assert operators("exec", "work", "--", "pwd")["output"].strip() == str(folder)
    refused = operators("run", "-d", "--cwd", f"{folder}/no", "--", "true", check=False)
    assert refused["exit_code"] == 2
