"""Commands in a session's shell: each ends in a definite state, with all of its output."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

SHELLS = {
    "bash": ("bash", "--norc", "--noprofile"),
    "zsh": ("zsh", "-f"),
    "fish": ("fish",),
    "dash": ("dash",),
}
WITH_EDITOR = ["bash", "zsh", "fish"]
POSIX = ["bash", "zsh", "dash"]


@pytest.fixture
def shell(operators: Operators, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A session `work` with a shell of this kind."""
    (tmp_path / "user").mkdir()
    operators.extra["HOME"] = str(tmp_path / "user")
    operators.shell("work", command=SHELLS[request.param])
    return str(request.param)


def run(operators: Operators, *words: str, check: bool = False, **options: Any) -> dict[str, Any]:
    """The JSON of an `exec` in `work`; its exit status is checked if it has no error."""
    more = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    command = operators.start(
        "exec", "work", *(word.replace("_", "-") for word in more), "--", *words
    )
    code = command.process.wait(120)
    body: dict[str, Any] = command.json()
    assert not check or code == 0, command.output()
    return body | {"status": code}


all_shells = pytest.mark.parametrize("shell", SHELLS, indirect=True)


@all_shells
def test_commands_that_end(operators: Operators, shell: str) -> None:
    """Also when the shell cannot parse them, and when a line is left half typed before them."""
    operators("send", "work", "--text", "half a li")
    assert run(operators, "echo one; false")["exit_code"] == 1
    done = run(operators, "printf", "%s|", "it's", "a\tb", "two\nlines", "\\x", "é!x")
    assert (done["output"], done["exit_code"]) == ("it's|a\tb|two\nlines|\\x|é!x|", 0)
    assert (done["state"], done["encoding"], done["missing"]) == ("done", "utf-8", 0)
    assert done["truncated"] is False and done["end"] > done["offset"]
    several = run(operators, "echo one\necho two")
    assert several["output"] == "one\ntwo\n" and several["exit_code"] == 0
    wrong = run(operators, "echo )")
    assert wrong["state"] == "done" and wrong["exit_code"] in (1, 2, 127)
    assert ")" in wrong["output"] and "echo" not in wrong["output"].splitlines()[0]
    unfinished = run(operators, "echo 'abc")
    assert unfinished["state"] in ("interrupted", "done") and unfinished["exit_code"] != 0
    missing = run(operators, "no-such-command-1")
    assert missing["exit_code"] == 127 and "no-such-command-1" in missing["output"]
    assert run(operators, "true")["output"] == ""
    assert run(operators, "cd /; pwd")["output"] == "/\n"
    assert run(operators, "pwd")["output"] == "/\n"


@all_shells
def test_what_the_screen_and_the_history_show(operators: Operators, shell: str) -> None:
    operators("send", "work", "--text", "echo from a person", "--enter")
    operators("wait", "work", "--match", "^from a person$")
    operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
    run(operators, "echo by exec")
    run(operators, "printf 'no newline'")
    screen = operators.text("capture", "work")
    assert "echo by exec\nby exec\n" in screen
    for word in ("133", "criuctl", "eval", "\\0"):
        assert word not in screen
    if shell == "dash":
        return
    operators("send", "work", "--keys", "Up")
    operators("wait", "work", "--match", "echo from a person", "--timeout", TIMEOUT)
    run(operators, "true")  # in the place of a line of the history
    at = operators("send", "work", "--text", "history | cat", "--enter")["offset"]
    operators("wait", "work", "--prompt", "--since", at, "--timeout", TIMEOUT)
    known = "\n".join(operators("capture", "work", "--since", at)["lines"])
    assert "echo from a person" in known
    assert "exec" not in known and "newline" not in known and " true" not in known


@all_shells
def test_interrupts_and_time_limits(operators: Operators, shell: str) -> None:
    started = operators.start("exec", "work", "--", "echo on; sleep 1000")
    operators.runs("work", "sleep")
    operators("send", "work", "--keys", "C-c")
    assert started.process.wait(TIMEOUT) == 130
    body = started.json()
    assert (body["state"], body["exit_code"]) == ("interrupted", None)
    assert body["output"].startswith("on\n")
    late = run(operators, "echo before; sleep 1000", timeout="0.5")
    assert (late["status"], late["state"], late["exit_code"]) == (12, "timed-out", None)
    assert late["output"] == "before\n" and late["error"]["code"] == "timed-out"
    operators.runs("work", "sleep")
    busy = run(operators, "echo no")
    assert busy["status"] == 9 and late["command_id"] in busy["error"]["message"]
    on = operators("output", "work", "--command", late["command_id"])
    assert (on["state"], on["output"]) == ("running", "before\n")
    ended = operators("kill", "work", "--command", late["command_id"])
    assert (ended["state"], ended["output"][:7]) == ("interrupted", "before\n")
    for action in ("interrupt", "kill"):
        late = run(operators, "echo before; sleep 1000", timeout="0.5", on_timeout=action)
        assert (late["status"], late["state"]) == (12, "timed-out")
        record = operators("output", "work", "--command", late["command_id"])
        assert record["state"] == "interrupted"
    silent = run(operators, "echo once; sleep 1000", no_output_timeout="0.5", on_timeout="kill")
    assert (silent["status"], silent["output"][:5]) == (12, "once\n")
    assert "printed nothing" in silent["error"]["message"]
    assert run(operators, "echo again")["output"] == "again\n"


@pytest.mark.parametrize("shell", POSIX, indirect=True)
def test_options_of_the_shell(operators: Operators, shell: str) -> None:
    assert run(operators, "set -u")["exit_code"] == 0
    assert run(operators, "set -x")["exit_code"] == 0
    assert "echo seen" in run(operators, "echo seen")["output"]
    run(operators, "set +x")
    assert run(operators, "set -e")["exit_code"] == 0
    assert run(operators, "echo on")["output"] == "on\n"
    died = run(operators, "echo last; false")
    assert (died["state"], died["exit_code"], died["status"]) == ("shell-died", None, 3)
    assert died["output"] == "last\n" and died["error"]["code"] == "session-gone"


@all_shells
def test_a_shell_that_ends(operators: Operators, shell: str) -> None:
    died = run(operators, "echo bye; exit 4")
    assert (died["state"], died["exit_code"], died["status"]) == ("shell-died", None, 3)
    assert died["output"].startswith("bye\n")
    assert operators("status", "work")["exit_code"] == 4


@all_shells
def test_a_shell_that_becomes_another_program(operators: Operators, shell: str) -> None:
    died = run(operators, "echo bye; exec cat")
    assert (died["state"], died["status"]) == ("shell-died", 3)
    refused = run(operators, "echo no")
    assert refused["status"] == 9 and "cat is in the foreground" in refused["error"]["message"]


@pytest.mark.parametrize("shell", ["bash", "dash"], indirect=True)
def test_a_question_is_not_answered(operators: Operators, shell: str) -> None:
    """Nothing at all is typed into what is no prompt."""
    operators(
        "send", "work", "--text", "printf 'Delete everything? '; read x; echo [$x]", "--enter"
    )
    operators("wait", "work", "--match", r"everything\? $", "--timeout", TIMEOUT)
    operators("wait", "work", "--reading", "--timeout", TIMEOUT)
    at = operators("status", "work")["offset"]
    refused = run(operators, "yes")
    assert refused["status"] == 9 and "not at its prompt" in refused["error"]["message"]
    assert operators("status", "work")["offset"] == at
    operators("send", "work", "--text", "no", "--enter")
    operators("wait", "work", "--match", r"^\[no\]$", "--timeout", TIMEOUT)


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_a_nested_shell_is_refused_and_forced(operators: Operators, shell: str) -> None:
    operators("send", "work", "--text", "PS1='nested> ' bash --norc", "--enter")
    operators("wait", "work", "--match", "nested> $", "--timeout", TIMEOUT)
    refused = run(operators, "echo no")
    assert refused["status"] == 9
    assert refused["error"]["foreground"]["argv"] == ["bash", "--norc"]
    forced = operators("exec", "work", "--force", "--", "echo forced; (exit 3)", check=False)
    assert (forced["output"], forced["exit_code"]) == ("forced\n", 3)
    late = operators(
        "exec", "work", "--force", "--timeout", "1", "--", "echo on; sleep 1000", check=False
    )
    assert (late["state"], late["output"]) == ("timed-out", "on\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"], indirect=True)
def test_line_editors_in_odd_states(operators: Operators, shell: str) -> None:
    """vi's command mode, a search in the history, the rest of a command."""
    run(operators, "set -o vi" if shell == "bash" else "bindkey -v")
    assert run(operators, "echo insert")["output"] == "insert\n"
    operators("send", "work", "--text", "some text", "--keys", "Escape b")
    operators("wait", "work", "--idle", "0.7")
    assert run(operators, "echo command mode")["output"] == "command mode\n"
    run(operators, "set -o emacs" if shell == "bash" else "bindkey -e")
    operators("send", "work", "--text", "echo typed", "--enter")
    operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
    operators("send", "work", "--keys", "C-r t y")
    operators("wait", "work", "--match", "search", "--timeout", TIMEOUT)
    assert run(operators, "echo searching")["output"] == "searching\n"
    operators("send", "work", "--text", "if true", "--enter")
    operators("wait", "work", "--match", "^(if)?> ", "--timeout", TIMEOUT)
    refused = run(operators, "echo no")
    assert refused["status"] == 9
    operators("send", "work", "--keys", "C-c")
    operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
    assert run(operators, "echo again")["output"] == "again\n"


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_bytes_and_control_sequences(operators: Operators, shell: str) -> None:
    binary = run(operators, r"printf 'a\377\n'")
    assert binary["encoding"] == "base64"
    assert base64.b64decode(binary["output"]) == b"a\xff\n"
    red = r"printf '\033[31mred\033[0m\n'"
    assert run(operators, red)["output"] == "\x1b[31mred\x1b[0m\n"
    plain = operators("exec", "work", "--plain", "--", red)
    assert plain["output"] == "red\n"


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_much_output(operators: Operators, shell: str) -> None:
    """47 MB: every byte comes, or is reported as missing."""
    body = run(operators, "seq 1 6000000")
    assert body["exit_code"] == 0
    whole = sum(len(str(n)) + 1 for n in range(1, 6000001))
    assert len(body["output"]) + body["missing"] >= whole
    assert body["truncated"] == (body["missing"] > 0)
    if not body["missing"]:
        assert len(body["output"]) == whole and body["output"].endswith("\n6000000\n")
    old = operators("output", "work", "--command", body["command_id"])
    assert old["missing"] > 0 and old["truncated"] is True
    assert old["output"].endswith("\n6000000\n")


@all_shells
def test_a_command_object(operators: Operators, shell: str) -> None:
    """Started and left alone, it is waited for, looked at in parts, and kept after its end."""
    detached = operators.start(
        "exec", "work", "--detach", "--", "echo one; sleep 1; echo two; sh -c 'exit 7'"
    )
    assert detached.process.wait(TIMEOUT) == 0
    command = detached.json()["command_id"]
    assert set(detached.json()) == {"session", "command_id", "offset"}
    second = run(operators, "echo mixed")
    assert second["status"] in (9, 0)
    ended = operators("wait", "work", "--command", command, "--timeout", TIMEOUT, check=False)
    assert (ended["state"], ended["exit_code"]) == ("done", 7)
    assert ended["output"] == "one\ntwo\n"
    part = operators(
        "output", "work", "--command", command, "--since", ended["end"] - 5, check=False
    )
    assert part["output"] == "two\n"
    assert operators("output", "work", "--command", "c99", check=False)["error"]["exit_code"] == 3


@pytest.mark.parametrize("shell", ["bash", "dash"], indirect=True)
def test_a_command_outlives_a_new_holder_and_a_restore(operators: Operators, shell: str) -> None:
    end = operators.home.path / "end"
    text = f"echo one; until test -e {end}; do sleep 0.1; done; echo two; sh -c 'exit 7'"
    command = operators("exec", "work", "--detach", "--", text)["command_id"]
    operators("dump", "work")
    operators("restore", "work", "--detach")
    with_new_holder = operators("output", "work", "--command", command)
    assert (with_new_holder["state"], with_new_holder["output"]) == ("running", "one\n")
    end.touch()
    ended = operators("wait", "work", "--command", command, "--timeout", TIMEOUT, check=False)
    assert (ended["state"], ended["exit_code"], ended["output"]) == ("done", 7, "one\ntwo\n")
    operators("dump", "work")
    operators("kill", "work", "--timeout", 0)
    operators("restore", "work", "--detach")
    again = operators("output", "work", "--command", command, check=False)
    assert (again["state"], again["exit_code"], again["output"]) == ("done", 7, "one\ntwo\n")
    assert run(operators, "echo after")["output"] == "after\n"


@pytest.mark.parametrize("shell", WITH_EDITOR, indirect=True)
def test_many_at_once_are_not_mixed(operators: Operators, shell: str) -> None:
    """One runs, the others are refused; what a person types meanwhile comes after it."""
    started = [
        operators.start("exec", "work", "--", f"echo begin-{n}; sleep 0.3; echo end-{n}")
        for n in range(4)
    ]
    codes = [command.process.wait(TIMEOUT) for command in started]
    assert 0 in codes and set(codes) <= {0, 9}
    for n, command in enumerate(started):
        if codes[n] == 0:
            assert command.json()["output"] == f"begin-{n}\nend-{n}\n"
    shown = re.findall(r"^(?:begin|end)-\d$", operators.text("capture", "work"), re.MULTILINE)
    assert shown == [f"{word}-{line[-1]}" for line in shown[::2] for word in ("begin", "end")]


def test_a_shell_that_has_just_started_is_waited_for(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", *SHELLS["bash"])
    assert run(operators, "echo ready")["output"] == "ready\n"
    began = time.monotonic()
    operators("send", "work", "--text", "sleep 1000", "--enter")
    operators.runs("work", "sleep")
    refused = run(operators, "true")
    assert refused["status"] == 9 and "sleep 1000 is in the foreground" in str(refused["error"])
    assert time.monotonic() - began < TIMEOUT
    wait_until(lambda: operators("status", "work")["foreground"] is not None, TIMEOUT, "it sleeps")
