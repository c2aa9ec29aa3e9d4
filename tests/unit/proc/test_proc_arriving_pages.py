"""Memory that arrives while a program changes it in every way: none is lost, none overwritten."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.keeper import wait_until

from criuctl.proc.arriving_pages import Arrival
from criuctl.proc.memory import PAGE
from criuctl.proc.syscalls import has_userfaultfd

pytestmark = pytest.mark.skipif(not has_userfaultfd(), reason="needs userfaultfd(2)")

MIB = 12
STEPS = 4000
KEY = 7


def _content(home: int, pages: int) -> bytes:
    """Pages of which every word is their address."""
    return b"".join(struct.pack("<Q", home + n * PAGE) * (PAGE // 8) for n in range(pages))


class Hostile:
    """One run of hostile.c whose memory arrives from here."""

    def __init__(self, program: Path, seed: int, *, steps: int = STEPS) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = subprocess.Popen(
                [program, "-", str(seed), str(steps), str(MIB), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            theirs.close()
            where, (fd, *_), _, _ = socket.recv_fds(ours, 1024, 1)
            words = struct.unpack(f"{len(where) // 8}Q", where)
            self.runs = [(at, at + size) for at, size in zip(words[::2], words[1::2], strict=True)]
            self.fd, self.random = fd, random.Random(seed)
            self.held: list[int] = []
            self.asked = 0
            self.arrival = Arrival(self.bring, self.held.append)
            self.arrival.add(fd, KEY, self.runs)
            self.arrival.start()
            ours.sendall(b"g")

    def bring(self, key: int, home: int) -> None:
        """Put a page that was touched, and some after it."""
        self.asked += 1
        end = next(end for start, end in self.runs if start <= home < end)
        pages = min(1 + home // PAGE % 16, (end - home) // PAGE)
        self.arrival.put(key, home, _content(home, pages))

    def fill(self) -> None:
        """Put all pages in random order, by two threads, while the program works."""
        pieces = []
        for start, end in self.runs:
            while start < end:
                pages = min(self.random.randint(1, 16), (end - start) // PAGE)
                pieces.append((start, pages))
                start += pages * PAGE
        self.random.shuffle(pieces)
        errors: list[BaseException] = []

        def work(own: list[tuple[int, int]]) -> None:
            try:
                for home, pages in own:
                    self.arrival.put(KEY, home, _content(home, pages))
                    time.sleep(0.001)  # the program is to change much meanwhile
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(pieces[n::2],)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


@contextmanager
def _hostile(program: Path, seed: int, *, steps: int = STEPS) -> Iterator[Hostile]:
    hostile = Hostile(program, seed, steps=steps)
    try:
        yield hostile
    finally:
        hostile.process.kill()
        hostile.arrival.close()
        hostile.process.communicate(timeout=60)


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_is_changed_in_every_way(compiled: Path, seed: int) -> None:
    """Also that of children which it forks meanwhile."""
    with _hostile(compiled / "hostile", seed) as hostile:
        wait_until(lambda: hostile.held and hostile.asked > 50, 60, "it works, and has forked")
        hostile.fill()
        assert hostile.arrival.absent() == []
        hostile.arrival.check()
        hostile.arrival.close()
        hostile.arrival = Arrival(hostile.bring, hostile.held.append)  # closed by the end
        out, _ = hostile.process.communicate(timeout=300)
        assert (hostile.process.returncode, out) == (0, "0\n")


def test_pages_that_only_faults_bring(compiled: Path) -> None:
    """Nothing else is put until the program has ended."""
    with _hostile(compiled / "hostile", 11, steps=800) as hostile:
        out, _ = hostile.process.communicate(timeout=300)
        assert (hostile.process.returncode, out) == (0, "0\n")
        hostile.fill()  # of no address space any more
        assert hostile.arrival.absent() == []


def test_a_page_that_cannot_be_brought_is_reported(compiled: Path) -> None:
    """The thread that needs it waits, and reads no zeros; `put` raises why."""
    with _hostile(compiled / "hostile", 12) as hostile:

        def fail(_key: int, _home: int) -> None:
            raise OSError("no store")

        hostile.arrival._bring = fail

        def failed() -> bool:
            try:
                hostile.arrival.put(KEY, hostile.runs[0][0], b"")
            except OSError as error:
                return "no store" in str(error)
            return False

        wait_until(failed, 60, "the failure is known")
        assert hostile.process.poll() is None


def test_it_can_be_ended_at_any_time(compiled: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with _hostile(compiled / "hostile", 13) as hostile:
        wait_until(lambda: hostile.asked, 60, "it works")
        hostile.process.kill()
    assert len(os.listdir("/proc/self/fd")) <= len(before)
