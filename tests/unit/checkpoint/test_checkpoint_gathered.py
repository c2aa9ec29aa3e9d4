"""Chunks that are opened as their packs come: they are what a reader would give; what cannot be
opened is left to the reader.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.following import Memory

from criuctl.checkpoint import opened_chunks
from criuctl.checkpoint.opened_chunks import Gathered
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.report import Reporter

PAGE = 4096
PAGES = 1500


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Repository, bytes]:
    """A repository with one task's memory, and what is in that memory."""
    memory = random.Random(7).randbytes(PAGES * PAGE)
    repo = kit.repository(tmp_path)
    kit.write(repo, kit.Content(memory, {}))
    return repo, memory


def _gather(repo: Repository, reader: CheckpointReader, room: Callable[[int], bool]) -> Gathered:
    got = Gathered(reader, room)
    for info in repo.store.list("packs/"):
        got.take(info.name, info.size)
    got.wait()
    return got


def _read(repo: Repository, reader: CheckpointReader, got: Gathered) -> bytes:
    return Memory(reader, repo.manifest("web").memory[0].data, got).fill()


def test_what_has_come_is_not_read_again(
    stored: tuple[Repository, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, memory = stored
    reader = repo.reader(Reporter())
    got = _gather(repo, reader, lambda _: True)

    def refuse(*_: object) -> None:
        raise AssertionError("it was read again")

    data = repo.manifest("web").memory[0].data
    following = Memory(reader, data, got)
    monkeypatch.setattr(reader, "fetch", refuse)
    following.bring(0)
    assert following.fill() == memory
    got.close()
    with pytest.raises(AssertionError, match="read again"):
        following.bring(0)


def test_it_takes_no_more_than_there_is_room_for(
    stored: tuple[Repository, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, memory = stored
    monkeypatch.setattr(opened_chunks, "_SLAB", 1 << 20)
    asked: list[int] = []

    def room(size: int) -> bool:
        asked.append(size)
        return len(asked) <= 2

    reader = repo.reader(Reporter())
    got = _gather(repo, reader, room)
    assert asked == [1 << 20] * 3
    chunks = [chunk for chunk, _size in reader.entries(repo.manifest("web").memory[0].data)]
    there = [chunk for chunk in chunks if got.get(chunk) is not None]
    assert 0 < len(there) <= 8 < len(chunks)
    assert _read(repo, reader, got) == memory
    got.close()


def test_what_cannot_be_opened_is_left_to_the_reader(stored: tuple[Repository, bytes]) -> None:
    """A pack that is gone, no pack at all, and some that are cut off: the reader looks for
    itself.
    """
    repo, memory = stored
    reader = repo.reader(Reporter())
    got = Gathered(reader, lambda _: True)
    got.take("packs/00/" + "0" * 32, 1000)
    got.take("config", 1000)
    for info in repo.store.list("packs/"):
        got.take(info.name, info.size - 1)  # so its footer is not where it should be
    got.wait()
    assert _read(repo, reader, got) == memory
    got.close()
