"""Fixtures of the tests of the commands on sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.command import Home
from support.keeper import Keeper
from support.operating import Operators


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl and terminals; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()
