"""Pre-copy: what its rounds find, and when it stops."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints as kit
from support.keeper import wait_until

from criuctl.checkpoint import layers
from criuctl.criu.pages import PAGE, ImageKey
from criuctl.dump.precopy import Rules, enough, precopy
from criuctl.proc.syscalls import address_of
from criuctl.proc.tree import read_process
from criuctl.report import Reporter
from criuctl.tracking.rounds import Round

MB = 1_000_000
MIB = 1 << 20


def rounds(*found: tuple[int, float]) -> list[Round]:
    return [
        Round(n, 1000 * MB, new * MB, new * MB, seconds)
        for n, (new, seconds) in enumerate(found, 1)
    ]


@pytest.mark.parametrize(
    ("found", "stop"),
    [
        ([], False),
        ([(1000, 8.0)], False),
        ([(0, 0.4)], True),  # the store had all of it
        ([(20, 0.2)], True),  # sent within the target
        ([(1000, 8.0), (400, 3.5)], False),
        ([(1000, 8.0), (40, 0.6)], False),  # 0.32 s at the rate of the first
        ([(1000, 8.0), (36, 0.6)], True),
        ([(1000, 8.0), (900, 7.0)], True),  # written to faster than the store takes
        ([(1000, 8.0), (400, 3.0), (300, 2.5)], True),
        ([(1000, 8.0), (600, 5.0), (360, 3.0), (200, 1.7), (110, 0.9)], True),  # the fifth
    ],
)
def test_another_round_only_while_it_is_worth_it(
    found: list[tuple[int, float]], stop: bool
) -> None:
    assert enough(rounds(*found), Rules()) is stop


class Meddler(Reporter):
    """Writes into a process after each round, as long as there is something to write."""

    def __init__(self, pid: int, *writes: tuple[int, bytes]) -> None:
        super().__init__()
        self.steps: list[dict[str, Any]] = []
        self._pid, self._writes = pid, list(writes)

    def step(self, name: str, **facts: Any) -> None:
        self.steps.append({"name": name, **facts})
        if self._writes:
            address, content = self._writes.pop(0)
            fd = os.open(f"/proc/{self._pid}/mem", os.O_WRONLY)
            try:
                assert os.pwrite(fd, content, address) == len(content)
            finally:
                os.close(fd)


@contextmanager
def forked() -> Iterator[int]:
    """A child of ours, with all of our memory, that waits."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        wait_until(lambda: read_process(pid).state == "S", 60, "it keeps still")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_rounds_store_what_changed_and_end_when_nothing_does(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    with mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = os.urandom(8 * MIB)
        at = -(-address_of(memory) // kit.WINDOW) * kit.WINDOW
        with forked() as pid, repo.writer(Reporter()) as writer:
            reporter = Meddler(pid, (at, b"one page"), (at + kit.WINDOW - 4, b"of two windows"))
            found = precopy(writer, pid, reporter, rules=Rules(target=0, shrink=10))
            assert [r.new for r in found[1:]] == [kit.WINDOW, 2 * kit.WINDOW, 0]
            assert found[0].new > 8 * MIB
            assert [s["changed"] for s in reporter.steps] == [r.new for r in found]
            assert {s["name"] for s in reporter.steps} == {"precopy"}
            assert writer.stats.bytes_unused == writer.stats.bytes_new
            # the store has all of it
            assert len(precopy(writer, pid, reporter, rules=Rules(target=0))) == 1
            assert precopy(writer, pid, reporter, rules=Rules(seconds=0)) == []
        with repo.writer(Reporter()) as writer:
            assert precopy(writer, pid, Reporter()) == []  # it has ended
    assert kit.pipeline_threads() == []


def test_of_a_window_that_changed_a_little_only_pages_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "LITTLE", 0)
    repo = kit.repository(tmp_path)
    with mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = os.urandom(8 * MIB)
        at = -(-address_of(memory) // kit.WINDOW) * kit.WINDOW
        with forked() as pid, repo.writer(Reporter()) as writer:
            reporter = Meddler(pid, (at, b"one page"), (at + kit.WINDOW - 4, b"of two windows"))
            found = precopy(writer, pid, reporter, rules=Rules(target=0, shrink=10))
            assert [r.new for r in found[1:]] == [PAGE, 2 * PAGE, 0]
            buffer = writer.acquire()  # as the page receiver does it
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as source:
                source.seek(at)
                assert source.readinto(buffer.view[: kit.WINDOW]) == kit.WINDOW
            content = bytes(buffer.view[: kit.WINDOW])
            writer.window(ImageKey("task", pid), buffer, 0, kit.WINDOW, at)
            writer.release(buffer)
            before = writer.stats.bytes_new
            ref = writer.stream(ImageKey("task", pid))
            assert writer.stats.bytes_new - before < PAGE
            assert ref.pages is not None
            writer.commit(kit.fill(writer, kit.SMALL))
    assert content.startswith(b"one page") and content.endswith(b"of t")
    assert repo.reader(Reporter()).read(ref) == content
