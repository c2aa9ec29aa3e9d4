"""The output log: absolute offsets, a ring in memory, a bounded file, and nothing that stops when
the disk is full.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criuctl.session.holder.output_log import OutputLog, read_file

PAGE = 4096


def pattern(start: int, end: int) -> bytes:
    """Bytes that tell their own offset."""
    block = b"".join(i.to_bytes(4, "big") for i in range(start // 4, end // 4 + 1))
    return block[start % 4 : start % 4 + end - start]


def test_bytes_are_found_at_their_offsets_in_ring_and_file(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "output", 64 * PAGE, ring=16 * PAGE, base=1000)
    log.append(pattern(1000, 200_000))
    assert (log.base, log.end) == (1000, 200_000)
    assert log.read(log.base, log.end) == pattern(1000, 200_000)
    assert log.read(1003, 1009) == pattern(1003, 1009)  # out of the file
    assert log.read(199_990, 300_000) == pattern(199_990, 200_000)  # out of the ring
    log.close()


def test_what_is_older_than_the_capacity_is_gone_and_the_file_does_not_grow(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "output", 8 * PAGE, ring=4 * PAGE)
    log.append(pattern(0, 1_000_000))
    log.flush()
    assert log.base == 1_000_000 - 8 * PAGE
    assert log.read(0, log.end) == pattern(log.base, 1_000_000)
    assert os.stat(log.path).st_size == 9 * PAGE
    log.close()


def test_the_file_outlives_the_holder_and_is_found_by_the_next_program(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "output", 8 * PAGE, ring=4 * PAGE, base=77)
    log.append(pattern(77, 50_000))
    log.close()
    base, data = read_file(tmp_path / "output")
    assert data == pattern(base, 50_000) and base == 50_000 - 8 * PAGE
    again = OutputLog.reopen(tmp_path / "output", ring=4 * PAGE)
    assert (again.base, again.end) == (base, 50_000)
    again.append(pattern(50_000, 50_010))
    assert again.read(base, again.end) == pattern(again.base, 50_010)
    again.close()


def test_escapes_are_found_in_the_stretch_that_is_asked_for(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "output", 64 * PAGE, ring=4 * PAGE)
    log.append(b"\x1b" + b"." * (10 * PAGE) + b"\x1b[m....")
    assert log.escapes(0, 1) and not log.escapes(1, 2 * PAGE)  # out of the file
    at = log.end - 7
    assert log.escapes(at, 7) and log.escapes(at, 1) and log.escapes(at - 1, 2)
    assert not log.escapes(at - 5, 5) and not log.escapes(at + 1, 6)
    log.close()


class Killed(BaseException):
    """By SIGKILL."""


@pytest.mark.parametrize("done", range(6))
def test_a_holder_that_is_killed_while_it_writes_leaves_every_byte_at_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    log, left, write = OutputLog(tmp_path / "output", 8 * PAGE, ring=4 * PAGE), [done], os.pwrite
    log.append(pattern(0, 50_000))
    log.flush()

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return write(fd, data, at)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(os, "pwrite", pwrite)
        log.append(pattern(50_000, 60_000))
        log.flush()
    base, data = read_file(tmp_path / "output")
    assert data == pattern(base, base + len(data)) and len(data) > PAGE
    log.close()


def test_a_log_on_a_full_disk_begins_with_the_ring_alone() -> None:
    log = OutputLog(Path("/dev/full"))
    log.append(b"all the same")
    log.flush()
    assert "No space left" in log.broken and log.read(0, log.end) == b"all the same"
    log.close()


def test_a_full_disk_leaves_the_ring(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "output", 64 * PAGE, ring=16 * PAGE)
    log.append(pattern(0, 30_000))
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, log._fd)
    os.close(full)
    log.append(pattern(30_000, 400_000))
    assert "No space left" in log.broken
    assert log.base >= log.end - 16 * PAGE
    assert log.read(log.base, log.end) == pattern(log.base, 400_000)
    log.close()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=30),
    capacity=st.integers(1, 6),
    data=st.data(),
)
def test_any_sequence_of_writes_reads_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], capacity: int, data: st.DataObject
) -> None:
    log = OutputLog(tmp_path_factory.mktemp("log") / "output", capacity * PAGE, ring=2 * PAGE)
    for size in sizes:
        log.append(pattern(log.end, log.end + size))
        if data.draw(st.booleans()):
            log.flush()
        assert log.end - log.base >= min(log.end, 2 * PAGE)
        start = data.draw(st.integers(log.base, log.end))
        assert log.read(start, log.end) == pattern(start, log.end)
    log.close()
