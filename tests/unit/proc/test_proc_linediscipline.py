"""Unread terminal input: taken out without loss, and put into another terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from support.keeper import wait_until

from criuctl.errors import NoSuchProcess
from criuctl.proc import linediscipline
from criuctl.proc.linediscipline import Held
from criuctl.proc.tree import ProcessIdentity
from criuctl.session.terminal import Guard, Pty

WAIT = 30.0
MARK = b"<>"


@contextmanager
def terminal() -> Iterator[tuple[Pty, int]]:
    """A terminal and a descriptor of its slave like the guard's."""
    pty = Pty()
    os.set_blocking(pty.master, False)
    watching = pty.open_slave(os.O_RDWR | os.O_NONBLOCK)
    try:
        yield pty, watching
    finally:
        os.close(watching)
        pty.close()


def type_in(pty: Pty, data: bytes) -> None:
    """Type, and wait until the line discipline has it (asking a slave for input makes the kernel
    hand it over).
    """
    os.write(pty.master, data)
    select.select([pty.slave], [], [], 0)


def echoed(pty: Pty) -> bytes:
    """What was shown so far: a mark that is printed now comes behind all of it."""
    os.write(pty.slave, MARK)
    shown = b""
    while not shown.endswith(MARK):
        assert select.select([pty.master], [], [], WAIT)[0]
        shown += os.read(pty.master, 1 << 16)
    return shown.removesuffix(MARK)


def type_all_in(pty: Pty, data: bytes) -> None:
    """As `type_in`; much comes to the line discipline in pieces, and one with a whole line in it
    does not wait for the others.
    """
    type_in(pty, data)
    letters = re.compile(rb"[a-z]")  # each is echoed once
    shown, deadline = echoed(pty), time.monotonic() + WAIT
    while len(letters.findall(shown)) < len(letters.findall(data)):
        assert time.monotonic() < deadline, shown
        shown += echoed(pty)


def waiting(pty: Pty) -> int:
    """Bytes that a program could read now."""
    return int(struct.unpack("i", fcntl.ioctl(pty.slave, termios.FIONREAD, bytes(4)))[0])


def read_all(pty: Pty) -> list[bytes]:
    """What a program reads: one item for each read."""
    found = []
    os.set_blocking(pty.slave, False)
    while True:
        try:
            found.append(os.read(pty.slave, 1 << 16))
        except BlockingIOError:
            return found


CASES = {
    "nothing": (b"", [b"\n"]),
    "half a line": (b"half", [b"half\n"]),
    "a line and a half": (b"line\rhalf", [b"line\n", b"half\n"]),
    "edited": (b"ab\x7fc d\x17", [b"ac \n"]),
    "end of file": (b"xyz\x04\x04", [b"xyz", b"", b"\n"]),
    "quoted control characters": (b"\x16\x04\x16\x7f\x16\x13\x16\x03", [b"\x04\x7f\x13\x03\n"]),
    "long lines": (b"x" * 3000 + b"\r" + b"y" * 1000, [b"x" * 3000 + b"\n", b"y" * 1000 + b"\n"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_stays_and_can_be_planted_elsewhere(name: str) -> None:
    typed, expected = CASES[name]
    with terminal() as (here, here_fd), terminal() as (there, there_fd):
        type_all_in(here, typed)
        before = linediscipline.get_modes(here_fd)
        held = linediscipline.take(here_fd)
        linediscipline.give(here_fd, held)
        again = linediscipline.take(here_fd)
        linediscipline.give(here_fd, again)
        linediscipline.give(there_fd, again, there.master)
        assert again == held
        assert held.canonical and held.echo
        assert linediscipline.get_modes(here_fd) == linediscipline.get_modes(there_fd) == before
        assert echoed(here) == echoed(there) == b""  # it is not echoed twice
        for pty in (here, there):
            type_in(pty, b"\r")
            assert read_all(pty) == expected


def test_raw_terminals_and_more_than_fits() -> None:
    with terminal() as (here, here_fd), terminal() as (there, there_fd):
        for pty in (here, there):
            tty.setraw(pty.slave)
        size = os.write(here.master, bytes(range(256)) * 40)
        held = linediscipline.take(here_fd)
        assert len(held.queued) + len(held.raw) == size
        assert held.raw  # more than a line discipline holds
        linediscipline.give(here_fd, held)
        linediscipline.give(there_fd, held, there.master)
        for pty in (here, there):
            got = b""
            while len(got) < size:
                assert select.select([pty.slave], [], [], WAIT)[0]
                got += os.read(pty.slave, 1 << 16)
            assert got == (bytes(range(256)) * 40)[:size]


def test_stopped_output_stays_stopped() -> None:
    with terminal() as (here, here_fd), terminal() as (there, there_fd):
        type_in(here, b"ab\x13")
        assert linediscipline.output_stopped(here_fd)
        assert not linediscipline.output_stopped(there_fd)
        held = linediscipline.take(here_fd)
        assert linediscipline.output_stopped(here_fd)
        linediscipline.give(there_fd, Held(held.queued, held.raw, True), there.master)
        assert linediscipline.output_stopped(there_fd)
        type_in(there, b"\x11\r")
        assert not linediscipline.output_stopped(there_fd)
        assert read_all(there) == [b"ab\n"]


def test_full_output_is_not_taken_for_stopped() -> None:
    with terminal() as (pty, watching):
        os.set_blocking(pty.slave, False)
        with suppress(BlockingIOError):
            while True:
                os.write(pty.slave, b"x" * 4096)
        assert not linediscipline.output_stopped(watching)


@pytest.mark.parametrize("ended", [True, False])
def test_dropped_input_comes_back_unless_the_tree_has_ended(ended: bool) -> None:
    """criuctl is gone after it had the guard drop what was typed."""
    with terminal() as (pty, watching), subprocess.Popen(["sleep", "100"]) as root:
        type_in(pty, b"one\rtw")
        with Guard(root.pid, [watching]) as guard:
            assert [h.queued for h in guard.take([watching])] == [b"one\ntw"]
            guard.drop()
            type_in(pty, b"o\r")
            if ended:
                root.kill()
                root.wait()
        if ended:
            type_in(pty, b"!\r")
            assert read_all(pty) == [b"o\n", b"!\n"]
        else:
            wait_until(
                lambda: waiting(pty) == len(b"one\ntwo\n"), WAIT, "the guard has put it back"
            )
            assert read_all(pty) == [b"one\n", b"two\n"]
            root.kill()


def test_a_tree_that_ends_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed just when its dump begins: no fault of the guard's."""
    with subprocess.Popen(["sleep", "100"]) as root:
        identity = ProcessIdentity.of(root.pid)
        root.kill()
    with pytest.raises(NoSuchProcess):
        Guard(root.pid, [])
    # it still was there at the first look
    monkeypatch.setattr(ProcessIdentity, "of", lambda _pid: identity)
    with (
        Guard(root.pid, []) as guard,
        pytest.raises(NoSuchProcess, match="has ended while its terminals were looked at"),
    ):
        guard.ready()
