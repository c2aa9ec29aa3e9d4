"""Fixtures of the attacks: another user, and that user's programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.command import Criuctl, Home
from support.identity import Identity
from support.laboratory import Laboratory


@pytest.fixture
def identity(home: Home) -> Iterator[Identity]:
    """A set of namespaces whose root can dump every user's processes."""
    identity = Identity(home.token)
    yield identity
    identity.close()


@pytest.fixture
def lab(criuctl: Criuctl, home: Home, identity: Identity) -> Iterator[Laboratory]:
    """A user, and programs of that user that can be dumped."""
    lab = Laboratory(criuctl, home, identity)
    yield lab
    for pid in lab.processes():
        try:
            lab.end(pid)
        except ProcessLookupError:
            pass  # it went with another one
