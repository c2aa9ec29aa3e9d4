"""Fixtures of the tests of sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.command import Home
from support.holding import Holders


@pytest.fixture
def holders(home: Home) -> Iterator[Holders]:
    """Starts holders; whatever is left of them is ended before the leak guard looks."""
    holders = Holders(home)
    yield holders
    holders.close()
