"""What the kernel says of pages that a fork has left to two processes, and of those that have
become one's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from criuctl.criu.direct import LEAST, Range
from criuctl.criu.pages import PAGE
from criuctl.dump.private_memory import own_memory
from criuctl.proc.tree import read_tree

PAGES = 1000
PROGRAM = """
import ctypes, json, mmap, os, signal, sys

def area(pages):  # mappings without rights around it keep it apart
    around = libc.mmap(None, (pages + 2) * 4096, 0, 0x22, -1, 0) + 4096
    libc.mprotect(ctypes.c_void_p(around), ctypes.c_size_t(pages * 4096), 3)
    libc.madvise(ctypes.c_void_p(around), ctypes.c_size_t(pages * 4096), mmap.MADV_NOHUGEPAGE)
    return around

def fill(address, first, behind):
    ctypes.memset(address + first * 4096, 1, (behind - first) * 4096)

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
pages, parents, childs = json.loads(sys.argv[1])
memory, other = area(pages), area(pages)
for first, behind in parents["before"]:
    fill(memory, first, behind)
reading, telling = os.pipe()
child = os.fork()
for first, behind in (parents if child else childs)["after"]:
    fill(memory, first, behind)
fill(other, 0, pages)
if child:
    os.read(reading, 1)
    print(json.dumps([child, memory, other]), flush=True)
else:
    os.write(telling, b"x")
while True:
    signal.pause()
"""

Launch = Callable[[list[Range], list[Range], list[Range]], tuple[int, int, int, int]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Start a parent and its child, which fill these pages before the fork and after it: both PIDs,
    and where their memory is.
    """
    started = []

    def launch(
        before: list[Range], parents: list[Range], childs: list[Range]
    ) -> tuple[int, int, int, int]:
        plan = [PAGES, {"before": before, "after": parents}, {"after": childs}]
        argv = [sys.executable, "-c", PROGRAM, json.dumps(plan)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        child, memory, other = json.loads(process.stdout.readline())
        return process.pid, child, memory, other

    yield launch
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def pages(found: list[Range], address: int) -> list[Range]:
    """The areas within the memory at `address`, as page numbers."""
    end = address + PAGES * PAGE
    return [
        ((low - address) // PAGE, (high - address) // PAGE)
        for low, high in found
        if address <= low < end
    ]


def test_what_was_written_to_since_the_fork_is_ones_own(launch: Launch) -> None:
    """Either of the two may write, and both count it then; an area without any pages prevents
    nothing.
    """
    parent, child, memory, other = launch([(0, 500)], [(400, 500), (600, 700)], [(100, 300)])
    found = own_memory(read_tree(parent))
    assert set(found) == {parent, child}
    for pid, theirs in found.items():
        assert pages(theirs, memory) == [(100, 300), (400, PAGES)], pid
        assert pages(theirs, other) == [(0, PAGES)], pid
        assert all(low < high for low, high in theirs)
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(theirs)))
        assert theirs == sorted(theirs)


def test_small_amounts_are_not_reported(launch: Launch) -> None:
    parent, child, memory, _other = launch(
        [(0, PAGES)], [(10, 10 + LEAST - 1)], [(500, 500 + LEAST)]
    )
    found = own_memory(read_tree(parent))
    assert set(found) == {parent, child}
    for theirs in found.values():
        assert pages(theirs, memory) == [(500, 500 + LEAST)]


def test_who_has_no_parent_and_no_child_needs_no_look(launch: Launch) -> None:
    parent, child, _memory, _other = launch([(0, PAGES)], [], [])
    tree = read_tree(parent)
    assert own_memory([process for process in tree if process.pid == child]) == {}
