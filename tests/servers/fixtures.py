"""One server of each kind for a whole test session, started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .postgresql import PostgresServer, postgresql
from .radosgw import RadosGateway, radosgw
from .rclone import RcloneServer, rclone


@pytest.fixture(scope="session")
def radosgw_server() -> Iterator[RadosGateway]:
    """The reference server; tests keep apart by bucket or prefix."""
    with radosgw() as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server() -> Iterator[RcloneServer]:
    """The weak server; tests keep apart by bucket or prefix."""
    with rclone() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The database; a test that stops or changes it puts it back."""
    with postgresql() as server:
        yield server
