"""Fixtures of the tests of the adapters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api import in_this_process
from support.command import Home
from support.engines import Job
from support.keeper import Keeper
from support.operating import Operators


@pytest.fixture
def operators(keeper: Keeper, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """criuctl's command line, and the API in this process."""
    yield from in_this_process(keeper, home, monkeypatch)


@pytest.fixture
def job(operators: Operators) -> Iterator[Job]:
    """A command that engines run, and their workers."""
    job = Job(operators)
    yield job
    job.close()
