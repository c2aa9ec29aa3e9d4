"""Many at once: one winner per name, and no reader ever sees a part."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.places import Place

from criuctl.errors import ObjectExists, ObjectMissing
from criuctl.store import Store

KINDS = ["local", "linked", "memory", "radosgw", "apart", "rclone"]
EXCLUSIVE = ["local", "linked", "memory", "radosgw", "apart"]
RACER = Path(__file__).with_name("racer.py")
pytestmark = pytest.mark.contract


def _race(store: Store, name: str, writers: int) -> list[bytes]:
    """Let `writers` threads create one name at the same moment; the contents that won."""
    start = threading.Barrier(writers)

    def write(number: int) -> bytes | None:
        content = b"%d:" % number + os.urandom(2000)
        start.wait()
        try:
            store.put(name, content, if_absent=True)
        except ObjectExists:
            return None
        return content

    with ThreadPoolExecutor(writers) as pool:
        return [content for content in pool.map(write, range(writers)) if content is not None]


@pytest.mark.parametrize("place", EXCLUSIVE, indirect=True)
def test_one_thread_wins(store: Store) -> None:
    for number in range(12):
        winners = _race(store, f"race/{number}", 8)
        assert len(winners) == 1
        assert store.get(f"race/{number}") == winners[0]


@pytest.mark.parametrize("place", ["rclone"], indirect=True)
def test_the_weak_store_says_that_several_may_win(store: Store) -> None:
    """It must be known as weak, keep what one of them wrote, and be right for those who come
    later.
    """
    assert not store.probe().conditional_create
    for number in range(5):
        winners = _race(store, f"race/{number}", 8)
        assert store.get(f"race/{number}") in winners
        with pytest.raises(ObjectExists):
            store.put(f"race/{number}", b"late", if_absent=True)


@pytest.mark.parametrize("place", ["local", "radosgw"], indirect=True)
def test_one_process_wins(store: Store, place: Place) -> None:
    rounds, racers = 20, 4
    store.put("ready", b"")
    environment = {**os.environ, **place.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RACER), place.url, f"racer {number}", str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for number in range(racers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * racers
    assert sorted(int(won) for wins in outputs for won in wins) == list(range(rounds))
    for number, wins in enumerate(outputs):
        for won in wins:
            assert store.get(f"race/{int(won):03}") == b"racer %d" % number


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_readers_see_the_whole_or_nothing(store: Store, place: Place) -> None:
    """A name that is written, replaced and deleted all the time, while others read it."""
    # The weak server replaces by unlinking first, and says so; there, names are never used twice.
    replacing = place.kind != "rclone"
    contents = [
        bytes([letter]) * size
        for letter, size in zip(b"abcd", (1, 100_000, 3_000_000, 700_001), strict=True)
    ]
    over = threading.Event()
    name = "busy/0000"
    seen: set[bytes] = set()
    reads: list[int] = []
    deadline = time.monotonic() + 60

    def enough() -> bool:
        """Whether the readers, who may begin late, had something to see."""
        return (len(reads) > 10 and len(seen) >= 2) or time.monotonic() > deadline

    def read() -> int:
        other, mine = place.open(), 0
        while not over.is_set():
            try:
                content = other.get(name)
            except ObjectMissing:
                continue
            assert content in contents
            seen.add(content[:1])
            reads.append(len(content))
            mine += 1
        return mine

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for number in itertools.takewhile(
                lambda number: number < 40 or not enough(), itertools.count()
            ):
                if not replacing:
                    name = f"busy/{number:04}"
                store.put(name, contents[number % 4], if_absent=number % 8 == 0)
                if number % 8 == 7 and replacing:
                    store.delete(name)
        finally:
            over.set()
        assert sum(reader.result(60) for reader in readers) > 10
    assert len(seen) >= 2


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_one_handle_serves_many_threads(store: Store) -> None:
    def work(number: int) -> None:
        content = os.urandom(50_000 + number)
        store.put(f"t/{number}", [content[:17], content[17:]])
        assert store.get(f"t/{number}") == content
        assert store.get_range(f"t/{number}", number, 1000) == content[number : number + 1000]
        if number % 2:
            store.delete(f"t/{number}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(96)))
    assert {info.name for info in store.list("t/")} == {f"t/{number}" for number in range(0, 96, 2)}
