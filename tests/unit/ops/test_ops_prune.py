"""Removing several checkpoints from a store that fails in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import StoreUnreachable
from criuctl.host.retention import Rules
from criuctl.ops import inspect as inspecting
from criuctl.ops import prune as pruning
from criuctl.report import Reporter
from criuctl.store import Store
from criuctl.store.local import LocalStore


def removed(config: Config) -> object:
    return inspecting.remove(config, ["web@1", "nosuch", "web@3", "web@2"], reporter=Reporter())


def pruned(config: Config) -> object:
    return pruning.prune(config, [], Rules(last=1), reporter=Reporter())


@pytest.mark.parametrize(("work", "order"), [(removed, (1, 3)), (pruned, (1, 2))])
def test_what_was_removed_before_the_store_failed_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Config], object],
    order: tuple[int, int],
) -> None:
    config = kit.config(
        tmp_path, store=str(tmp_path / "store"), state_dir=str(tmp_path / "state"), workers=1
    )
    store = LocalStore(config.store)
    with Repository.init(store, encryption=False, config=config) as repository:
        made = {number: kit.write(repository, session="web").id for number in (1, 2, 3, 4)}
    failing = ["E*"]

    def opened(_url: str, _config: Config) -> Store:
        return FaultyStore(store, delete=failing[0])

    monkeypatch.setattr(inspecting, "open_store", opened)
    monkeypatch.setattr(pruning, "open_store", opened)
    with pytest.raises(StoreUnreachable) as raised:
        work(config)
    assert "removed" not in raised.value.message and "removed" not in raised.value.to_dict()
    failing[0] = "..E*"
    with pytest.raises(StoreUnreachable) as raised:
        work(config)
    assert raised.value.message.endswith(f"; removed before that: web@{order[0]}, web@{order[1]}")
    assert raised.value.to_dict()["removed"] == [made[number] for number in order]
    with Repository.open(store, config) as repository:
        assert {summary.id for summary in repository.list()} == set(made.values()) - {
            made[number] for number in order
        }
