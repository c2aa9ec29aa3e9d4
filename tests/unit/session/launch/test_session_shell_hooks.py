"""How a shell is started so that it reports its prompts."""

from __future__ import annotations

import pytest

from criuctl.session.launch import shell_hooks
from criuctl.session.launch.shell_hooks import FOLDER, hooked

ENV = {"HOME": "/home/me", "PS1": "$ "}
HOOKS = {"CRIUCTL_SHELL": "ab12", "CRIUCTL_SHELL_DIR": str(FOLDER)}
RCFILE = ["--rcfile", str(FOLDER / "bash.sh")]
PROMPT_COMMAND = '. "$CRIUCTL_SHELL_DIR/bash.sh"'


@pytest.mark.parametrize(
    "words",
    [
        "make -j8",
        "bash -c true",
        "bash script",
        "bash -ec true",
        "bash -s",
        "bash --rcfile",
        "bash -- script",
        "bash --version",
        "rbash",
        "zsh -c true",
        "zsh script",
        "fish -c true",
        "fish --command=true",
        "fish -n",
        "sh script argument",
        "sh -c true",
        "dash -",
    ],
)
def test_what_is_no_interactive_shell(words: str) -> None:
    assert hooked(words.split(), ENV, "ab12") is None


@pytest.mark.parametrize(
    ("words", "argv", "more"),
    [
        ("bash", ["bash", *RCFILE], {"CRIUCTL_SHELL_RC": "/home/me/.bashrc"}),
        ("/bin/bash -i", ["/bin/bash", *RCFILE, "-i"], {"CRIUCTL_SHELL_RC": "/home/me/.bashrc"}),
        ("bash --rcfile rc -x", ["bash", *RCFILE, "-x"], {"CRIUCTL_SHELL_RC": "rc"}),
        ("bash -o vi", ["bash", *RCFILE, "-o", "vi"], {"CRIUCTL_SHELL_RC": "/home/me/.bashrc"}),
        ("bash --norc", ["bash", "--norc"], {"PROMPT_COMMAND": PROMPT_COMMAND}),
        (
            "bash -il",
            ["bash", "--posix", "-il"],
            {"ENV": f"{FOLDER}/bash.sh", "CRIUCTL_SHELL_LOGIN": "profile history"},
        ),
        (
            "bash --login --noprofile",
            ["bash", "--posix", "--login", "--noprofile"],
            {"ENV": f"{FOLDER}/bash.sh", "CRIUCTL_SHELL_LOGIN": "history"},
        ),
        ("zsh", ["zsh"], {"ZDOTDIR": f"{FOLDER}/zsh"}),
        ("zsh -f", ["zsh"], {"ZDOTDIR": f"{FOLDER}/zsh", "CRIUCTL_SHELL_NO_RCS": "1"}),
        ("zsh -fi", ["zsh", "-i"], {"ZDOTDIR": f"{FOLDER}/zsh", "CRIUCTL_SHELL_NO_RCS": "1"}),
        (
            "fish -N",
            ["fish", "--init-command", 'source "$CRIUCTL_SHELL_DIR/fish.fish"', "-N"],
            {},
        ),
    ],
)
def test_shells_with_hooks(words: str, argv: list[str], more: dict[str, str]) -> None:
    found = hooked(words.split(), ENV, "ab12")
    assert found is not None and found.argv == argv and found.env == ENV | HOOKS | more


def test_what_the_user_has_set_is_passed_on() -> None:
    """The hooks put it back under its own name; dash would go on exporting a PS1 it was given."""
    env = ENV | {"ENV": "$HOME/.shrc", "ZDOTDIR": "/z", "PROMPT_COMMAND": "true"}
    dash = hooked(["dash"], env, "ab12")
    assert dash is not None and dash.shell == "sh" and "PS1" not in dash.env
    assert dash.env["ENV"] == str(FOLDER / "sh.sh")
    assert (dash.env["CRIUCTL_SHELL_ENV"], dash.env["CRIUCTL_SHELL_PS1"]) == ("$HOME/.shrc", "$ ")
    zsh, bash = hooked(["zsh"], env, "ab12"), hooked(["bash", "--norc"], env, "ab12")
    assert zsh is not None and zsh.env["CRIUCTL_SHELL_ZDOTDIR"] == "/z"
    assert bash is not None and bash.env["CRIUCTL_SHELL_PROMPT_COMMAND"] == "true"


def test_the_programs_of_the_shells_are_there() -> None:
    for name in ("bash.sh", "sh.sh", "fish.fish", "zsh/.zshenv", "zsh/hooks.zsh"):
        assert (shell_hooks.FOLDER / name).is_file()
