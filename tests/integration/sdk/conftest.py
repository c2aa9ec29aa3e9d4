"""Fixtures of the tests of the Python API, which they use in their own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api import BASH, Shell
from support.command import Home
from support.keeper import Keeper
from support.operating import TIMEOUT, Operators

from criuctl import Session
from criuctl.sdk import worker


@pytest.fixture
def operators(keeper: Keeper, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
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


@pytest.fixture
def shell(operators: Operators) -> Iterator[Shell]:
    """Starts shells as sessions, at their prompt, by the API."""
    made: list[Session] = []

    def start(name: str) -> Session:
        session = Session.run(BASH, name=name)
        made.append(session)
        session.wait_prompt(timeout=TIMEOUT)
        return session

    yield start
    for session in made:
        session.close()
