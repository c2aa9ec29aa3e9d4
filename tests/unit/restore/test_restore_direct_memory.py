"""Memory that goes from a store straight into a process: all of it and nothing else, or an error,
and no thread stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint.chunk_targets import write_at
from criuctl.checkpoint.chunks import Extent, cut
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Damaged, RestoreFailed
from criuctl.report import Reporter
from criuctl.restore.direct_memory import Filling
from criuctl.store.memory import MemoryStore

PAGE = 4096
WINDOW = 256 << 10
SIZE = 5 * WINDOW
INNER = 7  # what the images call the process


class Process:
    """A process with `SIZE` bytes of memory at `address`, which begin with "stay"; `content` is
    what it had when it ended.
    """

    def __init__(self) -> None:
        memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[0:4] = b"stay"
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.content = b""
        self._reading, telling = os.pipe()
        asking, self._ask = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.read(asking, 1)
            view = memoryview(memory)
            while view:
                view = view[os.write(telling, view[: 64 << 10]) :]
            os._exit(0)
        os.close(telling)
        os.close(asking)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(BrokenPipeError):  # it was killed
            os.write(self._ask, b"x")
        self.content = b"".join(iter(lambda: os.read(self._reading, 1 << 20), b""))
        os.close(self._ask)
        os.close(self._reading)
        os.waitpid(self.pid, 0)


class Stored:
    """A stream of four windows in a store: random, zeros, random, random."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore("memory")
        repo = Repository.init(self.store, encryption=False, config=kit.config(folder))
        some = random.Random(5)
        self.content = some.randbytes(WINDOW) + bytes(WINDOW) + some.randbytes(2 * WINDOW)
        with repo.writer(Reporter()) as writer:
            writer.add_bytes("m", self.content)
            self.ref = writer.stream("m")
            writer.commit(kit.fill(writer, kit.SMALL))
        self.reader: CheckpointReader = repo.reader(Reporter())

    def runs(self, *lengths: int) -> Iterator[list[Extent]]:
        return cut(self.reader.extents(self.ref), lengths)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def no_threads() -> bool:
    return not [
        t for t in threading.enumerate() if t.name.startswith(("criuctl-fill", "criuctl-read"))
    ]


def test_all_of_it_and_nothing_else(stored: Stored) -> None:
    """Runs begin and end in the middle of chunks; what is left out stays as it was."""
    with Process() as process:
        filling = Filling(stored.reader)
        lengths = (PAGE, WINDOW, WINDOW // 2, 2 * WINDOW + WINDOW // 2 - PAGE)
        first, left_out, second, third = stored.runs(*lengths)
        assert sum(part.length for part in left_out) == WINDOW
        filling.add(INNER, process.address + PAGE, first)
        filling.add(INNER, process.address + 3 * PAGE, second)
        filling.add(INNER, process.address + 3 * PAGE + WINDOW, third)
        filling.begin()
        filling.finish({INNER: process.pid})
        filling.stop()
    expected = bytearray(SIZE)
    expected[:4] = b"stay"
    expected[PAGE : 2 * PAGE] = stored.content[:PAGE]
    expected[3 * PAGE : 3 * PAGE + WINDOW // 2] = stored.content[PAGE + WINDOW :][: WINDOW // 2]
    begin = PAGE + WINDOW + WINDOW // 2
    expected[3 * PAGE + WINDOW : 3 * PAGE + WINDOW + lengths[3]] = stored.content[begin:]
    assert process.content == bytes(expected)
    assert no_threads()


def test_nothing_is_written_before_the_processes_are_in_place(stored: Stored) -> None:
    with Process() as process:
        filling = Filling(stored.reader)
        for run in stored.runs(4 * WINDOW):
            filling.add(INNER, process.address, run)
        filling.begin()
        filling.stop()
        assert no_threads()
    assert process.content == b"stay" + bytes(SIZE - 4)


def test_a_process_that_is_not_there(stored: Stored) -> None:
    with Process() as process:
        filling = Filling(stored.reader)
        for run in stored.runs(4 * WINDOW):
            filling.add(INNER, process.address, run)
        filling.begin()
        with pytest.raises(RestoreFailed, match="PID 7"):
            filling.finish({INNER + 1: process.pid})
        filling.stop()
    assert no_threads()


def test_a_process_that_has_ended(stored: Stored) -> None:
    """Its memory takes nothing and says nothing."""
    with Process() as process:
        os.kill(process.pid, 9)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        filling = Filling(stored.reader)
        for run in stored.runs(4 * WINDOW):
            filling.add(INNER, process.address, run)
        filling.begin()
        with pytest.raises(RestoreFailed, match=r"PID 7: its memory .*No such process"):
            filling.finish({INNER: process.pid})
        filling.stop()
    assert no_threads()


def test_a_process_that_ends_meanwhile() -> None:
    with Process() as process, open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
        write_at(memory.fileno(), memoryview(b"some"), process.address)
        os.kill(process.pid, 9)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            write_at(memory.fileno(), memoryview(b"more"), process.address)


def test_memory_that_is_not_there(stored: Stored) -> None:
    """The error names the process and the address."""
    with Process() as process:
        filling = Filling(stored.reader)
        for run in stored.runs(4 * WINDOW):
            filling.add(INNER, PAGE, run)
        filling.begin()
        with pytest.raises(RestoreFailed, match=r"PID 7: its memory at 0x.*cannot be written"):
            filling.finish({INNER: process.pid})
    assert no_threads()


def test_damage(stored: Stored) -> None:
    """Not a byte of a damaged chunk is written."""
    (name,) = [info.name for info in stored.store.list("packs/") if info.size > WINDOW]
    content = bytearray(stored.store.get(name))
    content[2000] ^= 1  # in the first chunk
    stored.store.put(name, bytes(content))
    with Process() as process:
        filling = Filling(stored.reader)
        for run in stored.runs(4 * WINDOW):
            filling.add(INNER, process.address, run)
        filling.begin()
        with pytest.raises(Damaged):
            filling.finish({INNER: process.pid})
    assert process.content[:WINDOW] == b"stay" + bytes(WINDOW - 4)
    assert no_threads()


def test_nothing_to_do(stored: Stored) -> None:
    filling = Filling(stored.reader)
    filling.begin()
    filling.finish({})
    filling.stop()
    assert no_threads()
