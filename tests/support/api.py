"""What the tests of the Python API share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from criuctl import Session
from criuctl.sdk import worker

from .command import Command, Criuctl, Home
from .keeper import Keeper
from .operating import Operators

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


def in_this_process(
    keeper: Keeper, home: Home, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operators]:
    """criuctl's command line, and its environment and folder in this process too; every session is
    ended before the leak guard looks.
    """
    operators = Operators(keeper, home)
    for key, value in operators.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(home.path)
    yield operators
    operators.close()
    worker.close()
