"""Every kind of store, empty, on the real thing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import RadosGateway, RcloneServer
from support.places import Place, apart_place, linked_place, local_place, s3_place

from criuctl.config import Config
from criuctl.store import Store, open_store


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """The place of the kind that the test's parameter names."""
    kind: str = request.param
    state = str(tmp_path / "state")
    if kind == "local":
        made = local_place(tmp_path / "store")
    elif kind == "apart":
        made = apart_place(
            s3_place(
                "radosgw", request.getfixturevalue("radosgw_server"), monkeypatch, state_dir=state
            )
        )
    elif kind == "linked":
        made = linked_place(tmp_path / "store")
    elif kind == "memory":
        url = f"memory:{uuid.uuid4().hex}"
        made = Place(
            kind, url, Config(), lambda: [info.name for info in open_store(url, Config()).list()]
        )
    else:
        made = s3_place(
            kind, request.getfixturevalue(f"{kind}_server"), monkeypatch, state_dir=state
        )
    yield made
    for store in made.opened:
        store.close()


@pytest.fixture
def store(place: Place) -> Store:
    """The place's store, ready for use."""
    store = place.open()
    store.create()
    return store


@pytest.fixture
def gateway(
    radosgw_server: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A place at the reference server."""
    made = s3_place("radosgw", radosgw_server, monkeypatch, state_dir=str(tmp_path / "state"))
    yield made
    for store in made.opened:
        store.close()


@pytest.fixture
def weak(
    rclone_server: RcloneServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A place at the weak server."""
    made = s3_place("rclone", rclone_server, monkeypatch, state_dir=str(tmp_path / "state"))
    yield made
    for store in made.opened:
        store.close()
