"""What a watch does about each kind of notice, on a host where nothing runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.host import maintenance
from criuctl.host.registry import exclusive
from criuctl.ops.maintenance import lock_of
from criuctl.ops.spot import watch
from criuctl.ops.spot.metadata import MetadataUnavailable
from criuctl.ops.spot.notices import Notice
from criuctl.ops.spot.watch import Rebalance, Watch, WatchSettings
from criuctl.report import Reporter


class Sky:
    """A cloud whose notice the test sets."""

    name, window, pause = "sky", 30.0, 0.25

    def __init__(self) -> None:
        self.notice: Notice | None = None
        self.away = False
        self.acknowledged: list[str] = []

    def present(self) -> bool:
        return True

    def look(self) -> Notice | None:
        if self.away:
            raise MetadataUnavailable("nobody answers")
        return self.notice

    def acknowledge(self, notice: Notice) -> bool:
        self.acknowledged.append(notice.id)
        return True


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        run_dir=str(tmp_path / "run"),
    )


@pytest.fixture
def sky() -> Sky:
    return Sky()


def watching(
    config: Config, sky: Sky, rebalance: Rebalance = "snapshot"
) -> tuple[Watch, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    settings = WatchSettings(rebalance=rebalance)
    made = Watch(
        config, sky, settings, reporter=Reporter(), tell=lambda event: told.append(dict(event))
    )
    return made, told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [one["event"] for one in told]


def notice(kind: Any = "interruption", left: float | None = None) -> Notice:
    at = None if left is None else time.time() + left
    return Notice("sky", kind, f"{kind}-1", "fall", 30.0, at)


def test_an_interruption_once(config: Config, sky: Sky) -> None:
    watched, told = watching(config, sky)
    assert watched.look() == 0.25
    sky.notice = notice(left=20.0)
    assert watched.look() == 1.0, "not more often than that while it stands"
    watched.look()
    assert kinds(told) == ["notice", "done", "acknowledged"]
    assert 18 < told[0]["left_s"] <= 20
    assert sky.acknowledged == ["interruption-1"]
    record = maintenance.read(config)
    assert record is not None and (record.shut, record.how, record.reason) == (
        True,
        "dump",
        "sky: fall",
    )
    sky.notice = None
    watched.look()
    watched.look()
    assert kinds(told)[3:] == ["withdrawn"]


def test_one_that_is_far_away_is_announced(config: Config, sky: Sky) -> None:
    watched, told = watching(config, sky)
    sky.notice = notice(left=86400.0)
    watched.look()
    watched.look()
    assert kinds(told) == ["announced"] and maintenance.read(config) is None
    sky.notice = notice(left=200.0)
    watched.look()
    assert kinds(told) == ["announced", "notice", "done", "acknowledged"]


@pytest.mark.parametrize(
    ("rebalance", "how"), [("snapshot", "snapshot"), ("dump", "dump"), ("ignore", None)]
)
def test_a_recommendation(config: Config, sky: Sky, rebalance: Rebalance, how: str | None) -> None:
    watched, told = watching(config, sky, rebalance)
    sky.notice = notice("rebalance")
    watched.look()
    watched.look()
    record = maintenance.read(config)
    assert (record.how if record is not None else None) == how
    assert kinds(told) == (["ignored"] if how is None else ["notice", "done"])
    assert sky.acknowledged == [], "there is nothing to let begin"
    sky.notice = notice()
    watched.look()
    record = maintenance.read(config)
    assert record is not None and record.how == "dump"


def test_what_cannot_be_begun_is_tried_again(
    config: Config, sky: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("criuctl.ops.maintenance.LOCK_PATIENCE", 0.0)
    watched, told = watching(config, sky)
    sky.notice = notice()
    with exclusive(config, *lock_of(config)):
        watched.look()
    assert kinds(told) == ["notice", "begin-failed"]
    watched.look()
    assert kinds(told)[2:] == ["notice", "done", "acknowledged"]


def test_a_service_that_is_away_is_told_once(config: Config, sky: Sky) -> None:
    watched, told = watching(config, sky)
    sky.away = True
    assert watched.look() == watched.look() == watch._AWAY
    sky.away = False
    watched.look()
    assert kinds(told) == ["metadata-failed", "metadata-back"]
