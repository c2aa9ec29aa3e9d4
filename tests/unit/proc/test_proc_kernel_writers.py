"""What may still write to memory is seen before its pages are read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.fuse import slow_file
from support.keeper import wait_until

from criuctl.proc import kernel_writers, userfault_code, written_pages

pytestmark = pytest.mark.skipif(
    not written_pages.supported() or os.geteuid() != 0,
    reason="the kernel does not track writes, or root is needed",
)
SIZE = 64 << 10
PREAMBLE = f"""
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer({SIZE})
place = ctypes.addressof(buffer)
vector = (ctypes.c_size_t * 2)(place, {SIZE})
def say(word):
    print(word, place, flush=True)
"""
# Asks for a page of its own with a userfaultfd that handles faults of the kernel, too, and never
# answers: a call that reads that page waits in the kernel.
ABSENT = """
import fcntl, mmap, struct
absent = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
source = ctypes.addressof(ctypes.c_char.from_buffer(absent))
fd = libc.syscall(323, os.O_CLOEXEC)
fcntl.ioctl(fd, 0xC018AA3F, struct.pack("=3Q", 0xAA, 0, 0))
fcntl.ioctl(fd, 0xC020AA00, struct.pack("=4Q", source, 4096, 1, 0))
ours = (ctypes.c_size_t * 2)(source, 4096)
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """A process that runs this code: its PID, and the address of its buffer."""
    argv = [sys.executable, "-S", "-c", PREAMBLE + code, *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline().split()[1])
        finally:
            process.kill()


def calling(pid: int, number: int) -> bool:
    """Whether a thread of the process is in this call."""
    calls = [task.joinpath("syscall").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return any(call.startswith(f"{number} ") for call in calls)


@pytest.mark.parametrize(
    ("call", "number"),
    [("pread(fd, buffer, len(buffer), 0)", 17), ("readv(fd, vector, 1)", 19)],
)
def test_a_read_past_the_cache_is_seen(call: str, number: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(slow_file(tmp_path, bytes(SIZE), 3.0))
        code = f"fd = os.open(sys.argv[1], 0); say('open'); libc.{call}; time.sleep(1000)"
        pid, place = stack.enter_context(running(code, str(tmp_path / "file")))
        wait_until(lambda: calling(pid, number), 30, "it reads")
        calls = kernel_writers.unfinished([pid], 0.1)
        if number == 17:
            assert calls.ranges == {pid: [(place, place + SIZE)]}
            others = "the running thread"  # of a busy machine, in so short a time
            assert all(why.startswith(others) for why in calls.processes.values())
            assert f"of PID {pid}," not in calls.processes.get(pid, "")
        else:
            assert f"in system call {number}" in calls.processes[pid]
        wait_until(lambda: not calling(pid, number), 30, "it has read")
        calls = kernel_writers.unfinished([pid], 60)
        assert (calls.ranges, calls.processes) == ({}, {})


@pytest.mark.parametrize(
    "code",
    [
        "say('-')\nwhile True: pass",
        "fds = os.pipe(); say('-'); libc.read(fds[0], buffer, len(buffer))",
        "fds = os.pipe(); say('-'); libc.readv(fds[0], vector, 1)",
        "say('-'); os.kill(os.getpid(), 19)",
    ],
    ids=["computing", "reading a pipe", "into vectors", "stopped"],
)
def test_what_cannot_write_past_the_page_tables_delays_nothing(code: str) -> None:
    with running(code) as (pid, _place):
        calls = kernel_writers.unfinished([pid], 30)
        assert (calls.ranges, calls.processes) == ({}, {})


def test_another_process_that_writes_is_seen() -> None:
    with ExitStack() as stack:
        pid, place = stack.enter_context(running("say('-'); time.sleep(1000)"))
        theirs = f"theirs = (ctypes.c_size_t * 2)({place}, 4096)\n"
        call = f"say('-'); libc.process_vm_writev({pid}, ours, 1, theirs, 1, 0)"
        other, _ = stack.enter_context(running(ABSENT + theirs + call))
        wait_until(lambda: calling(other, 311), 30, "it writes")
        calls = kernel_writers.unfinished([pid], 0.1)
        assert f"PID {other} writes to other processes" in calls.processes[pid]


def test_the_descriptors_of_a_thread_are_its_own() -> None:
    code = (
        "def run():\n"
        "    libc.unshare(0x400)\n"
        "    os.open('/proc/self/exe', os.O_RDONLY | os.O_DIRECT)\n"
        "    say('open')\n"
        "    time.sleep(1000)\n"
        "threading.Thread(target=run).start()\n"
    )
    with running(code) as (pid, _place):
        assert "direct I/O" in kernel_writers.pins(pid)


def test_code_that_asks_for_a_userfaultfd_is_told_from_other_code(tmp_path: Path) -> None:
    assert not userfault_code.may_ask(os.getpid(), {})
    source = tmp_path / "program.c"
    source.write_text(
        "#include <unistd.h>\n#include <sys/syscall.h>\n"
        "int main(int count, char **names) {\n"
        "    if (count > 1) syscall(SYS_userfaultfd, 1);\n"
        "    for (;;) pause();\n"
        "}\n"
    )
    for level in ("-O0", "-O2"):
        program = tmp_path / f"program{level}"
        subprocess.run(["gcc", level, "-o", program, source], check=True, timeout=60)
        with subprocess.Popen([program]) as process:
            try:
                wait_until(lambda: calling(process.pid, 34), 30, "it runs")
                assert userfault_code.may_ask(process.pid, {})
            finally:
                process.kill()
