"""What foreign bytes may become, seen from those that are sound: large, regular, and not refused."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint import bounds, objects
from criuctl.checkpoint.chunks import ENTRY, ChunkList, StreamRef
from criuctl.checkpoint.manifest import Manifest, ProcessRecord
from criuctl.checkpoint.repository import Repository
from criuctl.criu.pages import ENTRY as RUN
from criuctl.errors import Damaged
from criuctl.ops.inspect import page_maps
from criuctl.proc import jsontext
from criuctl.report import Reporter


def committed(repository: Repository, manifest: Manifest) -> Manifest:
    """The manifest as it is read again."""
    return repository.manifest(repository.publish(manifest))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return kit.repository(tmp_path, encrypted=True)


def sound(repository: Repository) -> Manifest:
    with repository.writer(Reporter()) as writer:
        return repository.manifest(writer.commit(kit.fill(writer, kit.SMALL)))


def test_ten_thousand_equal_processes_are_stored_and_read(repository: Repository) -> None:
    many = tuple(ProcessRecord(pid=7 + n, ns_pid=7 + n, ppid=7, command="worker") for n in range(10_000))
    made = sound(repository).with_use(id=secrets.token_hex(16), processes=many)
    assert committed(repository, made).processes == many


def test_command_lines_that_compress_very_well_are_stored_and_read(repository: Repository) -> None:
    """Forty MiB of one letter: padded to what may be read again."""
    words = tuple("x" * (1 << 20) for _ in range(40))
    many = (ProcessRecord(pid=7, ns_pid=7, argv=words), ProcessRecord(pid=8, ns_pid=8, argv=("",) * 1_000_000))
    made = sound(repository).with_use(id=secrets.token_hex(16), processes=many)
    summary = repository.publish(made)
    assert repository.manifest(summary).processes == many
    assert repository.store.stat(summary.object).size >= (40 << 20) // bounds.RATIO


@pytest.mark.parametrize("size", [bounds.FREE_BODY, bounds.FREE_BODY + 1, 3 * bounds.FREE_BODY])
def test_what_is_written_may_be_read_whatever_it_is(size: int, repository: Repository) -> None:
    for body in (bytes(size), json.dumps([0] * (size // 3)).encode()):
        data = objects.encode(objects.MANIFEST, "checkpoints/a", b"{}", body, repository.sealer)
        found = objects.layout(objects.MANIFEST, "checkpoints/a", data, len(data))
        assert objects.open_body("checkpoints/a", found, data, repository.sealer) == body
        assert jsontext.values(body) <= bounds.most_values(len(data))


def test_a_million_equal_chunks_are_a_stream_like_any_other(repository: Repository) -> None:
    """256 GiB that are all alike, as a tree has that has just got its memory."""
    with repository.writer(Reporter()) as writer:
        kit.put_windows(writer, "zeros", bytes(kit.WINDOW))
        one = writer.stream("zeros").chunks
        writer.add_bytes("list", one * (1 << 20))
        writer.add_bytes("short", one * 200)
        listed, short = writer.stream("list"), writer.stream("short")
        writer.commit(kit.fill(writer, kit.SMALL))
    reader = repository.reader(Reporter())
    large = StreamRef(kit.WINDOW << 20, list=listed)
    entries = reader.entries(large)
    assert len(entries) == 1 << 20 and entries[-1] == entries[0] == next(iter(entries))
    assert sum(part.length for part in reader.layout(large).walk()) == large.size
    assert reader.verify([large]) == large.size
    assert sum(map(len, reader.chunks(StreamRef(200 * kit.WINDOW, list=short)))) == 200 * kit.WINDOW
    with pytest.raises(Damaged, match="are stored in"):
        reader.read(large)


def test_a_heap_of_which_every_other_page_is_there_is_shown(repository: Repository) -> None:
    """A million runs of one page: 8 GiB."""
    with repository.writer(Reporter()) as writer:
        runs = b"".join(RUN.pack(0x7000_0000_0000 + n * 8192, 1, 4) for n in range(1 << 20))
        writer.add_bytes("runs", runs)
        made = kit.fill(writer, kit.SMALL)
        image = made.memory[0].with_use(entries=writer.stream("runs"))
        summary = writer.commit(made.with_use(memory=(image,)))
    (shown,) = page_maps(repository.manifest(summary), repository.reader(Reporter())).values()
    assert len(shown) == 1 << 20 and shown[-1]["pages"] == 1


def test_a_packed_list_is_a_sequence() -> None:
    made = ChunkList(b"".join(ENTRY.pack(bytes([n]) * 32, n + 1) for n in range(5)))
    plain = list(made)
    assert [size for _chunk, size in plain] == [1, 2, 3, 4, 5]
    assert (made[1], made[-1], list(made[1:3]), list(made[:-2]), list(made[9:])) == (
        plain[1],
        plain[4],
        plain[1:3],
        plain[:3],
        [],
    )
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            made[wrong]
    with pytest.raises(ValueError):
        made[::2]
