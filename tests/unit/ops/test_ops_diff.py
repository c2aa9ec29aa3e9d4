"""What differs between two checkpoints: regions of memory, who is who in the trees, and all of it
from a store.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.checkpoint.chunks import Extent
from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import (
    HostInfo,
    ImageFile,
    Manifest,
    MemoryImage,
    ProcessRecord,
    SessionRef,
)
from criuctl.checkpoint.repository import Repository
from criuctl.criu.image_records import Area, OpenFile
from criuctl.criu.pages import PAGE, WINDOW, PagemapEntry, window_sizes
from criuctl.errors import Damaged
from criuctl.ops.diff import diff
from criuctl.ops.storing import diff_parts
from criuctl.ops.storing.diff_memory import Region, Windows, compare, windows
from criuctl.report import Reporter
from criuctl.store.local import LocalStore

HEAP = 0x5500_0000_0000


class Memory:
    """An address space: pages by address."""

    def __init__(self, pages: dict[int, bytes], sizes: Sequence[int] = ()) -> None:
        self.pages = pages
        self.entries = [PagemapEntry(address, 1, 4) for address in sorted(pages)]
        content = b"".join(pages[address].ljust(PAGE, b"\0") for address in sorted(pages))
        self.chunks: dict[bytes, bytes] = {}
        self.listed: list[tuple[bytes, int]] = []
        for size in sizes or window_sizes(self.entries):
            piece, content = content[:size], content[size:]
            name = hashlib.sha256(piece).digest()
            self.chunks[name] = piece
            self.listed.append((name, size))

    @property
    def windows(self) -> Windows:
        return windows(self.entries, [Extent(name, size, 0, size) for name, size in self.listed])


class Chunks:
    """A reader that remembers what was read."""

    def __init__(self, *memories: Memory) -> None:
        self.all = {name: piece for memory in memories for name, piece in memory.chunks.items()}
        self.read: set[bytes] = set()

    def some(self, sizes: dict[bytes, int]) -> dict[bytes, bytes]:
        self.read.update(sizes)
        assert all(len(self.all[name]) == size for name, size in sizes.items())
        return {name: self.all[name] for name in sizes}


def pages(start: int, *contents: bytes) -> dict[int, bytes]:
    return {start + n * PAGE: content for n, content in enumerate(contents)}


def regions(
    before: Memory,
    after: Memory,
    areas: tuple[Sequence[Area], Sequence[Area]] = ((), ()),
    exact: Chunks | None = None,
) -> list[tuple[str, int, int, int, int, int]]:
    """(name and pages before, after, changed, added, removed) of each region."""
    found = compare(before.windows, after.windows, areas, exact)
    assert all(region.start < region.end for region in found)
    return [
        (
            r.name,
            r.before // PAGE,
            r.after // PAGE,
            r.changed // PAGE,
            r.added // PAGE,
            r.removed // PAGE,
        )
        for r in found
    ]


def test_a_page_that_differs_is_reported_by_window_or_exactly() -> None:
    before = Memory(pages(HEAP, b"a", b"b", b"c") | pages(HEAP + WINDOW, b"d", b"e"))
    after = Memory(pages(HEAP, b"a", b"x", b"c") | pages(HEAP + WINDOW, b"d", b"e"))
    reader = Chunks(before, after)
    assert regions(before, after) == [("", 5, 5, 3, 0, 0)]
    assert regions(before, after, exact=reader) == [("", 5, 5, 1, 0, 0)]
    assert len(reader.read) == 2  # the two of the window that differs
    assert regions(before, before) == [("", 5, 5, 0, 0, 0)]


def test_pages_that_only_one_has_are_new_or_gone() -> None:
    before = Memory(pages(HEAP, b"a", b"b") | pages(HEAP + 9 * WINDOW, b"z"))
    after = Memory(
        pages(HEAP, b"a") | pages(HEAP + 4 * PAGE, b"n") | pages(HEAP + WINDOW, b"m", b"o")
    )
    exact = Chunks(before, after)
    assert regions(before, after, exact=exact) == [("", 2, 4, 0, 3, 1), ("", 1, 0, 0, 0, 1)]
    assert regions(before, after) == [("", 2, 4, 1, 3, 1), ("", 1, 0, 0, 0, 1)]


def test_regions_are_mappings_and_a_mapping_that_grew_is_one() -> None:
    top = HEAP + 100 * WINDOW
    before = Memory(pages(HEAP, b"h", b"i") | pages(top - PAGE, b"s"))
    after = Memory(pages(HEAP, b"h", b"j", b"k") | pages(top - 2 * PAGE, b"r", b"s"))
    old = [
        Area(HEAP, HEAP + 2 * PAGE, "[heap]"),
        Area(top - PAGE, top, "[stack]"),
        Area(top, top + PAGE, "/lib"),
    ]
    new = [
        Area(HEAP, HEAP + 3 * PAGE, "[heap]"),
        Area(top - 2 * PAGE, top, "[stack]"),
        Area(top, top + PAGE, "/lib"),
    ]
    exact = Chunks(before, after)
    assert regions(before, after, (old, new), exact) == [
        ("[heap]", 2, 3, 1, 1, 0),
        ("[stack]", 1, 2, 0, 1, 0),
    ]


def test_one_window_may_hold_two_mappings_and_a_hole() -> None:
    before = Memory(pages(HEAP, b"a", b"b", b"c"))
    after = Memory(pages(HEAP, b"A", b"B", b"C"))
    areas = [Area(HEAP, HEAP + PAGE, "one"), Area(HEAP + 2 * PAGE, HEAP + 3 * PAGE, "two")]
    assert regions(before, after, (areas, areas)) == [
        ("one", 1, 1, 1, 0, 0),
        ("", 1, 1, 1, 0, 0),
        ("two", 1, 1, 1, 0, 0),
    ]


def test_windows_may_be_cut_by_another_rule_in_each() -> None:
    content = (
        pages(HEAP, b"a", b"b") | pages(HEAP + 30 * PAGE, b"c") | pages(HEAP + 50 * PAGE, b"d")
    )
    whole, cut = Memory(content, [4 * PAGE]), Memory(content, [2 * PAGE, PAGE, PAGE])
    assert regions(whole, cut) == [("", 4, 4, 4, 0, 0)]
    assert (
        regions(whole, cut, exact=Chunks(whole, cut)) == regions(cut, cut) == [("", 4, 4, 0, 0, 0)]
    )
    other = Memory(content | pages(HEAP + 30 * PAGE, b"x"), [2 * PAGE, 2 * PAGE])
    reader = Chunks(cut, other)
    assert regions(cut, other, exact=reader) == [("", 4, 4, 1, 0, 0)]
    assert len(reader.read) == 3  # what both have in the same way is not read


def test_layers_are_compared_page_by_page() -> None:
    """A window of pages of an older chunk and of a patch, against the older chunk, and against a
    later state of its own.
    """
    base = Memory(pages(HEAP, *(bytes([n]) for n in range(1, 9))))
    base.chunks[b"patch"] = b"".join(
        word.ljust(PAGE, b"\0") for word in (b"new", b"newer", bytes([7]))
    )
    name, size = base.listed[0]
    old = Extent(name, size, 0, size)

    def patched(number: int, place: int) -> list[Extent]:
        after = Extent(name, size, (number + 1) * PAGE, (7 - number) * PAGE)
        parts = [
            Extent(name, size, 0, number * PAGE),
            Extent(b"patch", 3 * PAGE, place * PAGE, PAGE),
            after,
        ]
        return [part for part in parts if part.length]

    def changes(before: list[Extent], after: list[Extent], reader: Chunks | None = None) -> int:
        return (
            sum(
                r.changed
                for r in compare(
                    windows(base.entries, before), windows(base.entries, after), ([], []), reader
                )
            )
            // PAGE
        )

    assert changes([old], [old]) == changes(patched(3, 0), patched(3, 0)) == 0
    assert (
        changes([old], patched(3, 0))
        == changes(patched(0, 0), [old])
        == changes(patched(3, 0), patched(3, 1))
        == 1
    )
    assert changes(patched(3, 0), patched(7, 1)) == 2
    reader = Chunks(base)
    assert changes([old], patched(6, 2)) == 1
    assert changes([old], patched(6, 2), reader) == 0  # the same content as before
    assert changes(patched(2, 0), patched(6, 1), reader) == 2
    assert reader.read == {name, b"patch"}


def test_a_page_map_that_does_not_fit_is_damage() -> None:
    good = Memory(pages(HEAP, b"a", b"b"))
    name = good.listed[0][0]
    whole = Extent(name, 2 * PAGE, 0, 2 * PAGE)
    for parts in ([], [whole, Extent(b"x", PAGE, 0, PAGE)], [Extent(name, 2 * PAGE, PAGE, PAGE)]):
        with pytest.raises(Damaged):
            windows(good.entries, parts)


# -- who is who
# -----------------------------------------------------------------------------------------


def process(
    pid: int, *argv: str, ppid: int = 0, ns_pid: int = 0, start: int = 0, **more: object
) -> ProcessRecord:
    words = argv or ("x",)
    facts: dict[str, Any] = {"ppid": ppid, "start_time": start, "argv": words, "command": words[0]}
    return ProcessRecord(pid, ns_pid or pid, **(facts | more))


def tree(*processes: ProcessRecord, boot: str = "", **more: object) -> Manifest:
    return Manifest(
        id="ab" * 16,
        session=SessionRef("web", "cd" * 16),
        host=HostInfo(boot_id=boot),
        root=processes[0],
        processes=processes,
        **more,  # type: ignore[arg-type]
    )


def paired(before: Manifest, after: Manifest) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    found = diff_parts.pair(before, after)
    return (
        [(a.pid, b.pid) for a, b in found.pairs],
        [p.pid for p in found.removed],
        [p.pid for p in found.added],
    )


def test_a_process_that_lives_on_is_the_same_whatever_it_has_become() -> None:
    before = tree(process(10, "sh", start=5), process(11, "sh", ppid=10, start=6), boot="b")
    after = tree(process(10, "sh", start=5), process(11, "sleep", "9", ppid=10, start=6), boot="b")
    assert paired(before, after) == ([(10, 10), (11, 11)], [], [])
    part = diff_parts.processes(diff_parts.pair(before, after))
    assert [c.fields for c in part.changed] == [["command", "argv"]]
    assert part.same == 1
    # The same PID, but another process, on the same boot: by its command line it is not the one.
    other = tree(process(10, "sh", start=5), process(11, "make", ppid=10, start=99), boot="b")
    assert paired(before, other) == ([(10, 10)], [11], [11])


def test_a_restored_tree_is_paired_by_the_pids_that_it_sees() -> None:
    before = tree(
        process(10, "web"), process(11, "worker", ppid=10), process(12, "worker", ppid=10)
    )
    after = tree(
        process(910, "web", ns_pid=10),
        process(911, "worker", ppid=910, ns_pid=11),
        process(913, "worker", ppid=910, ns_pid=13),
    )
    assert paired(before, after) == ([(10, 910), (11, 911), (12, 913)], [], [])
    changed = diff_parts.processes(diff_parts.pair(before, after)).changed
    assert [c.fields for c in changed] == [["ns_pid"]]


def test_two_trees_of_the_same_shape_are_paired_by_place() -> None:
    before = tree(
        process(10, "a"),
        process(11, "x", ppid=10),
        process(12, "y", ppid=11),
        process(13, "z", ppid=11),
    )
    after = tree(
        process(50, "b"),
        process(51, "x", ppid=50),
        process(53, "y", ppid=51),
        process(54, "q", ppid=51),
    )
    assert paired(before, after) == ([(10, 50), (11, 51), (12, 53)], [13], [54])


def test_descriptors_of_processes_that_both_have() -> None:
    found = diff_parts.pair(
        tree(process(10, "a"), process(11, "b", ppid=10)),
        tree(process(10, "a"), process(12, "c", ppid=10)),
    )
    log, book = OpenFile("reg", "/log", "wa", 10), OpenFile("reg", "/book", "r", 400)
    before = {10: {0: book, 1: log, 2: log}, 11: {0: book}}
    after = {10: {0: book, 1: replace(log, offset=20), 5: book}, 12: {0: log}}
    part = diff_parts.descriptors(before, after, found)
    assert ([d["fd"] for d in part.added], [d["fd"] for d in part.removed], part.same) == (
        [5],
        [2],
        1,
    )
    assert [(c.fields, c.before["offset"], c.after["offset"]) for c in part.changed] == [
        (["offset"], 10, 20)
    ]


def test_connections_are_the_same_by_their_ends() -> None:
    def tcp(fd: int, peer: str, state: str = "established", pid: int = 10) -> ConnectionRecord:
        return ConnectionRecord(
            pid,
            fd,
            family="inet",
            type="stream",
            protocol="tcp",
            local="a:1",
            peer=peer,
            state=state,
        )

    found = diff_parts.pair(tree(process(10, "a")), tree(process(10, "a")))
    before = [tcp(3, "b:1"), tcp(4, "b:2"), tcp(5, "b:3"), tcp(6, "b:4")]
    after = [tcp(3, "b:1"), tcp(9, "b:2"), tcp(5, "b:9"), tcp(6, "b:4", "close-wait")]
    part = diff_parts.connections(before, after, found)
    assert part.same == 2
    assert [c["peer"] for c in part.removed] == ["b:3"]
    assert [c["peer"] for c in part.added] == ["b:9"]
    assert [(c.fields, c.after["state"]) for c in part.changed] == [(["state"], "close-wait")]


def test_files_are_compared_by_path_and_known_contents() -> None:
    def file(path: str, **more: object) -> FileRecord:
        return FileRecord(path, "written", **{"size": 5, **more})  # type: ignore[arg-type]

    before = [
        file("/same"),
        file("/gone"),
        file("/d", digest="aa"),
        file("/touched", digest="aa"),
        file("/u"),
        file("/m"),
    ]
    after = [
        file("/same"),
        file("/new"),
        file("/d", digest="bb"),
        file("/touched", digest="aa", mtime_ns=9),
        file("/u", mtime_ns=9),
        file("/m", mode=0o600),
    ]
    part = diff_parts.files(before, after, lambda _a, _b: 0)
    assert ([f["path"] for f in part.added], [f["path"] for f in part.removed], part.same) == (
        ["/new"],
        ["/gone"],
        1,
    )
    assert {c.after["path"]: (c.fields, c.more["contents"]) for c in part.changed} == {
        "/d": (["contents"], "changed"),
        "/touched": (["mtime_ns"], "same"),
        "/u": (["mtime_ns", "contents"], "unknown"),
        "/m": (["mode"], "same"),
    }


# -- out of a store
# -------------------------------------------------------------------------------------


def write(repository: Repository, memory: Memory, file: bytes, *extra: ProcessRecord) -> None:
    with repository.writer(Reporter()) as writer:
        content = b"".join(
            piece for name, _size in memory.listed for piece in [memory.chunks[name]]
        )
        buffer, position = writer.acquire(), 0
        for _name, size in memory.listed:
            buffer.view[position : position + size] = content[position : position + size]
            writer.window("memory", buffer, position, position + size)
            position += size
        writer.release(buffer)
        writer.add_bytes(
            "entries",
            b"".join(struct.pack("<QII", e.vaddr, e.pages, e.flags) for e in memory.entries),
        )
        writer.add_bytes("images", b"not one of CRIU's")
        writer.add_bytes("file", file)
        made = tree(
            process(10, "web"),
            *extra,
            images=(ImageFile("pstree.img", 17),),
            image_data=writer.stream("images"),
            memory=(
                MemoryImage(
                    "task", 10, len(memory.pages), writer.stream("entries"), writer.stream("memory")
                ),
            ),
            files=(FileRecord("/srv/log", "carried", size=len(file), data=writer.stream("file")),),
        )
        writer.commit(made.with_use(id=bytes([len(repository.list()) + 1] * 16).hex()))


def test_two_checkpoints_of_a_store(tmp_path: Path) -> None:
    config = kit.config(tmp_path, store=str(tmp_path / "store"))
    with Repository.init(LocalStore(config.store), encryption=False, config=config) as repository:
        before = Memory(pages(HEAP, *(bytes([n]) * 9 for n in range(1, 90))))
        after = Memory(
            before.pages | pages(HEAP + 5 * PAGE, b"new") | pages(HEAP + 3 * WINDOW, b"more")
        )
        write(repository, before, b"a" * (300 << 10))
        write(
            repository,
            after,
            b"a" * (260 << 10) + b"b" * (40 << 10),
            process(11, "worker", ppid=10),
        )
        write(
            repository,
            after,
            b"a" * (260 << 10) + b"b" * (40 << 10),
            process(11, "worker", ppid=10),
        )
    body = diff(config, "web@1", "web@2", reporter=Reporter()).to_dict()
    assert not body["same"]
    assert [p["argv"] for p in body["processes"]["added"]] == [["worker"]]
    (changed,) = body["files"]["changed"]
    assert (changed["fields"], changed["contents"], changed["changed_bytes"]) == (
        ["contents"],
        "changed",
        44 << 10,
    )
    memory = body["memory"]
    assert (memory["before"], memory["after"]) == (89 * PAGE, 90 * PAGE)
    assert (memory["changed"], memory["added"], memory["removed"]) == (WINDOW, PAGE, 0)
    assert len(body["warnings"]) == 4  # such images show neither descriptors nor mappings
    exact = diff(config, "web@1", "web@2", exact=True, reporter=Reporter()).to_dict()["memory"]
    assert (exact["changed"], exact["added"], exact["exact"]) == (PAGE, PAGE, True)
    same = diff(config, "web@2", "web@3", reporter=Reporter()).to_dict()
    assert same["same"]
    assert (same["memory"]["before"], same["memory"]["changed"]) == (90 * PAGE, 0)
    assert [space["regions"] for space in same["memory"]["spaces"]] == [[]]


def test_regions_are_plain_json() -> None:
    assert Region(1, 2, "[heap]").to_dict() == {
        "start": 1,
        "end": 2,
        "name": "[heap]",
        "before": 0,
        "after": 0,
        "changed": 0,
        "added": 0,
        "removed": 0,
    }
