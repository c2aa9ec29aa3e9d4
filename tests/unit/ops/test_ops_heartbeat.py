"""A home's heart goes on beating, whatever goes wrong with one beat."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.keeper import wait_until

from criuctl.checkpoint import leases
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.host.identity import host_id
from criuctl.ops.supervising.heartbeat import Heartbeat
from criuctl.store import open_store

SESSION = SessionRef("web", "ab" * 16)


def test_a_beat_that_fails_unexpectedly_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config().with_options(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        key_dir=str(tmp_path / "keys"),
    )
    with (
        open_store(config.store, config) as store,
        Repository.open(store, config, create_local=True) as repository,
    ):
        leases.claim(repository, SESSION.name, SESSION.id, 1, host=host_id(config)).keep()
    real = leases.renew
    failed: list[float] = []

    def renew(*args: Any, **kwargs: Any) -> Any:
        if heart.beaten is not None and not failed:
            failed.append(heart.beaten)
            raise OSError("the disk of this host is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(leases, "renew", renew)
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    heart = Heartbeat(config, 30.0, wake)
    try:
        heart.start(SESSION)
        heart.hurry()
        wait_until(lambda: failed, 60, "a beat has failed")
        heart.hurry()
        wait_until(
            lambda: heart.beaten is not None and heart.beaten > failed[0],
            60,
            "the next beat was made",
        )
    finally:
        heart.stop()
        os.close(wake)
    with open_store(config.store, config) as store, Repository.open(store, config) as repository:
        head = leases.read_head(repository, SESSION.name)
    # given up in order: it does not run out
    assert head is not None and head.state == "held" and not head.ttl


def test_a_lease_that_runs_out_after_the_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config().with_options(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        key_dir=str(tmp_path / "keys"),
    )
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    absent, heart = Heartbeat(config, 30.0, wake), Heartbeat(config, 30.0, wake)
    lost: list[Heartbeat] = []
    absent.start(SESSION)  # there is no store yet, and so no lease
    absent.stop(lambda: lost.append(absent))
    with (
        open_store(config.store, config) as store,
        Repository.open(store, config, create_local=True) as repository,
    ):
        leases.claim(repository, SESSION.name, SESSION.id, 1, host=host_id(config)).keep()
    heart.start(SESSION)
    (tmp_path / "store").rename(tmp_path / "away")
    heart.stop(lambda: lost.append(heart))
    assert lost == [heart]
    os.close(wake)
