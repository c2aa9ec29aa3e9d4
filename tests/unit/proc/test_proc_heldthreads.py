"""Threads held by ptrace while a few run, in real processes with many threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.proc.heldthreads import HeldThreads
from criuctl.proc.procfs import all_tids

PROGRAM = """
import threading, time, sys
counts = [0] * 6
def work(i):
    while True:
        counts[i] += 1
        open(f"{sys.argv[1]}/{threading.get_native_id()}", "w").write(str(counts[i]))
        time.sleep(0.001)
for i in range(5):
    threading.Thread(target=work, args=(i,), daemon=True).start()
work(5)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    while len(list(tmp_path.iterdir())) < 6:
        time.sleep(0.01)
    yield started
    started.kill()
    started.wait()


def counts(folder: Path) -> dict[int, str]:
    return {int(path.name): path.read_text() for path in folder.iterdir()}


def moving(folder: Path, patience: float, wanted: int) -> set[int]:
    """The threads that count on, as soon as there are so many, or after `patience` seconds."""
    before, end = counts(folder), time.monotonic() + patience
    while True:
        time.sleep(0.05)
        found = {tid for tid, count in counts(folder).items() if before[tid] != count}
        if len(found) >= wanted or time.monotonic() > end:
            return found


def test_only_the_free_thread_runs_until_release(
    program: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    tids = all_tids(program.pid)
    for _ in range(20):
        held = HeldThreads([program.pid], {tids[2]})
        held.stop()
        held.hold()
        if moved := moving(tmp_path, 3, 1):
            break
        held.release()  # a held thread has Python's interpreter lock, so that none can run
    assert moved == {tids[2]}
    assert moving(tmp_path, 0.5, len(tids)) <= {tids[2]}  # which a busy machine may not let run
    held.release()
    assert moving(tmp_path, 30, len(tids)) == set(tids)


def test_a_held_process_can_be_killed(program: subprocess.Popen[bytes]) -> None:
    held = HeldThreads([program.pid], ())
    held.stop()
    held.hold()
    os.kill(program.pid, signal.SIGKILL)
    held.release()
    assert program.wait(30) == -signal.SIGKILL


def test_the_kernel_ends_what_is_held_when_its_holder_is_killed(
    program: subprocess.Popen[bytes],
) -> None:
    code = (
        "import sys, time; from criuctl.proc.heldthreads import HeldThreads\n"
        "h = HeldThreads([int(sys.argv[1])], ()); h.stop(); h.hold(); print('held', flush=True); "
        "time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(program.pid)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    holder.kill()
    holder.communicate()
    assert program.wait(30) == -signal.SIGKILL
