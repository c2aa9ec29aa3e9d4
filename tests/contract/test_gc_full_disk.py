"""Freeing room on a disk that has none left at all."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.gc_result import Collected
from criuctl.checkpoint.repository import Repository
from criuctl.errors import StoreFull
from criuctl.report import Reporter
from criuctl.store.local import LocalStore

pytestmark = pytest.mark.contract


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "criuctl-test", str(place)], check=True
    )
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "other", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_what_was_removed_is_freed_where_there_is_no_room_at_all(
    disk: Path, tmp_path: Path
) -> None:
    """Whole packs first: for a copy of what is needed of the others there is room only then."""

    def collect() -> Collected:
        with Repository.open(store, repo.config) as other:
            return Collection(other, Reporter(), grace=0).run()

    store = LocalStore(str(disk / "store"))
    repo = kit.repository(tmp_path, store=store, workers=1)
    noise = [
        kit.Content(random.Random(seed).randbytes(1 << 20), {"a.img": b"a"}) for seed in range(3)
    ]
    shared, whole, kept = (
        kit.write(repo, content, session=f"s{n}") for n, content in enumerate(noise)
    )
    repo.close()
    fill(disk)
    with pytest.raises(StoreFull):
        store.put("packs/00/0", b"x")
    for gone in (shared, whole):
        repo.remove(gone)
    done = collect()
    assert (done.deleted, done.repacked) == (1, 0) and any(
        "no room for copies" in text for text in done.warnings
    )
    done = collect()
    assert (done.deleted, done.repacked) == (1, 1)
    collect()
    with Repository.open(store, repo.config) as other:
        kit.check(other, kept, noise[2])
        assert sum(info.size for info in store.list("packs/")) < 2 << 20
    assert [info.name for info in store.list("numbers/") if info.size] == []
