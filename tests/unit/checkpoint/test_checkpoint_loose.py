"""Loose pages: stored first, in any order, and put together to a stream afterwards."""

from __future__ import annotations

import random
from pathlib import Path

from support import checkpoints as kit

from criuctl.checkpoint.chunks import LAYERS, PAGE, StreamRef
from criuctl.checkpoint.manifest import MemoryImage
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.report import Reporter

FULL = 64  # pages of a window


def page(seed: int) -> bytes:
    return random.Random(seed).randbytes(PAGE)


def put(writer: CheckpointWriter, pages: list[bytes], *, scattered: bool = False) -> int:
    buffer = writer.acquire()
    content = b"".join(pages)
    buffer.view[: len(content)] = content
    number = writer.loose(buffer, 0, len(content), scattered=scattered)
    writer.release(buffer)
    return number


def commit(repo: Repository, writer: CheckpointWriter, session: str) -> StreamRef:
    manifest = kit.fill(writer, kit.SMALL, session=session)
    data = writer.stream("m")
    image = MemoryImage("task", 7, data.size // PAGE, manifest.memory[0].entries, data)
    features = (LAYERS,) if data.pages is not None else ()
    writer.commit(manifest.with_use(memory=(image,), features=features))
    return repo.manifest(session).memory[0].data


def test_changed_pages_come_from_elsewhere(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    windows = [[page(n * FULL + i) for i in range(FULL)] for n in range(3)]
    with repo.writer(Reporter()) as writer:
        first = [put(writer, one) for one in windows]
        lists = [list(range(number, number + FULL)) for number in first]
        for window, number, seed in ((0, 5, 900), (0, 6, 901), (2, 63, 902), (0, 5, 903)):
            lists[window][number] = put(writer, [page(seed)], scattered=True)
            windows[window][number] = page(seed)
        writer.put_together("m", lists)
        ref = commit(repo, writer, "web")
        assert writer.stats.bytes_unused < PAGE  # the page that was written twice shares a chunk
    assert ref.pages is not None
    reader = repo.reader(Reporter())
    assert reader.read(ref) == b"".join(page for one in windows for page in one)
    assert reader.verify([ref]) == 3 * FULL * PAGE


def test_without_changes_it_is_an_ordinary_stream_of_the_same_chunks(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    windows = [[page(n * FULL + i) for i in range(FULL)] for n in range(3)]
    with repo.writer(Reporter()) as writer:
        for one in windows:
            buffer = writer.acquire()
            buffer.view[: FULL * PAGE] = b"".join(one)
            writer.window("m", buffer, 0, FULL * PAGE)
            writer.release(buffer)
        plain = commit(repo, writer, "plain")
    with repo.writer(Reporter()) as writer:
        first = [put(writer, one) for one in windows]
        writer.put_together("m", [range(number, number + FULL) for number in first])
        ref = commit(repo, writer, "loose")
        assert writer.stats.bytes_unused == 0
    assert ref == plain


def test_pages_that_no_stream_has_are_counted_as_unused(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    with repo.writer(Reporter()) as writer:
        kept = put(writer, [page(n) for n in range(FULL)])
        put(writer, [page(1000 + n) for n in range(FULL)])
        writer.put_together("m", [range(kept, kept + FULL)])
        ref = commit(repo, writer, "web")
        assert writer.stats.bytes_unused == FULL * PAGE
    assert repo.reader(Reporter()).read(ref) == b"".join(page(n) for n in range(FULL))
