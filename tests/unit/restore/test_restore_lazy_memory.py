"""The pages of a checkpoint that follow: cut out of chunks, and when they should."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint.manifest import MemoryImage
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.report import Reporter
from criuctl.restore import lazy_memory
from criuctl.restore.lazy_memory import StoredPages, worthwhile

PAGE = 4096
PAGES = 3000  # in 47 chunks


@pytest.fixture
def stored(tmp_path: Path) -> tuple[CheckpointReader, MemoryImage, bytes]:
    """A reader, one task's memory as it stored it, and what is in that memory."""
    memory = random.Random(5).randbytes(PAGES * PAGE)
    repo = kit.repository(tmp_path)
    kit.write(repo, kit.Content(memory, {}))
    return repo.reader(Reporter()), repo.manifest("web").memory[0], memory


def test_runs_of_pages_are_cut_out_of_chunks(
    stored: tuple[CheckpointReader, MemoryImage, bytes],
) -> None:
    reader, image, memory = stored
    pages = StoredPages(reader, image.data)
    runs = [(0, 1), (1, 62), (63, 2), (64, 64), (700, 1), (701, 1900), (2999, 1)]
    expected = [memory[first * PAGE : (first + count) * PAGE] for first, count in runs]
    assert [b"".join(pages.read(first, count)) for first, count in runs] == expected
    assert b"".join(StoredPages(reader, image.data).read_all(runs)) == b"".join(expected)
    assert list(pages.read_all([])) == []


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
