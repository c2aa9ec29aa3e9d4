"""Hooks that let a session's shell report its prompts, and take commands from the holder.

An interactive shell that is a session's command is started so that it reads a small program of the
folder ``shells`` first or last, and otherwise starts as it would have: bash by ``--rcfile`` (which
reads the user's own), as a login shell by ``ENV`` (the same), or, where it reads none, by
``PROMPT_COMMAND``; zsh by ``ZDOTDIR``; fish by ``--init-command``; sh by ``ENV``, if it is dash or
bash.  The variables that pass all this on are removed by that program before the first prompt, so
no program that the shell starts inherits them.

The hooks print marks, which terminals ignore or use to find prompts (OSC 133):

    ESC ] 133 ; A ; aid=NONCE ; n=N ; pid=PID BEL    a prompt begins, the N-th of the shell PID
    ESC ] 133 ; A ; k=s ; aid=NONCE BEL              the prompt for the rest of a command
    ESC ] 133 ; B ; aid=NONCE BEL                    a prompt has ended (sh only)
    ESC ] 133 ; C ; aid=NONCE ; n=N BEL              the command typed there begins (not sh)
    ESC ] 133 ; D ; STATUS ; aid=NONCE ; n=N BEL     ... has ended
    ESC ] 7133 ; R ; aid=NONCE ; n=N BEL             the holder's key was pressed (not sh)

NONCE is known to the shell and to the holder alone (a variable that is not exported), so the output
of another program is not taken for a mark; N grows, so a mark in a copy of earlier output is not.

The holder's key, C-^, is bound in all key maps.  The hook answers it by the
mark R, then reads the command up to an end character (fish: behind eight digits with its size) and
runs it in the place of the line that is half typed, without a trace in the history.  Each byte that
an editor or a terminal could interpret is sent as an octal escape.  Where a program other than the
shell gets the key, it gets that one control character and no command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "shells"
NONCE = "CRIUCTL_SHELL"  # the variable that passes it on
_SHELLS = {"bash": "bash", "zsh": "zsh", "fish": "fish", "sh": "sh", "dash": "sh"}
_PROMPT_COMMAND = '. "$CRIUCTL_SHELL_DIR/bash.sh"'
_WITH_VALUE = {
    "bash": frozenset(("--rcfile", "--init-file", "-o", "+o", "-O", "+O")),
    "zsh": frozenset(("-o", "+o", "--emulate")),
    "fish": frozenset(("-C", "--init-command", "-d", "--debug", "-f", "--features", "-o")),
    "sh": frozenset(("-o", "+o")),
}


class Hooked(NamedTuple):
    """How to start a shell with hooks."""

    shell: str  # bash, zsh, fish, or sh for sh and dash
    argv: list[str]
    env: dict[str, str]


def hooked(argv: Sequence[str], env: Mapping[str, str], nonce: str) -> Hooked | None:
    """Return how to start this command with hooks; None: it is no interactive shell known here."""
    shell = _SHELLS.get(os.path.basename(argv[0]))
    options = None if shell is None else _options(shell, argv[1:])
    if shell is None or options is None:
        return None
    variables = {**env, NONCE: nonce, "CRIUCTL_SHELL_DIR": str(FOLDER)}
    words = list(argv)
    if shell == "bash":
        words = _bash(words, options, env, variables)
    elif shell == "zsh":
        words = _zsh(words, options, env, variables)
    elif shell == "fish":
        words[1:1] = ["--init-command", 'source "$CRIUCTL_SHELL_DIR/fish.fish"']
    else:
        if "ENV" in env:
            variables["CRIUCTL_SHELL_ENV"] = env["ENV"]
        variables["ENV"] = str(FOLDER / "sh.sh")
        for prompt in ("PS1", "PS2"):
            if prompt in env:
                variables[f"CRIUCTL_SHELL_{prompt}"] = variables.pop(prompt)
    return Hooked(shell, words, variables)


def _options(shell: str, words: Sequence[str]) -> dict[str, str] | None:
    """Return the options with their values; None for a shell that is not interactive."""
    found: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word[:1] not in ("-", "+") or word in ("-", "--"):
            return None  # a script and its arguments
        value = ""
        if word in _WITH_VALUE[shell]:
            at += 1
            if at >= len(words):
                return None
            value = words[at]
        elif not word.startswith("--") and any(letter in word for letter in "cns"):
            return None  # a command, standard input, or a restricted shell
        elif word.startswith(("--command", "--restricted", "--version", "--help", "--no-execute")):
            return None
        found[word] = value
        at += 1
    return found


def _bash(
    words: list[str], options: Mapping[str, str], env: Mapping[str, str], variables: dict[str, str]
) -> list[str]:
    login = any(
        option == "--login" or (option[0] == "-" and option[1] != "-" and "l" in option)
        for option in options
    )
    if login and "--posix" not in options:
        wanted = [] if "--noprofile" in options else ["profile"]
        variables["CRIUCTL_SHELL_LOGIN"] = " ".join(
            wanted if "HISTFILE" in env else [*wanted, "history"]
        )
        if "ENV" in env:
            variables["CRIUCTL_SHELL_ENV"] = env["ENV"]
        variables["ENV"] = str(FOLDER / "bash.sh")
        return [words[0], "--posix", *words[1:]]
    if options.keys() & {"--norc", "--posix"}:
        if "PROMPT_COMMAND" in env:
            variables["CRIUCTL_SHELL_PROMPT_COMMAND"] = env["PROMPT_COMMAND"]
        variables["PROMPT_COMMAND"] = _PROMPT_COMMAND
        return words
    home = env.get("HOME", "")
    variables["CRIUCTL_SHELL_RC"] = f"{home}/.bashrc" if home else ""
    kept, at = [], 1
    while at < len(words):
        if words[at] in ("--rcfile", "--init-file"):
            variables["CRIUCTL_SHELL_RC"] = words[at + 1]
            at += 1
        else:
            kept.append(words[at])
        at += 1
    return [words[0], "--rcfile", str(FOLDER / "bash.sh"), *kept]


def _zsh(
    words: list[str], options: Mapping[str, str], env: Mapping[str, str], variables: dict[str, str]
) -> list[str]:
    if "ZDOTDIR" in env:
        variables["CRIUCTL_SHELL_ZDOTDIR"] = env["ZDOTDIR"]
    variables["ZDOTDIR"] = str(FOLDER / "zsh")
    kept = []
    for word in words:
        if word in ("--no-rcs", "--norcs"):
            variables["CRIUCTL_SHELL_NO_RCS"] = "1"
        elif word in options and word[0] == "-" and word[1] != "-" and "f" in word:
            # It would not read .zshenv, which does the same.
            variables["CRIUCTL_SHELL_NO_RCS"] = "1"
            if word != "-f":
                kept.append(word.replace("f", ""))
        else:
            kept.append(word)
    return kept
