"""Sessions as people use them: the command line in a process of its own, and `attach` on a real
terminal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pexpect

from . import oracle
from .command import Command, Criuctl, Home
from .keeper import Keeper, wait_until

TIMEOUT = 60  # seconds for what takes milliseconds on an idle machine


class Operators(Criuctl):
    """`criuctl` of one test, and the terminals that it is attached to."""

    def __init__(self, keeper: Keeper, home: Home) -> None:
        super().__init__(keeper, home)
        self.extra = {
            "PS1": "$ ",
            "TERM": "xterm-256color",
            "HISTFILE": "",
            "LANG": "C.UTF-8",
            "CRIUCTL_OPERATOR": "tester",
        }
        self.windows: list[pexpect.spawn[bytes]] = []

    def window(
        self, *arguments: str, rows: int = 24, columns: int = 80, env: dict[str, str] | None = None
    ) -> pexpect.spawn[bytes]:
        """A terminal in which ``criuctl ARGUMENTS`` runs."""
        window: pexpect.spawn[bytes] = pexpect.spawn(
            sys.executable,
            ["-m", "criuctl", *arguments],
            dimensions=(rows, columns),
            env=self.environment() | (env or {}),
            cwd=str(self.home.path),
            timeout=TIMEOUT,
        )
        window.delaybeforesend = None
        self.windows.append(window)
        return window

    def start(
        self,
        *arguments: str | int | Path,
        env: Mapping[str, str] | None = None,
        json_output: bool = True,
    ) -> Command:
        """As `Criuctl.start`; ``--json`` comes first, for behind a ``--`` it would be the
        session's.
        """
        return super().start(
            *(["--json"] if json_output else []), *arguments, env=env, json_output=False
        )

    def shell(
        self, name: str, *options: str, command: tuple[str, ...] = ("bash", "--norc", "--noprofile")
    ) -> dict[str, Any]:
        """A detached session that runs a shell, at its prompt."""
        body: dict[str, Any] = self("run", "-d", "--name", name, *options, "--", *command)
        self("wait", name, "--prompt", "--timeout", TIMEOUT)
        return body

    def text(self, *arguments: str | int | Path, code: int = 0) -> str:
        """What a command prints for people."""
        command = self.start(*arguments, json_output=False)
        ended = command.process.wait(120)
        assert ended == code, f"criuctl {arguments} ended with {ended}\n{command.output()}"
        return command.out.read_text(errors="replace")

    def runs(self, name: str, command: str) -> None:
        """Wait until a process of that session is `command`; what was typed takes a moment to
        become one.
        """
        root: int = self("status", name)["pid"]
        wait_until(
            lambda: any(
                oracle.read(f"/proc/{pid}/comm").strip() == command for pid in oracle.tree(root)
            ),
            TIMEOUT,
            f"{command} runs in {name}",
        )

    def close(self) -> None:
        """Close the terminals and end every session."""
        for window in self.windows:
            if window.isalive():
                os.kill(pid_of(window), signal.SIGCONT)
            with contextlib.suppress(pexpect.ExceptionPexpect):
                window.close(force=True)
        for session in self("ls"):
            if session["state"] in ("running", "paused", "checkpointed") or session["holder"]:
                self("kill", session["session"], "--timeout", 0, check=False)


def pid_of(window: pexpect.spawn[bytes]) -> int:
    """The PID of the window's program."""
    assert window.pid is not None
    return window.pid


def ended(window: pexpect.spawn[bytes]) -> int:
    """Wait until the window's program has ended: its exit code."""
    window.expect(pexpect.EOF)
    window.close()
    assert window.exitstatus is not None, f"ended by signal {window.signalstatus}"
    return window.exitstatus


def literally(text: str) -> bytes:
    """As a regular expression."""
    return re.escape(text.encode())
