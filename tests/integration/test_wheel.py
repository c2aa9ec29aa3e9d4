"""The wheel in a new environment of a user's own: what it brings, how the host is prepared from
there, and the first session.

pip uses the package index that this machine is configured for, as scripts/setup does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import PROJECT, Home

pytestmark = [pytest.mark.integration, pytest.mark.slow]

_TIMEOUT = 240
_HEAVY = {"aiohttp", "prometheus_client", "prometheus-client", "mcp", "uvicorn", "pydantic"}


class Installed:
    """An environment with nothing but the wheel."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.bin = home.path / "venv/bin"

    def run(
        self, program: str, *words: str | Path, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment as a user with a usual environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CRIU"))}
        folders = {
            "CRIUCTL_STORE": self._home.path / "store",
            **{f"CRIUCTL_{n}_DIR": self._home.path / n for n in ("STATE", "CACHE", "KEY")},
            "CRIUCTL_RUN_DIR": self._home.run,
            "CZOO_TOKEN": self._home.token,
        }
        done = subprocess.run(
            [self.bin / program, *words],
            env=environment | {name: str(path) for name, path in folders.items()},
            cwd=self._home.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    def answer(self, *words: str, code: int = 0) -> Any:
        """Run criuctl; its JSON."""
        return json.loads(self.run("criuctl", "--json", *words, code=code).stdout)


@pytest.fixture
def installed(home: Home) -> Iterator[Installed]:
    """The wheel of this checkout, built and installed by pip."""
    installed = Installed(home)
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "venv", home.path / "venv"], check=True)
    wheels = home.path / "wheels"
    installed.run("python", *pip, "wheel", "--no-deps", "-w", wheels, PROJECT)
    (wheel,) = wheels.glob("*.whl")
    installed.run("python", *pip, "install", wheel)
    yield installed
    installed.run("criuctl", "kill", "first", code=None)  # what a failed test has left


def test_from_the_wheel_to_a_restored_session(installed: Installed) -> None:
    listed = json.loads(installed.run("python", "-m", "pip", "list", "--format", "json").stdout)
    assert not _HEAVY & {one["name"].lower() for one in listed}
    assert installed.run("criuctl", "--version").stdout.startswith("criuctl ")
    installed.run("python", "-c", "import criuctl.inside; from criuctl import Session")

    found = installed.answer("doctor", code=13)["findings"]
    errors = [one for one in found if one["level"] == "error"]
    assert ["pycriu" in one["text"] for one in errors] == [True]
    assert f"{installed.bin}/criuctl doctor --fix" in errors[0]["hint"]
    assert any("cannot be dumped" in one for one in _run(installed)["warnings"])
    installed.run("criuctl", "kill", "first")

    installed.run("criuctl", "doctor", "--fix", "--yes")
    again = installed.run("criuctl", "doctor", "--fix", "--yes")
    assert "installing" not in again.stderr, "a second run has nothing to do"

    assert _run(installed)["warnings"] == []
    (listed,) = installed.answer("ps")
    assert (listed["session"], listed["state"]) == ("first", "running")
    installed.run("criuctl", "dump", "first")
    installed.run("criuctl", "restore", "first")
    installed.run("criuctl", "kill", "first")
    assert installed.answer("ps") == []

    share = ("share", "first", "--via", "ssh://relay.example")
    for words in (("ui",), ("metrics",), ("mcp",), ("acp",), share):
        hint = installed.answer(*words, code=13)["error"]["hint"]
        extra = f".[{words[0]}]"
        command = f"{installed.bin}/python -m pip install '{extra}'"
        assert hint == f"Run in a clone of criuctl: `{command}`."


def _run(installed: Installed) -> Any:
    return installed.answer("run", "-d", "--name", "first", "--", "sleep", "600")
