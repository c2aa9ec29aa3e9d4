"""The pages of a checkpoint that follow: cut out of chunks, and when they should."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.following import Memory

from criuctl.checkpoint.manifest import MemoryImage
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.errors import Damaged, ObjectMissing
from criuctl.report import Reporter
from criuctl.restore import lazy_memory
from criuctl.restore.lazy_memory import worthwhile

PAGE = 4096
PAGES = 3000  # in 47 chunks


@pytest.fixture
def stored(tmp_path: Path) -> tuple[CheckpointReader, MemoryImage, bytes]:
    """A reader, one task's memory as it stored it, and what is in that memory."""
    memory = random.Random(5).randbytes(PAGES * PAGE)
    repo = kit.repository(tmp_path)
    kit.write(repo, kit.Content(memory, {}))
    return repo.reader(Reporter()), repo.manifest("web").memory[0], memory


def test_all_of_it_comes_in_ascending_order(
    stored: tuple[CheckpointReader, MemoryImage, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, image, memory = stored
    monkeypatch.setattr(lazy_memory, "_AT_ONCE", 1)
    following = Memory(reader, image.data)
    assert following.source.runs == {1: [(0, len(memory))]}
    assert following.fill() == memory
    assert following.order == sorted(set(following.order))


def test_what_was_asked_for_comes_first(
    stored: tuple[CheckpointReader, MemoryImage, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all pages of its chunk; then what comes after it."""
    reader, image, memory = stored
    monkeypatch.setattr(lazy_memory, "_AT_ONCE", 3 * kit.WINDOW)
    following = Memory(reader, image.data)
    (came,) = following.bring(20 * kit.WINDOW + 5 * PAGE)
    assert came == 20 * kit.WINDOW
    assert following.content[came : came + kit.WINDOW] == memory[came : came + kit.WINDOW]
    assert following.fill() == memory
    assert sorted(following.order[1:4]) == [n * kit.WINDOW for n in (21, 22, 23)]
    assert len(following.order) == len(set(following.order))  # nothing twice


def test_one_chunk_at_many_places(tmp_path: Path) -> None:
    """It is fetched once; zeros are not put at all."""
    window = random.Random(6).randbytes(kit.WINDOW)
    memory = (window + bytes(kit.WINDOW)) * 3
    repo = kit.repository(tmp_path)
    kit.write(repo, kit.Content(memory, {}))
    following = Memory(repo.reader(Reporter()), repo.manifest("web").memory[0].data)
    assert following.bring(0) == [0, 2 * kit.WINDOW, 4 * kit.WINDOW]
    assert following.fill() == memory
    assert len(following.order) == 6


def test_a_pack_that_is_gone_is_reported(tmp_path: Path) -> None:
    """By every way to its pages."""
    repo = kit.repository(tmp_path)
    kit.write(repo, kit.Content(random.Random(8).randbytes(PAGES * PAGE), {}))
    following = Memory(repo.reader(Reporter()), repo.manifest("web").memory[0].data)
    for info in list(repo.store.list("packs/")):
        repo.store.delete(info.name)
    with pytest.raises((Damaged, ObjectMissing)):
        following.bring(0)
    with pytest.raises((Damaged, ObjectMissing)):
        following.fill()


def test_memory_follows_if_it_is_large_and_shared_by_few(
    stored: tuple[CheckpointReader, MemoryImage, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, image, memory = stored
    assert not worthwhile([image], reader)
    monkeypatch.setattr(lazy_memory, "LARGE", len(memory))
    assert worthwhile([image], reader)
    assert not worthwhile([image, image], reader)  # since a fork, say: it would be there twice
    monkeypatch.setattr(lazy_memory, "has_userfaultfd", lambda: False)
    assert not worthwhile([image], reader)
