"""What ``/proc`` shows of a process's memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.obstacles import running

from criuctl.errors import NoSuchProcess
from criuctl.proc.procfs import anonymous_memory

MIB = 1 << 20
BUSY = """
import mmap
own = b"x" * (64 << 20)
shared = mmap.mmap(-1, 32 << 20)
shared.write(own[:32 << 20])
file = open(TMP + "/file", "w+b")
file.write(own)
file.flush()
mapped = mmap.mmap(file.fileno(), 64 << 20)
assert mapped.read() == own
"""


def test_memory_that_only_the_process_has(tmp_path: Path) -> None:
    with running("", tmp_path) as idle:
        before = anonymous_memory(idle.pid)
    with running(BUSY, tmp_path) as busy:
        assert 96 * MIB <= anonymous_memory(busy.pid) - before < 104 * MIB


def test_shared_memory_is_divided(tmp_path: Path) -> None:
    text = BUSY + "child(lambda: shared.seek(0) or shared.read())"
    with running(text, tmp_path) as busy:
        assert anonymous_memory(busy.pid) < 96 * MIB


def test_no_memory_of_a_process_that_has_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        with pytest.raises(NoSuchProcess):
            anonymous_memory(process.pid)
