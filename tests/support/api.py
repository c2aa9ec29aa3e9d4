"""What the tests of the Python API share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from criuctl import Session

from .command import Command, Criuctl

BASH = ("bash", "--norc", "--noprofile")
Shell = Callable[[str], Session]
"""Starts a shell as a session of this name, and waits for its prompt."""


def program(criuctl: Criuctl, text: str, env: Mapping[str, str] | None = None) -> Command:
    """Start a Python program that uses the API."""
    number = len(criuctl.running)
    out, err = (criuctl.home.path / f"program-{number}.{kind}" for kind in ("out", "err"))
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = criuctl.keeper.spawn(
            [sys.executable, "-c", text],
            env=criuctl.environment() | dict(env or {}),
            cwd=criuctl.home.path,
            stdout=stdout,
            stderr=stderr,
        )
    criuctl.running.append(process)
    return Command(process, out, err)
