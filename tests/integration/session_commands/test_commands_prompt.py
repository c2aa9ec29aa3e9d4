"""When a session's shell is at its prompt, and when it only looks so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

SHELLS = {
    "bash": ("bash", "--norc", "--noprofile"),
    "login-bash": ("bash", "--login"),
    "rc-bash": ("bash",),
    "zsh": ("zsh", "-f"),
    "rc-zsh": ("zsh",),
    "fish": ("fish", "--private"),
    "dash": ("dash",),
    "sh": ("sh",),
}
ASKS = {
    "bash": "read -p 'Delete everything?' answer; echo \"got $answer\"",
    "zsh": "read 'answer?Delete everything?'; echo \"got $answer\"",
    "fish": "read -P 'Delete everything?' answer; echo \"got $answer\"",
    "sh": "printf 'Delete everything?'; read answer; echo \"got $answer\"",
}
RC = """
PROMPT_COMMAND='true; mine=$((mine + 1))'
PS1='my prompt> '
"""


def at_prompt(operators: Operators) -> bool:
    return bool(operators("status", "work")["foreground"]["at_prompt"])


@pytest.fixture
def rc_files(operators: Operators, tmp_path: Path) -> Path:
    """A home of the user's own, with rc files."""
    folder = tmp_path / "user"
    folder.mkdir()
    for name in (".bashrc", ".bash_profile"):
        (folder / name).write_text(RC)
    (folder / ".zshrc").write_text("precmd() { mine=$((mine + 1)) }\nPS1='my prompt> '\n")
    operators.extra |= {"HOME": str(folder), "ZDOTDIR": str(folder)}
    return folder


def prompt(operators: Operators, *since: Any) -> str:
    answer = operators("wait", "work", "--prompt", *since, "--timeout", TIMEOUT)
    return str(answer["shell"])


@pytest.mark.parametrize("kind", SHELLS)
@pytest.mark.usefixtures("rc_files")
def test_a_question_is_no_prompt(operators: Operators, kind: str) -> None:
    """The shell itself reads the terminal then, by its builtin."""
    command = SHELLS[kind]
    shell = {"dash": "sh"}.get(kind, command[0])
    operators.shell("work", command=command)
    assert prompt(operators) == shell and at_prompt(operators)
    operators("send", "work", "--text", ASKS[shell], "--enter")
    operators("wait", "work", "--match", r"everything\?$", "--timeout", TIMEOUT)
    asks = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
    assert (asks["reading_tty"], asks["at_prompt"], asks["shell"]) == (True, False, shell)
    late = operators("wait", "work", "--prompt", "--timeout", "0.3", check=False)
    assert late["exit_code"] == 12
    at = operators("send", "work", "--text", "no", "--enter")["offset"]
    operators("wait", "work", "--match", "^got no$", "--timeout", TIMEOUT)
    prompt(operators, "--since", at)
    at = operators("send", "work", "--text", "sleep 0.5", "--enter")["offset"]
    prompt(operators, "--since", at)
    if kind.startswith(("rc", "login")):
        operators("send", "work", "--text", "echo mine is $mine.", "--enter")
        operators("wait", "work", "--match", r"^mine is \d+\.$", "--timeout", TIMEOUT)
        assert "my prompt>" in operators.text("capture", "work")


def test_nested_and_half_typed(operators: Operators) -> None:
    """What is half typed is a prompt, the rest of a command and another shell are none."""
    operators.shell("work")
    operators("send", "work", "--text", "half a li")
    prompt(operators)
    operators("send", "work", "--keys", "C-u")
    operators("send", "work", "--text", "for x in 1 2; do", "--enter")
    operators("wait", "work", "--match", "^> ", "--timeout", TIMEOUT)
    operators("wait", "work", "--reading", "--timeout", TIMEOUT)
    assert not at_prompt(operators)
    operators("send", "work", "--keys", "C-c")
    prompt(operators)
    for nested in ("bash --norc", "dash"):
        operators("send", "work", "--text", f"TOKEN=nested {nested}", "--enter")
        operators.runs("work", nested.split()[0])
        found = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
        operators("wait", "work", "--idle", "0.3")
        assert (found["at_prompt"], found["shell"]) == (False, None)
        assert "CRIUCTL_SHELL" not in Path(f"/proc/{found['pid']}/environ").read_text()
        at = operators("send", "work", "--text", "exit", "--enter")["offset"]
        prompt(operators, "--since", at)


def test_an_sh_that_edits_lines_is_left_alone(operators: Operators, tmp_path: Path) -> None:
    """It would count marks in its prompt as text; without them it is at no prompt."""
    (tmp_path / "sh").symlink_to("/usr/bin/zsh")  # as busybox and mksh are elsewhere
    operators("run", "-d", "--name", "work", "--", tmp_path / "sh")
    operators("wait", "work", "--match", r"^\$ $", "--timeout", TIMEOUT)
    operators("wait", "work", "--reading", "--timeout", TIMEOUT)
    typed = "echo " + "0123456789" * 7 + " a"  # as wide as the terminal, almost
    operators("send", "work", "--text", typed)
    operators("wait", "work", "--idle", "0.3")
    assert operators.text("capture", "work").splitlines() == [f"$ {typed}"]
    operators("send", "work", "--keys", "C-u", "--text", ASKS["sh"], "--enter")
    operators("wait", "work", "--match", r"everything\?$", "--timeout", TIMEOUT)
    found = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
    assert (found["at_prompt"], found["shell"]) == (False, None)
    refused = operators("exec", "work", "--", "echo yes", check=False)
    assert refused["exit_code"] == 9 and "no shell is at its prompt" in refused["error"]["message"]
    assert "got" not in operators.text("capture", "work").splitlines()[-1]
    assert "CRIUCTL_SHELL" not in operators("exec", "work", "--new", "--", "env")["stdout"]


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish", "dash"])
def test_what_is_typed_with_an_interrupt_comes_behind_it(operators: Operators, kind: str) -> None:
    """A line editor that gets both at once would add it to the line that is interrupted, or lose
    it, or the next command.
    """
    operators.shell("work", command=SHELLS[kind])
    for number in range(2):
        operators("send", "work", "--text", "rm -r half a li")
        typed = ("--keys", "C-c", "--text", f"echo line {number}", "--enter")
        operators("send", "work", *typed)
        operators("wait", "work", "--match", f"^line {number}$", "--timeout", TIMEOUT)
        prompt(operators)
        operators("send", "work", "--keys", "C-c Up")
        operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
        assert operators("exec", "work", "--", "echo by exec")["output"] == "by exec\n"


def test_a_copy_of_the_output_is_no_prompt(operators: Operators, tmp_path: Path) -> None:
    operators.shell("work")
    operators("send", "work", "--text", "true", "--enter")
    prompt(operators)
    file = tmp_path / "output"
    file.write_bytes((operators.home.path / "state/holders/work/output").read_bytes()[4096:8192])
    assert b"133;A;" in file.read_bytes()
    operators("send", "work", "--text", f"cat {file} -", "--enter")
    operators.runs("work", "cat")
    operators("wait", "work", "--reading", "--timeout", TIMEOUT)
    assert not at_prompt(operators)
    operators("send", "work", "--keys", "C-c")
    prompt(operators)


def test_a_shell_without_hooks(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--no-shell-hooks", "--", "bash", "--norc")
    found = operators("wait", "work", "--reading", "--timeout", TIMEOUT)["foreground"]
    assert (found["at_prompt"], found["shell"]) == (False, None)


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish", "dash"])
def test_a_prompt_after_a_restore_and_a_new_holder(operators: Operators, kind: str) -> None:
    operators.shell("work", command=SHELLS[kind])
    operators("send", "work", "--text", "true", "--enter")
    prompt(operators)
    operators("dump", "work")
    operators("restore", "work", "--detach")
    shell = prompt(operators)
    operators("dump", "work", "--leave-running")
    at = operators("send", "work", "--text", "true", "--enter")["offset"]
    prompt(operators, "--since", at)
    operators("kill", "work", "--timeout", 0)
    operators("restore", "work", "--detach")  # earlier than what the output has shown
    assert prompt(operators) == shell
    at = operators("send", "work", "--text", "sleep 0.2", "--enter")["offset"]
    assert prompt(operators, "--since", at) == shell
