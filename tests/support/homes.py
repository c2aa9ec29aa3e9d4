"""Two hosts in one: homes that have a name in the leases and folders of their own each, and the
store in common.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from .command import Home
from .keeper import Keeper
from .operating import Operators
from .supervising import PATIENCE

Homes = Callable[[str], Operators]


@pytest.fixture
def homes(keeper: Keeper, home: Home) -> Iterator[Homes]:
    """Makes homes by name; their supervisors, and then their sessions, are ended before the leak
    guard looks.
    """
    made: list[Operators] = []

    def make(name: str) -> Operators:
        own = replace(home, path=home.path / name, run=home.run / name)
        for folder in (own.path, own.run):
            folder.mkdir(mode=0o700)
        operators = Operators(keeper, own)
        operators.store = home.path / "store"
        operators.extra |= {"CRIUCTL_HOST_ID": name, "CRIUCTL_KEY_DIR": str(home.path / "keys")}
        made.append(operators)
        return operators

    yield make
    for operators in made:
        for running in operators.running:
            running.kill(signal.SIGTERM)
            running.wait(PATIENCE)
    for operators in made:
        operators.close()
