"""criuctl as a user runs it: ``criuctl ... --json`` in a process of its own, with stores and state
of one test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .keeper import Keeper, Launched

PROJECT = Path(__file__).parent.parent.parent
pytest_plugins = ["servers.fixtures"]


@dataclass(frozen=True)
class Home:
    """The folders of one test; all of them bear its token."""

    token: str
    path: Path  # anything on disk
    run: Path  # tmpfs: plain images and locks of criuctl


class Criuctl:
    """Runs ``criuctl ... --json`` the way a user would, with stores and state of this test's
    own.
    """

    def __init__(self, keeper: Keeper, home: Home) -> None:
        self.keeper = keeper
        self.home = home
        self.store = home.path / "store"
        self.extra: dict[str, str] = {}  # more environment for every later command
        self.prefix: list[str] = []  # a program that runs every later command
        self.running: list[Launched] = []
        self._count = 0

    def environment(self) -> dict[str, str]:
        """What criuctl sees: the caller's environment without its own CRIUCTL_*, and this test's
        folders.
        """
        env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CRIUCTL_", "AWS_"))
        }
        for key in ("CRIUCTL_CRIU", "CRIUCTL_TRACK_WRITES_MIB"):
            if os.environ.get(key):
                env[key] = os.environ[key]
        return env | {
            "CZOO_TOKEN": self.home.token,
            "PYTHONPATH": str(PROJECT),
            "CRIUCTL_STORE": str(self.store),
            "CRIUCTL_STATE_DIR": str(self.home.path / "state"),
            "CRIUCTL_CACHE_DIR": str(self.home.path / "cache"),
            "CRIUCTL_KEY_DIR": str(self.home.path / "keys"),
            "CRIUCTL_RUN_DIR": str(self.home.run),
            "CRIUCTL_HOOK_DIRS": str(self.home.path / "hooks"),
            **self.extra,
        }

    def start(
        self,
        *arguments: str | int | Path,
        env: Mapping[str, str] | None = None,
        json_output: bool = True,
    ) -> Command:
        """Start a command and return at once."""
        self._count += 1
        argv = [
            *self.prefix,
            sys.executable,
            "-m",
            "criuctl",
            *map(str, arguments),
            *(["--json"] if json_output else []),
        ]
        out, err = (
            self.home.path / f"command-{self._count}.out",
            self.home.path / f"command-{self._count}.err",
        )
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = self.keeper.spawn(
                argv,
                env=self.environment() | dict(env or {}),
                cwd=self.home.path,
                stdout=stdout,
                stderr=stderr,
            )
        self.running.append(process)
        return Command(process, out, err)

    def __call__(
        self,
        *arguments: str | int | Path,
        check: bool = True,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """Run a command to its end: its JSON.  With `check` False the answer has ``exit_code`` and,
        in it, ``error``.
        """
        command = self.start(*arguments, env=env)
        code = command.process.wait(timeout)
        if check:
            assert code == 0, (
                f"criuctl {' '.join(map(str, arguments))} ended with {code}\n{command.output()}"
            )
            return command.json()
        answer = command.json() if command.out.stat().st_size else {}
        return {
            "exit_code": code,
            "stderr": command.err.read_text(),
            **(answer if isinstance(answer, dict) else {"list": answer}),
        }


@dataclass
class Command:
    """A criuctl that was started: its process and what it writes."""

    process: Launched
    out: Path
    err: Path

    def json(self) -> Any:
        """The one JSON value on stdout."""
        try:
            return json.loads(self.out.read_text())
        except ValueError as error:
            raise AssertionError(
                f"stdout is not one JSON value ({error})\n{self.output()}"
            ) from error

    def output(self) -> str:
        """All that it wrote to stdout and stderr."""
        return (
            f"stdout: {self.out.read_text(errors='replace')}\nstderr: "
            f"{self.err.read_text(errors='replace')}"
        )
