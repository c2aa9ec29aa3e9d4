"""What foreign bytes may become, seen from those that are sound: large, regular, and not
refused.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint import bounds, chunks, configobject, gclists, objects, packs, reader
from criuctl.checkpoint.chunks import CHUNK_ENTRY, ChunkList, StreamRef
from criuctl.checkpoint.manifest import Manifest, ProcessRecord
from criuctl.checkpoint.repository import Repository
from criuctl.criu import archives, plain
from criuctl.criu.pages import RUN_ENTRY as RUN
from criuctl.errors import Damaged
from criuctl.ops.shown import page_maps
from criuctl.proc import jsontext
from criuctl.report import Reporter
from criuctl.store import archive


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
    many = tuple(
        ProcessRecord(pid=7 + n, ns_pid=7 + n, ppid=7, command="worker") for n in range(10_000)
    )
    made = sound(repository).with_use(id=secrets.token_hex(16), processes=many)
    assert committed(repository, made).processes == many


def test_command_lines_that_compress_very_well_are_stored_and_read(repository: Repository) -> None:
    """Forty MiB of one letter: padded to what may be read again."""
    words = tuple("x" * (1 << 20) for _ in range(40))
    many = (
        ProcessRecord(pid=7, ns_pid=7, argv=words),
        ProcessRecord(pid=8, ns_pid=8, argv=("",) * 1_000_000),
    )
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
    reading = repository.reader(Reporter())
    large = StreamRef(kit.WINDOW << 20, list=listed)
    entries = reading.entries(large)
    assert len(entries) == 1 << 20 and entries[-1] == entries[0] == next(iter(entries))
    assert sum(part.length for part in reading.layout(large).walk()) == large.size
    assert reading.verify([large]) == large.size
    assert (
        sum(map(len, reading.chunks(StreamRef(200 * kit.WINDOW, list=short)))) == 200 * kit.WINDOW
    )
    with pytest.raises(Damaged, match="are stored in"):
        reading.read(large)


def test_a_heap_with_every_other_page_is_shown(repository: Repository) -> None:
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
    made = ChunkList(b"".join(CHUNK_ENTRY.pack(bytes([n]) * 32, n + 1) for n in range(5)))
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


def test_the_table_of_bounds_is_true() -> None:
    """``images/FORMAT.md`` says what the code does."""
    text = (Path(__file__).parents[3] / "images" / "FORMAT.md").read_text()
    rows = text.partition("<!-- bounds -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    stated = {
        what: (most, free, ratio)
        for what, most, free, ratio in (map(str.strip, row.strip("|").split("|")) for row in rows)
    }

    def said(number: int) -> str:
        sizes = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
        return next(
            (
                f"{number >> bits} {word}"
                for bits, word in sizes
                if number >> bits << bits == number and number >> bits
            ),
            "",
        )

    ratio = str(bounds.RATIO)
    assert stated == {
        "chunk": (said(chunks.MAX_CHUNK), "", ""),
        "pack": (said(packs.MAX_PACK), "", ""),
        "records of a pack": (str(packs.MAX_RECORDS), "", ""),
        "head": (said(objects.MAX_HEAD), said(bounds.FREE_HEAD), ratio),
        **{
            f"body of {word}": (said(kind.max_body), said(kind.free), ratio)
            for word, kind in (
                ("a manifest", objects.MANIFEST),
                ("an index segment", objects.INDEX),
                ("a list of packs", gclists.KIND),
                ("a lease", objects.LEASE),
            )
        },
        "values in the JSON of an object": ("", str(bounds.FREE_VALUES), str(bounds.VALUES_RATIO)),
        "config": (said(configobject._MAX_SIZE), "", ""),
        "a list of chunks": (said(reader._MAX_LIST), said(bounds.FREE_LIST), ratio),
        "a list of runs": (said(reader._MAX_LIST), said(bounds.FREE_RUNS), ratio),
        "other content that is read at once (lists of pages, what was typed)": (
            "",
            said(bounds.FREE_CONTENT),
            ratio,
        ),
        "objects of an exported checkpoint": (str(archive.MAX_SECTIONS), "", ""),
    }
    prose = " ".join(text.split())
    assert (
        f"An image that is read has at most {said(plain._MAX_IMAGE)}, all together "
        f"{said(plain._MAX_ALL)}." in prose
    )
    assert (
        f"Of an archive at most {said(archives.FREE)} are kept, or {archives.RATIO} times its size"
        in prose
    )
    assert f"An extended header has at most {said(archives._MAX_HEADER)}." in prose
    assert (
        f"An archive has at most {archives._FREE_MEMBERS} members, or one for "
        f"{archives._BYTES_EACH} of its bytes. zstd and xz may keep {said(archives._WINDOW)}."
        in prose
    )
