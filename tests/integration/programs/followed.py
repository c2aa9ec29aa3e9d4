"""Terminals inside the tree that control more than a session's leader: state that `controlled` does
not check.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import termios
import tty

from animal import Check, libc, serve

PR_SET_CHILD_SUBREAPER = 36
TIOCPKT, TIOCGPKT, TIOCGPTN = 0x5420, 0x80045438, 0x80045430
TIOCGEXCL = 0x80045440
F_SETSIG, F_GETSIG = 10, 11


def terminal() -> tuple[int, int]:
    """Both ends of a raw one, the slave opened by its path."""
    master, first = pty.openpty()
    slave = os.open(os.ttyname(first), os.O_RDWR | os.O_NOCTTY)
    os.close(first)
    tty.setraw(slave)
    return master, slave


def follow(slave: int) -> list[int]:
    """A session's leader on that terminal, and one more process of it: they only wait, and no one
    else has masters.
    """
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setsid()
        opened = os.open(os.ttyname(slave), os.O_RDWR)
        for fd in range(3, 64):
            if fd not in (opened, theirs.fileno()):
                try:
                    os.close(fd)
                except OSError:
                    continue
        os.fork()
        theirs.send(str(os.getpid()).encode())
        while True:
            signal.pause()
    found = sorted(int(line.recv(20)) for _ in range(2))
    line.close()
    theirs.close()
    return found


def controlling(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[4])


assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
signal.signal(signal.SIGHUP, signal.SIG_IGN)
packets, packets_slave = terminal()
fcntl.ioctl(packets, TIOCPKT, struct.pack("i", 1))
granted, granted_slave = terminal()
os.fchown(granted_slave, 1234, 5)
os.fchmod(granted_slave, 0o622)
taken, taken_slave = terminal()
driven, driven_slave = terminal()
for fd, number in ((driven, signal.SIGRTMIN), (driven_slave, signal.SIGRTMIN + 1)):
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR | os.O_ASYNC | os.O_NONBLOCK)
followed = {
    slave: follow(slave) for slave in (packets_slave, granted_slave, taken_slave, driven_slave)
}
fcntl.ioctl(taken_slave, termios.TIOCEXCL)
left, left_slave = terminal()
leaving = follow(left_slave)
os.close(left_slave)
asked = 0


def signalled_fd(number: int) -> int | None:
    """The signal's ``si_fd``; None if none comes within a second."""
    mask = (ctypes.c_uint64 * 16)(1 << number - 1)
    info = ctypes.create_string_buffer(128)
    if libc.sigtimedwait(mask, info, struct.pack("qq", 1, 0)) < 0:
        return None
    return int(struct.unpack_from("i", info, 24)[0])


def end_of(master: int) -> bytes | str:
    if not select.select([master], [], [], 5.0)[0]:
        return "nothing comes"
    try:
        return os.read(master, 100)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def check(found: Check) -> None:
    global asked
    for slave, pids in followed.items():
        found.equal(
            f"{slave} controls", [controlling(pid) for pid in pids], [os.fstat(slave).st_rdev] * 2
        )
    found.true("it reads packets", struct.unpack("i", fcntl.ioctl(packets, TIOCGPKT, bytes(4)))[0])
    found.equal("no packet without output", select.select([packets], [], [], 0.1)[0], [])
    os.write(packets_slave, b"x")
    found.equal("a packet", os.read(packets, 100), b"\0x")
    status = os.fstat(granted_slave)
    found.equal(
        "its node", (oct(status.st_mode), status.st_uid, status.st_gid), ("0o20622", 1234, 5)
    )
    exclusive = [
        struct.unpack("i", fcntl.ioctl(fd, TIOCGEXCL, bytes(4)))[0]
        for fd in (taken_slave, taken, granted_slave)
    ]
    found.equal("exclusive", exclusive, [1, 0, 0])
    for name, fd, other, number in (
        ("master", driven, driven_slave, signal.SIGRTMIN),
        ("slave", driven_slave, driven, signal.SIGRTMIN + 1),
    ):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        found.true(f"{name} is asynchronous", flags & os.O_ASYNC and flags & os.O_NONBLOCK)
        found.equal(f"{name}: signal", fcntl.fcntl(fd, F_GETSIG), number)
        found.equal(f"{name}: owner", fcntl.fcntl(fd, fcntl.F_GETOWN), os.getpid())
        while signal.sigtimedwait([number], 0) is not None:
            pass
        os.write(other, b"x")
        found.equal(f"{name}: descriptor of the signal", signalled_fd(number), fd)
        found.equal(f"{name}: data", os.read(fd, 100), b"x")
    if not asked:
        for pid in leaving:
            os.kill(pid, signal.SIGKILL)
        found.equal("the end of who had it open", end_of(left), "EIO")
        for pid in leaving:
            os.waitpid(pid, 0)
    asked += 1
    found.facts["terminals"] = [
        struct.unpack("I", fcntl.ioctl(master, TIOCGPTN, bytes(4)))[0]
        for master in (packets, granted, taken, driven, left)
    ]


serve(check)
