"""Mappings that are cut because a child shares none of them, and the pages compared for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import filled

from criuctl.criu import direct, images, schema, unshared
from criuctl.criu.pages import PAGE, PagemapEntry
from criuctl.criu.unshared import WORTHWHILE, TaskPages

BASE = 0x10000000
SIZE = WORTHWHILE * PAGE
AREA = (BASE, BASE + SIZE)
ROOT, CHILD, GRANDCHILD = 10, 11, 12

runs = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 300)), min_size=1, max_size=20)


def laid(gaps: Sequence[tuple[int, int]]) -> list[PagemapEntry]:
    """Runs behind gaps of some pages."""
    entries, vaddr = [], BASE
    for gap, pages in gaps:
        entries.append(PagemapEntry(vaddr + gap * PAGE, pages, 4))
        vaddr = entries[-1].vaddr + pages * PAGE
    return entries


@given(runs, st.integers(0, 4000), st.integers(1, 4000))
def test_a_sample_is_of_pages_that_are_there(
    gaps: list[tuple[int, int]], skip: int, pages: int
) -> None:
    """In the range, none twice, as many as wanted, and one in each stretch: no large part is left
    out.
    """
    entries = laid(gaps)
    start, end = BASE + skip * PAGE, BASE + (skip + pages) * PAGE
    present = [
        v
        for e in entries
        for v in range(e.vaddr, e.vaddr + e.pages * PAGE, PAGE)
        if start <= v < end
    ]
    sample = list(TaskPages(-1, entries).sample(start, end))
    assert len(sample) == min(max(len(present) // 64, 16), 256, len(present))
    places = [present.index(vaddr) for vaddr in sample]
    for number, place in enumerate(places):
        assert (
            len(present) * number // len(sample)
            <= place
            < len(present) * (number + 1) // len(sample)
        )


@given(runs)
def test_a_page_is_found_by_its_address(gaps: list[tuple[int, int]]) -> None:
    entries = laid(gaps)
    total = sum(entry.pages for entry in entries)
    fd = os.memfd_create("pages")
    try:
        os.write(fd, b"".join(number.to_bytes(4, "big") * (PAGE // 4) for number in range(total)))
        task = TaskPages(fd, entries)
        number = 0
        assert task.page(entries[0].vaddr - PAGE) is None
        for entry in entries:
            for page in (0, entry.pages - 1):
                assert task.page(entry.vaddr + page * PAGE) == (number + page).to_bytes(
                    4, "big"
                ) * (PAGE // 4)
            number += entry.pages
        assert task.page(entries[-1].vaddr + entries[-1].pages * PAGE) is None
    finally:
        os.close(fd)


# -- images
# -----------------------------------------------------------------------------------------


class Tree:
    """Images of three generations, each with one mapping and pages of its own making."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.open(folder, os.O_RDONLY)
        self.tasks: dict[int, TaskPages] = {}
        self._fds: list[int] = [self.folder]
        tree = [(ROOT, 0), (CHILD, ROOT), (GRANDCHILD, CHILD)]
        entries = [filled(schema.message("PSTREE")(), pid=pid, ppid=ppid) for pid, ppid in tree]
        images.write(self.folder, "pstree.img", "PSTREE", entries)

    def task(
        self,
        pid: int,
        content: bytes,
        *,
        area: tuple[int, int] = AREA,
        program: int = 1,
        **vma: int,
    ) -> None:
        """`content` is the first byte of each page."""
        memory = filled(schema.message("MM")(), exe_file_id=program)
        for field, value in {
            "start": area[0],
            "end": area[1],
            "flags": 0x22,
            "status": 0x201,
            "prot": 3,
            "fd": -1,
            **vma,
        }.items():
            if not memory.vmas:
                filled(memory.vmas.add())
            setattr(memory.vmas[0], field, value)
        images.write(self.folder, f"mm-{pid}.img", "MM", [memory])
        fd = os.memfd_create("pages")
        os.write(fd, b"".join(bytes([byte]) * PAGE for byte in content))
        self._fds.append(fd)
        self.tasks[pid] = TaskPages(fd, [PagemapEntry(area[0], len(content), 4)])

    def areas(self, pid: int) -> list[tuple[int, int]]:
        """The mappings in the image; the parts of one differ in nothing else."""
        vmas = images.read(self.folder, f"mm-{pid}.img", "MM")[0].vmas
        assert len({(v.flags, v.status, v.prot, v.fd, v.madv) for v in vmas}) == 1
        return [(v.start, v.end) for v in vmas]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.close()


WHOLE = [AREA]
CUT = [(BASE, BASE + PAGE), (BASE + PAGE, BASE + SIZE)]
A, B, C = (bytes([byte]) * WORTHWHILE for byte in b"abc")


@pytest.mark.parametrize(
    ("contents", "areas"),
    [
        # the third one's ends are not those of the second's parts
        ((A, B, C), (WHOLE, CUT, WHOLE)),
        ((A, A, A), (WHOLE, WHOLE, WHOLE)),
        ((A, A, B), (WHOLE, WHOLE, CUT)),
        ((A, B, B), (WHOLE, CUT, CUT)),  # what is shared further down has the same ends
        ((A, B[:128] + A[128:], C), (WHOLE, WHOLE, CUT)),  # a part of it is shared
    ],
)
def test_what_is_not_shared_is_cut(
    tree: Tree, contents: tuple[bytes, bytes, bytes], areas: tuple[Any, Any, Any]
) -> None:
    for pid, content in zip((ROOT, CHILD, GRANDCHILD), contents, strict=True):
        tree.task(pid, content)
    assert unshared.part(tree.folder, direct.tasks(tree.folder), tree.tasks) == sum(
        area == CUT for area in areas
    )
    assert tuple(tree.areas(pid) for pid in (ROOT, CHILD, GRANDCHILD)) == areas


@pytest.mark.parametrize(
    "child",
    [
        {"flags": 0x122},  # a stack
        {"flags": 0x21},  # shared
        {"status": 0x41},  # of a file
        {"prot": 1},
        {"program": 2},
        {"area": (BASE, BASE + SIZE - PAGE)},
        {"area": (BASE + PAGE, BASE + SIZE + PAGE)},
    ],
)
def test_other_mappings_are_left_alone(tree: Tree, child: dict[str, Any]) -> None:
    tree.task(ROOT, A)
    tree.task(CHILD, B[: WORTHWHILE - 1], **child)
    before = tree.areas(CHILD)
    assert unshared.part(tree.folder, direct.tasks(tree.folder), tree.tasks) == 0
    assert tree.areas(CHILD) == before


def test_a_process_without_memory(tree: Tree) -> None:
    """A zombie between two generations, and a task without an image of its mappings."""
    tree.task(ROOT, A)
    tree.task(GRANDCHILD, B)
    tree.tasks[CHILD] = tree.tasks[ROOT]
    assert unshared.part(tree.folder, direct.tasks(tree.folder), tree.tasks) == 0
