"""Pages that are copied in when they are touched, for a program that uses its memory at random."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time

import pytest
from support import served as program
from support.served import PAGE, PAGES, content

from criuctl.proc.served_pages import ServedPages, Source, Span
from criuctl.proc.syscalls import has_userfaultfd

pytestmark = pytest.mark.skipif(not has_userfaultfd(), reason="the kernel allows no userfaultfd")
_PATIENCE = 120.0


@pytest.fixture(scope="module")
def source() -> Source:
    """The memory file; what its spans leave out is not in it."""
    memory = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.pwrite(memory, b"".join(map(content, range(PAGES))), 0)
    mapped = mmap.mmap(memory, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(memory)
    return Source(memoryview(mapped))


def _spans(start: int) -> list[Span]:
    """All pages but those that are zeros."""
    spans: list[Span] = []
    for number in range(PAGES):
        if number % 16 == 5:
            continue
        at, offset = start + number * PAGE, number * PAGE
        if spans and spans[-1].end == at:
            spans[-1] = spans[-1]._replace(end=at + PAGE)
        else:
            spans.append(Span(at, at + PAGE, offset))
    return spans


class _Served:
    """The program, and its address spaces, served as the keeper does it."""

    def __init__(self, source: Source, seed: int, steps: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ours
        argv = [sys.executable, "-I", program.__file__, str(theirs.fileno()), str(seed), str(steps)]
        with theirs:
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        data, fds, _, _ = socket.recv_fds(ours, 8, 1)
        (self.start,) = struct.unpack("<Q", data)
        self.first = ServedPages(fds[0], _spans(self.start), source)
        self.spaces = [self.first]

    def go_on(self) -> None:
        """Let the program begin, or check the rest."""
        self.channel.sendall(b"+")

    def serve(self, seconds: float = 0.01) -> bool:
        """Serve what is reported; return whether the program has ended or said something."""
        poller = select.poll()
        for space in self.spaces:
            poller.register(space.fd, select.POLLIN)
        poller.register(self.channel, select.POLLIN)
        waits = any(space.waits for space in self.spaces)
        ready = [fd for fd, _ in poller.poll(0 if waits else seconds * 1000)]
        for space in list(self.spaces):
            if space.fd in ready or space.waits:
                self.spaces += space.serve()
            space.look()
            if space is not self.first and space.done:
                self.spaces.remove(space)
                space.close()
        return self.channel.fileno() in ready

    def close(self) -> int:
        """Return the program's exit code."""
        code = self.process.wait(_PATIENCE)
        for space in self.spaces:
            space.close()
        self.channel.close()
        return code


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_is_what_it_must_be(seed: int, source: Source) -> None:
    served = _Served(source, seed, 120)
    served.go_on()
    until = time.monotonic() + _PATIENCE
    while not served.serve():
        assert time.monotonic() < until, "the program hangs"
    if served.channel.recv(16):  # it did not fail
        while not served.first.done:
            served.first.fill()
            served.serve(0)
        served.spaces.remove(served.first)
        served.first.close()  # the kernel handles the rest
        served.go_on()
    assert served.close() == 0


def test_what_is_not_touched_is_not_copied(source: Source) -> None:
    served = _Served(source, 1, 0)
    before = sum(span.end - span.start for span in served.first.left)
    served.go_on()
    while not served.serve():
        pass
    assert before == sum(span.end - span.start for span in served.first.left)
    served.process.kill()
    served.close()


def test_its_end_is_noticed(source: Source) -> None:
    served = _Served(source, 1, 0)
    served.first.look()
    assert not served.first.done
    served.process.kill()
    served.process.wait(_PATIENCE)
    served.first.look()
    assert served.first.done and served.first.left
    served.close()
