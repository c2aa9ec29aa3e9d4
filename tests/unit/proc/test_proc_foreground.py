"""What the foreground of a terminal waits for, on real terminals with small programs."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from criuctl.proc import foreground, inodes
from criuctl.proc.foreground import Terminal, epolled, polled, selected, waits_for_input


@pytest.fixture
def pty() -> Iterator[tuple[int, int]]:
    master, slave = os.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


WAYS = {
    "read": "os.read(0, 1)",
    "readv": "os.readv(0, [bytearray(1)])",
    "poll": "p = select.poll(); p.register(0, select.POLLIN); p.poll()",
    "select": "select.select([0], [], [])",
    "epoll": "p = select.epoll(); p.register(0, select.EPOLLIN); p.poll()",
    "thread": "t = threading.Thread(target=os.read, args=(0, 1)); t.start(); time.sleep(1000)",
    "dev-tty": "os.read(os.open('/dev/tty', os.O_RDWR), 1)",
}
OTHERS = {
    "sleep": "time.sleep(1000)",
    "pipe": "os.read(os.pipe()[0], 1)",
    "output": "p = select.poll(); p.register(0, select.POLLERR); p.poll()",
    "other-set": "select.select([os.pipe()[0]], [], [])",
    "busy": "while True: pass",
}
_SETUP = """
import fcntl, os, select, sys, termios, threading, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.write(1, b"!")
"""


def started(slave: int, code: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SETUP + code],
        stdin=slave,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdout.read(1) == b"!"
    return child


def ended(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def becomes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_waits_for_the_terminal(pty: tuple[int, int], way: str) -> None:
    child = started(pty[1], WAYS[way])
    try:
        assert foreground.foreground(pty[0], lambda: ()) == [child.pid]
        assert becomes(lambda: waits_for_input(child.pid, Terminal.of(pty[1])))
        other = os.openpty()
        assert not waits_for_input(child.pid, Terminal.of(other[1]))
        for fd in other:
            os.close(fd)
    finally:
        ended(child)


@pytest.mark.parametrize("way", OTHERS)
def test_a_program_that_waits_for_something_else(pty: tuple[int, int], way: str) -> None:
    child = started(pty[1], OTHERS[way])
    try:
        for _ in range(20):
            assert not waits_for_input(child.pid, Terminal.of(pty[1]))
            time.sleep(0.01)
        found = foreground.program(child.pid)
        assert found is not None and found.argv[:2] == [sys.executable, "-I"]
        assert found.cwd == os.getcwd()
        assert foreground.inner_pid(child.pid) == child.pid
    finally:
        ended(child)
    assert foreground.program(child.pid) is None
    assert not waits_for_input(child.pid, Terminal.of(pty[1]))


LEADERLESS = """
import signal
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
leader = os.fork()
if not leader:
    os.setpgid(0, 0)
    if os.fork():
        os.read(go, 1)
        os._exit(0)
    time.sleep(1000)
while os.getpgid(leader) != leader: time.sleep(0.01)
os.tcsetpgrp(0, leader)
os.write(release, b"!")
os.waitpid(leader, 0)
os.write(1, b"?")
time.sleep(1000)
"""


def test_a_group_whose_leader_has_ended(pty: tuple[int, int]) -> None:
    """The others are found among the processes that the caller knows."""
    master, slave = pty
    child = started(slave, "go, release = os.pipe()\n" + LEADERLESS)
    try:
        assert child.stdout is not None and child.stdout.read(1) == b"?"
        group = os.tcgetpgrp(master)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        found = foreground.foreground(master, lambda: pids)
        assert len(found) == 1 and found != [group] and foreground.group_of(found[0]) == group
        os.kill(found[0], 9)
    finally:
        ended(child)


def test_no_foreground_group(pty: tuple[int, int]) -> None:
    assert foreground.foreground(pty[0], lambda: ()) == []
    assert foreground.foreground(os.open("/dev/null", os.O_RDONLY), lambda: ()) == []


def test_the_arrays_of_the_calls() -> None:
    array = struct.pack("=ihhihhihh", 0, select.POLLIN, 0, 5, select.POLLOUT, 0, -1, 1, 0)
    assert polled(array) == [0] and polled(b"") == []
    assert selected(bytes([0b1000_0001, 0b10]), 10) == [0, 7, 9]
    assert selected(bytes([0b1000_0001]), 7) == [0]
    info = b"pos:\t0\ntfd:        0 events:       19 data: 1\ntfd: 7 events: 4 data: 2\n"
    assert epolled(info) == [0]


def test_the_device_of_a_file_is_what_stat_reports(tmp_path: Path) -> None:
    for path in ("/dev/null", str(tmp_path), "/proc/self/fd/0"):
        status = os.stat(path)
        assert inodes.device(path) == (status.st_dev, status.st_rdev)
    with pytest.raises(FileNotFoundError):
        inodes.device(str(tmp_path / "missing"))
