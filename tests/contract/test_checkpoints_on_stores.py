"""Checkpoints on every kind of store: written, found, read, shared between writers and leased, the
same everywhere.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import checkpoints as kit
from support.places import Place

from criuctl.checkpoint import leases
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict
from criuctl.report import Reporter

KINDS = ["local", "linked", "memory", "radosgw", "apart", "rclone"]

pytestmark = [pytest.mark.contract, pytest.mark.parametrize("place", KINDS, indirect=True)]


def test_a_checkpoint_comes_back_from_this_store(place: Place, tmp_path: Path) -> None:
    config = replace(
        place.config, key_dir=str(tmp_path / "keys"), cache_dir=str(tmp_path / "cache")
    )
    store = place.open()
    content = kit.Content(random.Random(1).randbytes(40 << 20), {"a.img": b"x" * 300_000}, b"file")
    Repository.init(store, encryption=True, config=config).close()
    with pytest.raises(Conflict):
        Repository.init(store, encryption=True, config=config)
    with Repository.open(store, config) as repo:
        repo.preflight_write()
        first = kit.write(repo, content)
        with repo.writer(Reporter()) as writer:
            second = writer.commit(kit.fill(writer, content))
            assert writer.stats.bytes_new == 0
    other_host = replace(config, cache_dir=str(tmp_path / "other"))
    with Repository.open(place.open(), other_host) as repo:
        assert repo.list() == [first, second] and (first.number, second.number) == (1, 2)
        kit.check(repo, second, content)
        repo.remove(first)
        kit.check(repo, "web", content)
        assert repo.list() == [second]
        claim = leases.claim(repo, "web", "ab" * 16, 2, host="a" * 32)
        assert claim.leased is repo.capabilities.conditional_create is (place.kind != "rclone")
        if claim.leased:
            with pytest.raises(Conflict):
                leases.claim(repo, "web", "ab" * 16, 2, host="b" * 32)
