"""Memory written without CRIU: only unshared memory, and all pages of a task once, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import filled

from criuctl.criu import direct, images, schema
from criuctl.criu.direct import LEAST
from criuctl.criu.pages import PAGE, PE_LAZY, PE_PARENT, PE_PRESENT, PagemapEntry

BASE = 0x10000000
USUAL = PE_LAZY | PE_PRESENT
ROOT, CHILD, STRANGER = 10, 11, 12
PLAIN = {"flags": 0x22, "status": 0x201, "prot": 3}


def vma(memory: Any, start: int, pages: int, **values: int) -> None:
    """A mapping, by page numbers."""
    added = filled(memory.vmas.add())
    for field, value in {
        "start": at(start),
        "end": at(start + pages),
        "fd": -1,
        **PLAIN,
        **values,
    }.items():
        setattr(added, field, value)


def at(page: int) -> int:
    return BASE + page * PAGE


def run(page: int, pages: int, flags: int = USUAL) -> PagemapEntry:
    return PagemapEntry(at(page), pages, flags)


class Images:
    """The images of a parent, a child of the same program, and one of another, with the mappings
    that a test gives them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = os.open(folder, os.O_RDONLY)
        tree = [(ROOT, 0), (CHILD, ROOT), (STRANGER, ROOT)]
        entries = [filled(schema.message("PSTREE")(), pid=pid, ppid=ppid) for pid, ppid in tree]
        for entry in entries:
            entry.threads.extend([entry.pid, entry.pid + 100])
            for thread in entry.threads:
                self.core(thread)
        images.write(self.folder, "pstree.img", "PSTREE", entries)
        self.memories = {
            pid: filled(schema.message("MM")(), exe_file_id=7 + (pid == STRANGER))
            for pid, _ppid in tree
        }

    def core(self, thread: int, rseq: int | None = None) -> None:
        core = schema.message("CORE")()
        core.mtype = 1
        filled(core.thread_core, futex_rla=0, futex_rla_len=0)
        if rseq is not None:
            core.thread_core.rseq_entry.rseq_abi_pointer = rseq
            core.thread_core.rseq_entry.rseq_abi_size = 32
            core.thread_core.rseq_entry.signature = 1
        images.write(self.folder, f"core-{thread}.img", "CORE", [core])

    def divide(
        self,
        entries: Mapping[int, Sequence[PagemapEntry]],
        own: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> dict[int, list[tuple[PagemapEntry, bool]]]:
        for pid, memory in self.memories.items():
            if memory.vmas:
                images.write(self.folder, f"mm-{pid}.img", "MM", [memory])
        return direct.divide(self.folder, direct.tasks(self.folder), entries, own or {})


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Images]:
    made = Images(tmp_path)
    yield made
    os.close(made.folder)


def test_plain_memory_goes_directly(kit: Images) -> None:
    vma(kit.memories[ROOT], 0, 1000)
    entries = [run(0, LEAST), run(100, LEAST - 1), run(200, 800)]
    assert kit.divide({ROOT: entries}) == {
        ROOT: [(entries[0], True), (entries[1], False), (entries[2], True)]
    }


def test_something_is_left_to_criu(kit: Images) -> None:
    """It looks at the first run of a page map without asking whether there is one."""
    vma(kit.memories[ROOT], 0, 1000)
    assert kit.divide({ROOT: [run(0, 100), run(200, 100)]}) == {
        ROOT: [(run(0, 100), False), (run(200, 100), True)]
    }


@pytest.mark.parametrize("flags", [PE_PRESENT, PE_LAZY, PE_PARENT | PE_LAZY])
def test_what_criu_would_not_let_follow_does_not(flags: int, kit: Images) -> None:
    vma(kit.memories[ROOT], 0, 1000)
    entry = run(0, 500, flags)
    assert kit.divide({ROOT: [entry]}) == {ROOT: [(entry, False)]}


@pytest.mark.parametrize(
    "special",
    [
        {"prot": 1},
        {"prot": 0},
        {"flags": 0x02},  # of a file
        {"flags": 0x21},  # shared
        {"flags": 0x122},  # grows down
        {"flags": 0x2022},  # locked
        {"flags": 0x40022},  # huge pages
        {"status": 0x201 | 1 << 3},  # vDSO
        {"status": 0x1},
    ],
)
def test_special_memory_does_not(special: dict[str, int], kit: Images) -> None:
    """A run that goes over a border is cut there."""
    vma(kit.memories[ROOT], 0, 100)
    vma(kit.memories[ROOT], 100, 100, **special)
    vma(kit.memories[ROOT], 200, 100)
    assert kit.divide({ROOT: [run(0, 300)]}) == {
        ROOT: [(run(0, 100), True), (run(100, 100), False), (run(200, 100), True)]
    }


def test_what_a_parent_and_its_child_may_share_does_not(kit: Images) -> None:
    """With the same ends, and of the same program: only such memory may be what a fork has left."""
    for memory in kit.memories.values():
        vma(memory, 0, 100)
    vma(kit.memories[ROOT], 200, 100)
    vma(kit.memories[CHILD], 200, 200)
    both = [run(0, 100), run(200, 100)]
    divided = kit.divide({ROOT: both, CHILD: both, STRANGER: [run(0, 100), run(300, 1)]})
    assert divided[ROOT] == divided[CHILD] == [(both[0], False), (both[1], True)]
    assert divided[STRANGER] == [(run(0, 100), True), (run(300, 1), False)]


def test_memory_that_a_task_is_known_not_to_share_does(kit: Images) -> None:
    """Of mappings that are plain memory alone, and what is too little stays where it was."""
    for pid in (ROOT, CHILD):
        vma(kit.memories[pid], 0, 100)
        vma(kit.memories[pid], 200, 300)
        vma(kit.memories[pid], 600, 100, flags=0x2022)
    entries = [run(0, 100), run(200, 300), run(600, 100)]
    own = [(at(0), at(LEAST - 1)), (at(90), at(300)), (at(310), at(500)), (at(600), at(700))]
    divided = kit.divide({ROOT: entries, CHILD: entries}, {CHILD: own})
    assert divided[ROOT] == [(entry, False) for entry in entries]
    expected = [
        (run(0, 100), False),
        (run(200, 100), True),
        (run(300, 10), False),
        (run(310, 190), True),
        (entries[2], False),
    ]
    assert divided[CHILD] == expected


@pytest.mark.parametrize("thread", [ROOT, ROOT + 100])
def test_where_the_kernel_writes_by_itself_does_not(thread: int, kit: Images) -> None:
    """The kernel writes each thread's processor into its rseq page before it runs."""
    kit.core(thread, at(150) + 64)
    vma(kit.memories[ROOT], 0, 300)
    assert kit.divide({ROOT: [run(0, 300)]}) == {
        ROOT: [(run(0, 150), True), (run(150, 1), False), (run(151, 149), True)]
    }


@given(
    st.lists(
        st.tuples(st.integers(0, 80), st.integers(1, 300), st.booleans()), min_size=1, max_size=12
    ),
    st.lists(
        st.tuples(st.integers(0, 80), st.integers(1, 300), st.booleans()), min_size=1, max_size=12
    ),
)
def test_every_page_goes_one_way(
    areas: list[tuple[int, int, bool]], runs: list[tuple[int, int, bool]]
) -> None:
    good: set[int] = set()
    ranges: list[tuple[int, int]] = []
    page = 0
    for gap, pages, plain in areas:
        page += gap
        if plain:
            ranges.append((at(page), at(page + pages)))
            good |= set(range(page, page + pages))
        page += pages
    entries = []
    page = 0
    for gap, pages, lazy in runs:
        page += gap
        entries.append(run(page, pages, USUAL if lazy else PE_PRESENT))
        page += pages

    def pages_of(some: Sequence[PagemapEntry]) -> list[tuple[int, int]]:
        return [((e.vaddr - BASE) // PAGE + n, e.flags) for e in some for n in range(e.pages)]

    cut = list(direct._cut(entries, direct._joined(ranges)))
    assert pages_of([entry for entry, _directly in cut]) == pages_of(entries)
    for entry, directly in cut:
        if directly:
            assert entry.flags == USUAL and entry.pages >= LEAST
            assert {page for page, _flags in pages_of([entry])} <= good
