"""Pseudo-terminals of the tree's own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios

from . import Place, Step, kind, readable


def _modes(place: Place, fd: int) -> None:
    modes = termios.tcgetattr(fd)
    modes[0] ^= place.some([termios.ICRNL, termios.IXON, termios.ISTRIP, 0o40000])
    modes[1] ^= place.some([termios.ONLCR])
    modes[3] ^= place.some([termios.ECHO, termios.ICANON, termios.ISIG, termios.IEXTEN])
    modes[4] = modes[5] = place.one([termios.B9600, termios.B38400])
    modes[6][termios.VINTR] = bytes([place.random.randint(1, 30)])
    termios.tcsetattr(fd, termios.TCSANOW, modes)


def _settings(fd: int) -> list[object]:
    size = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    return [str(termios.tcgetattr(fd)), size, os.ttyname(fd)[:9]]


def _read(fd: int) -> str:
    """What comes, a moment's silence after it: the kernel passes it on in its own time."""
    data = b""
    with contextlib.suppress(OSError):
        while readable(fd, 0.1) and (part := os.read(fd, 4999)):
            data += part
    return data.hex()


@kind
def terminal(place: Place) -> Step:
    """With modes and a size, something typed and something printed, perhaps its slave closed."""
    master, slave = os.openpty()
    _modes(place, slave)
    fcntl.ioctl(
        slave,
        termios.TIOCSWINSZ,
        struct.pack("HHHH", *(place.random.randint(1, 300) for _ in range(4))),
    )
    if place.random.random() < 0.3:
        fcntl.ioctl(master, 0x5420, struct.pack("i", 1))  # TIOCPKT
    os.set_blocking(master, False)
    os.set_blocking(slave, False)
    if place.random.random() < 0.5:
        os.write(slave, b"printed\n")
    if place.random.random() < 0.5:
        os.write(master, b"typed\npart")
    closed = place.random.random() < 0.2
    if closed:
        os.close(slave)
    yield
    while True:
        found: list[object] = []
        if not closed:
            found += _settings(slave)
            os.write(slave, b"mark")
            os.write(master, b"line\n")
            found.append(_read(slave))
        yield [*found, _read(master)]


@kind
def controlling(place: Place) -> Step:
    """A child that leads a session on a terminal of ours, with a follower in the foreground: ^C
    reaches that one.
    """
    master, slave = os.openpty()
    child = os.fork()
    if not child:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        follower = os.fork()
        if not follower:
            os.setpgid(0, 0)
            os.tcsetpgrp(slave, os.getpgrp())
            signal.signal(
                signal.SIGINT,
                lambda *_: os.write(
                    slave, b"got ^C in %d\n" % (os.getpgrp() == os.tcgetpgrp(slave))
                ),
            )
            os.write(slave, b"ready\n")
        while True:
            signal.pause()
    os.close(slave)
    text = b""
    while b"ready\r\n" not in text:
        text += os.read(master, 99)
    yield
    while True:
        os.write(master, b"\x03")
        text = b""
        while not (b"^C in" in text and text.endswith(b"\n")) and readable(master, 5):
            text += os.read(master, 99)
        yield text.hex()
