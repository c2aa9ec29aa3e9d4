"""Fixtures of the tests of the Python API, which they use in their own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api import BASH, Shell, in_this_process
from support.command import Home
from support.keeper import Keeper
from support.operating import TIMEOUT, Operators

from criuctl import Session


@pytest.fixture
def operators(keeper: Keeper, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """criuctl's command line, and the API in this process."""
    yield from in_this_process(keeper, home, monkeypatch)


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
