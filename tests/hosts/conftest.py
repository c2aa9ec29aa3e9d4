"""Fixtures of the tests that need several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts_lab.observer import Observer
from support.hosts import Hosts


@pytest.fixture
def observer(hosts: Hosts) -> Iterator[Observer]:
    """PathLookup at the hosts from a third one."""
    observer = Observer(hosts.c)
    yield observer
    observer.close()
