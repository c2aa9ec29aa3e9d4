"""Garbage collection on every kind of store, with dumps and other collections at the same time."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import checkpoints as kit
from support.places import Place

from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.gc_result import Collected
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import Conflict, Damaged
from criuctl.report import Reporter

pytestmark = pytest.mark.contract


def collect(place: Place, config: Config) -> Collected:
    with Repository.open(place.open(), config) as repo:
        return Collection(repo, Reporter(), grace=0).run()


def left(place: Place) -> list[str]:
    return [
        name
        for name in place.left()
        if not any(part in name for part in ("config", ".cache", "numbers"))
    ]


@pytest.mark.parametrize("place", ["local", "memory", "radosgw", "rclone"], indirect=True)
def test_what_is_removed_is_freed(place: Place, tmp_path: Path) -> None:
    config = replace(
        place.config, key_dir=str(tmp_path / "keys"), cache_dir=str(tmp_path / "cache"), workers=1
    )
    noise = random.Random(1).randbytes(24 * kit.WINDOW)
    kept, gone = (
        kit.Content(noise[: 4 * kit.WINDOW], {"a.img": b"a"}),
        kit.Content(noise, {"b.img": b"b"}),
    )
    store = place.open()
    Repository.init(store, encryption=True, config=config).close()
    with Repository.open(store, config) as repo:
        first = kit.write(repo, gone, session="gone")
        second = kit.write(repo, kept, session="kept")
        repo.remove(first)
    done = collect(place, config)
    assert done.repacked and done.deleted and done.freed_bytes > len(noise) and not done.refused
    assert any("no other host writes" in text for text in done.warnings) == (place.kind == "rclone")
    with Repository.open(place.open(), replace(config, cache_dir=str(tmp_path / "other"))) as repo:
        kit.check(repo, second, kept)
        repo.remove(second)
    collect(place, config)
    assert left(place) == []


@pytest.mark.parametrize("place", ["local", "radosgw"], indirect=True)
def test_dumps_during_two_collections(place: Place, tmp_path: Path) -> None:
    """Without any grace time a dump may be refused, but what was committed is complete."""
    base = replace(place.config, key_dir=str(tmp_path / "keys"), workers=1, buffers_mib=8)
    Repository.init(place.open(), encryption=False, config=base).close()
    pieces = [random.Random(n).randbytes(kit.WINDOW) for n in range(4)]
    committed: dict[str, kit.Content] = {}
    errors: list[BaseException] = []
    ended = threading.Event()

    def dump(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(6):
                name, what = (
                    f"s{number}-{turn}",
                    kit.Content(b"".join(rng.sample(pieces, 2)), {"a.img": b"i"}, b"f"),
                )
                with Repository.open(
                    place.open(), replace(base, cache_dir=str(tmp_path / f"cache{number}"))
                ) as repo:
                    try:
                        summary = kit.write(repo, what, session=name)
                    except (Conflict, Damaged):
                        continue
                    if turn % 2:
                        repo.remove(summary)
                    else:
                        committed[name] = what
        except BaseException as error:
            errors.append(error)

    def sweep(number: int) -> None:
        try:
            while not ended.is_set():
                collect(place, replace(base, cache_dir=str(tmp_path / f"gc{number}")))
        except BaseException as error:
            errors.append(error)

    dumps = [threading.Thread(target=dump, args=(n,)) for n in range(2)]
    sweeps = [threading.Thread(target=sweep, args=(n,)) for n in range(2)]
    for thread in dumps + sweeps:
        thread.start()
    for thread in dumps:
        thread.join()
    ended.set()
    for thread in sweeps:
        thread.join()
    assert errors == []
    assert collect(place, replace(base, cache_dir=str(tmp_path / "last"))).lost == 0
    with Repository.open(place.open(), replace(base, cache_dir=str(tmp_path / "last"))) as repo:
        for name, what in committed.items():
            kit.check(repo, name, what)
