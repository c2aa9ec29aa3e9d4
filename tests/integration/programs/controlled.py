"""/dev/tty of terminals that are inside the tree: of a leader, of who follows it, of one that has
left, and of one hung up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import signal
import socket
import termios

from animal import Check, libc, serve

PR_SET_CHILD_SUBREAPER = 36


class Actor:
    """A process that uses its /dev/tty as it is asked."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self._line = pid, line

    def ask(self, what: str) -> str:
        self._line.sendall(what.encode())
        return self._line.recv(200).decode()


def act(line: socket.socket, tty: int) -> None:
    while what := line.recv(200).decode():
        try:
            if what == "read":
                got = (
                    os.read(tty, 100).decode()
                    if select.select([tty], [], [], 10.0)[0]
                    else "nothing comes"
                )
            elif what == "state":
                size = os.get_terminal_size(tty)
                mode = fcntl.fcntl(tty, fcntl.F_GETFL) & (
                    os.O_ACCMODE | os.O_NONBLOCK | os.O_APPEND
                )
                got = (
                    f"{size.columns}x{size.lines} {mode:o} "
                    f"{termios.tcgetattr(tty)[3] & termios.ECHO:o}"
                )
            elif what == "again":
                os.close(os.open("/dev/tty", os.O_RDWR))
                got = "mine" if os.tcgetpgrp(tty) == os.getpgrp() else "not mine"
            else:
                got = str(os.write(tty, what.encode()))
        except OSError as error:
            got = errno.errorcode[error.errno or 0]
        line.sendall((got or "end").encode())
    os._exit(0)


def terminal(columns: int) -> tuple[int, str]:
    master, slave = pty.openpty()
    termios.tcsetwinsize(master, (20, columns))
    name = os.ttyname(slave)
    held.append(os.open(name, os.O_RDWR | os.O_NOCTTY))
    os.close(slave)
    return master, name


def start(
    name: str, flags: int, *, follow: int | None = None, leave: bool = False, lose: int = -1
) -> tuple[Actor, Actor]:
    """A session's leader on that terminal, and one more process of it, which opens it with the
    flags `follow`.

    `leave`: it goes on in a session of its own; `lose`: the master, which it closes.
    """
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    second, second_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        os.setsid()
        os.close(os.open(name, os.O_RDWR))
        if follow is not None and os.fork() == 0:
            act(second_theirs, os.open("/dev/tty", follow))
        tty = os.open("/dev/tty", flags)
        if leave and os.fork():
            os._exit(0)
        if leave:
            os.setsid()
        if lose >= 0:
            os.close(lose)
            os.close(held.pop())
        theirs.send(b"ready")
        act(theirs, tty)
    line.recv(10)
    theirs.close()
    second_theirs.close()
    return Actor(pid, line), Actor(0, second)


assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
held: list[int] = []
for number in (signal.SIGHUP, signal.SIGCONT):
    signal.signal(number, signal.SIG_IGN)
lost, lost_name = terminal(70)
loser, _ = start(lost_name, os.O_RDWR, lose=lost)
os.close(lost)
os.close(held.pop())
first, first_name = terminal(71)
leader, follower = start(first_name, os.O_RDWR, follow=os.O_RDWR | os.O_NONBLOCK | os.O_APPEND)
second, second_name = terminal(72)
reader, _ = start(second_name, os.O_RDONLY | os.O_NONBLOCK)
third, third_name = terminal(73)
left, _ = start(third_name, os.O_RDWR, leave=True)
os.waitpid(left.pid, 0)
os.write(first, b"typed\nhalf a li")
looks = 0


def check(found: Check) -> None:
    global looks
    found.equal("leader", leader.ask("state"), "71x20 2 10")
    found.equal(
        "follower", follower.ask("state"), f"71x20 {os.O_RDWR | os.O_NONBLOCK | os.O_APPEND:o} 10"
    )
    found.equal("reader", reader.ask("state"), f"72x20 {os.O_NONBLOCK:o} 10")
    found.equal(
        "controls",
        [each.ask("again") for each in (leader, follower, left)],
        ["mine", "mine", "ENXIO"],
    )
    found.equal("one that left", left.ask("state"), "73x20 2 10")
    if not looks:
        found.equal("typed", leader.ask("read"), "typed\n")
        os.write(first, b"ne\n")
        found.equal("half a line", follower.ask("read"), "half a line\n")
        echoed = b""
        while not echoed.endswith(b"ne\r\n"):  # the echo may come later than the reader's line
            echoed += os.read(first, 1000)
    looks += 1
    for name, actor, master in (
        ("leader", leader, first),
        ("follower", follower, first),
        ("one that left", left, third),
    ):
        found.equal(f"{name} prints", actor.ask(name), str(len(name)))
        found.equal(f"{name} printed", os.read(master, 100), name.encode())
    found.equal("a reader only", reader.ask("prints"), "EBADF")
    os.write(second, b"to you\n")
    found.equal("read", reader.ask("read"), "to you\n")
    found.equal("hung up", (loser.ask("read"), loser.ask("prints")), ("end", "EIO"))
    os.read(second, 100)


serve(check)
