"""A userfaultfd taken out of a running process leaves nothing in it, and shows what it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.keeper import wait_until

from criuctl.proc import kernel_writers, userfault, written_pages
from criuctl.proc.mappings import mappings
from criuctl.proc.memory import TaskMemory

pytestmark = pytest.mark.skipif(
    not written_pages.supported() or os.geteuid() != 0,
    reason="the kernel does not track writes, or root is needed",
)
PAGE = 4096
SIZE = 4 << 20
HEAD = f"""
import mmap, select, sys, threading, time
memory = mmap.mmap(-1, {SIZE}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[:] = b"x" * {SIZE}
import ctypes
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
"""
WAYS = {
    "computes": "while True: pass",
    "sleeps": "time.sleep(1000)",
    "reads": "sys.stdin.readline()",
    "polls": "print(select.epoll().poll(1000), flush=True)",
}

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def run(code: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", HEAD + code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("way", WAYS)
def test_it_is_taken_from_whatever_the_process_does(way: str, start: Start) -> None:
    process = start(WAYS[way])
    said(process)
    for _ in range(20):
        (fd,) = userfault.take([process.pid]).values()
        assert isinstance(fd, int)
        assert os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[userfaultfd]"
        os.close(fd)
    assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == sorted(
        {"0", "1", "2"} | ({"3"} if way == "polls" else set())
    )
    assert process.poll() is None


def test_written_pages_are_shown_and_all_is_forgotten_when_it_is_closed(start: Start) -> None:
    process = start(
        "for line in sys.stdin:\n    memory[int(line) * 4096] = 7\n    print('done', flush=True)\n"
    )
    at = int(said(process))
    (fd,) = userfault.take([process.pid]).values()
    assert isinstance(fd, int)
    (area,) = ((m.start, m.end) for m in mappings(process.pid) if m.start <= at < m.end)
    assert written_pages.register(fd, *area)
    with TaskMemory(process.pid) as memory:
        first = list(written_pages.protect(memory.pagemap, *area))
        assert (at, at + SIZE) in first or sum(end - start for start, end in first) >= SIZE
        assert list(written_pages.protect(memory.pagemap, at, at + SIZE)) == []
        assert process.stdin is not None
        places = list(range(1, SIZE // PAGE, 2))  # so many regions that the kernel's buffer is full
        for place in (3, *places):
            process.stdin.write(f"{place}\n")
            process.stdin.flush()
            assert said(process) == "done"
        looked = list(written_pages.look(memory.pagemap, at, at + SIZE))
        assert [a.start for a in looked] == [at + n * PAGE for n in range(SIZE // PAGE)]
        assert [a.start for a in looked if not a.clean] == [at + n * PAGE for n in places]
        os.close(fd)
        assert not [a for a in written_pages.look(memory.pagemap, at, at + SIZE) if a.clean]


def test_why_there_is_none(start: Start) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    filtered = start(
        "import os\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from criuctl.proc import sessionchild\n"
        "sessionchild.filter_of = lambda *_: [(0x06, 0, 0, 0x7FFF0000)] * 2\n"
        "sessionchild.refuse(['io_uring'])\n"
        "print('set', flush=True); time.sleep(1000)\n"
    )
    session = start(
        f"sys.path[:0] = {sys.path!r}\n"
        "from criuctl.proc import sessionchild\n"
        "sessionchild.refuse(['io_uring', 'mptcp']); sessionchild.refuse(['mptcp'])\n"
        "print('set', flush=True); time.sleep(1000)\n"
    )
    for process in (filtered, session):
        said(process)
        assert said(process) == "set"
    taken = userfault.take([gone.pid, filtered.pid, session.pid])
    assert "no process" in str(taken[gone.pid])
    assert taken[filtered.pid] == "a seccomp filter restricts it"
    fd = taken[session.pid]
    assert isinstance(fd, int)
    os.close(fd)


def test_direct_input_is_seen(start: Start) -> None:
    process = start(
        "import os\n"
        "fd = os.open('/proc/self/exe', os.O_RDONLY | os.O_DIRECT)\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
        "os.close(fd)\n"
        "time.sleep(1000)\n"
    )
    said(process)
    assert said(process) == "open", "no direct I/O on the file system of the interpreter"
    assert "direct I/O" in kernel_writers.pins(process.pid)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert wait_until(lambda: kernel_writers.pins(process.pid) == "", 60, "it is closed")
