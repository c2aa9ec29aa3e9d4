"""Take out and put back what a terminal's line discipline holds.

Also a program: ``python linediscipline.py FD ROOT``.

Input that was typed and not yet read sits in the kernel, a half-typed line included, and no call
shows it: it can only be read, as if by the program, with canonical mode switched off. So a reader
has to put it back, and a process that is killed between the two would lose the input. Therefore a
small separate process, the *guard*, reads it; the guard survives a ``kill -9`` of criuctl. It
inherits descriptors of terminals, and answers commands that come on FD. Each is a word, followed by
the numbers of these descriptors (and PID:FD of masters):

- ``take``: read what each terminal holds and put it back at once, while the tree is frozen; answer
  with it.
- ``hold``: read it, answer with it, and keep it: for a terminal whose master is in the tree,
  because CRIU itself would take a part of it otherwise.  The same is done with output that the
  master has not read yet: CRIU would print it once more, with every newline translated again, and
  lose it where no process has the slave open any more.
- ``drop``: the checkpoint exists, the tree is about to be ended: remove what ``take`` had seen (and
  only that), so that the shell that gets the terminal back does not read it.
- ``back``: the tree goes on: put back what was held and dropped.
- ``ready``: only answer.
- ``attend``, with PID:FD: keep this end of a socket open, so that the reader of the other end does
  not see its end before everything is put back.

When the channel ends, the guard ends. If it keeps something and the tree, whose root is ROOT, still
runs, it puts that back first.

``hold`` also takes blocking descriptors of the tree, as PID:FD:FLAGS. CRIU makes both ends of a
pair non-blocking when it looks into them, and leaves them so where the tree is to end; if the tree
goes on after all, its writes would fail with EAGAIN. ``block``, sent right after CRIU has looked,
and ``back`` make them block again.

*Queued* is what the line discipline has processed (lines edited, echoed); it is put back with echo,
editing and signals off, so that the program reads exactly these bytes. *Raw* is what still waits in
front of a full line discipline; it is typed again. A NUL in a canonical queue is an end of file
(^D).

TIOCSTI inserts bytes like a keyboard, and at once; it is used for terminals whose master is
unknown. Stopped output (^S) shows as a terminal that takes no output though its master has nothing
to read.

The module imports nothing of criuctl and little of the standard library, because it runs as a
separate program.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
from typing import NamedTuple

_MODES = struct.Struct("4IB19s")  # the kernel's struct termios
_TCGETS, _TCSETS, _TIOCSTI, _FIONREAD, _TIOCGPTPEER = 0x5401, 0x5402, 0x5412, 0x541B, 0x5441
_TIOCPKT, _TIOCGPKT = 0x5420, 0x80045438
_VERASE, _VKILL, _VEOF, _VTIME, _VMIN, _VSTART, _VSTOP = 2, 3, 4, 5, 6, 8, 9
_VREPRINT, _VWERASE, _VLNEXT = 12, 14, 15
# 0o1000: IUCLC
_MAPPING = termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP | 0o1000 | termios.PARMRK
_ROOM = 4095  # bytes that a line discipline holds
_LIMIT = 1 << 20
# bytes; of the sizes up to 600 about the best: 20.9 KB fit, while large pieces leave room for only
# 13.8 KB
_PIECE = 255
_CHANGED = os.O_NONBLOCK | os.O_APPEND | os.O_ASYNC  # what F_SETFL sets of a terminal
# milliseconds for output to pass from one buffer of the kernel into the next
_PASSING = 200
_ENDING = 3.0  # seconds that a tree may take to end after its checkpoint is made


class Modes(NamedTuple):
    """A terminal's modes in the kernel's format."""

    iflag: int
    oflag: int
    cflag: int
    lflag: int
    line: int
    cc: bytes

    @property
    def canonical(self) -> bool:
        """Whether it is read line by line."""
        return bool(self.lflag & termios.ICANON)

    @property
    def echo(self) -> bool:
        """Whether typed input is shown."""
        return bool(self.lflag & termios.ECHO)


class Held(NamedTuple):
    """The content of one terminal."""

    queued: bytes = b""
    raw: bytes = b""
    stopped: bool = False  # output is stopped (^S)
    canonical: bool = True
    echo: bool = True


class Printed(NamedTuple):
    """Output that one master had not read yet."""

    data: bytes = b""
    # no process has the slave open any more: then the master reads an end of file
    hung_up: bool = False


def get_modes(fd: int) -> Modes:
    """Return the present modes."""
    return Modes(*_MODES.unpack(fcntl.ioctl(fd, _TCGETS, bytes(_MODES.size))))


def set_modes(fd: int, modes: Modes) -> None:
    """Set all modes at once."""
    packed = _MODES.pack(modes.iflag, modes.oflag, modes.cflag, modes.lflag, modes.line, modes.cc)
    fcntl.ioctl(fd, _TCSETS, packed)


def _readable(fd: int) -> bool:
    """Return whether there is input; the kernel first passes new input to the line discipline."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def take(fd: int) -> Held:
    """Take out all input.

    The slave `fd` does not block, and is the controlling terminal of another process.
    """
    modes = get_modes(fd)
    _readable(fd)
    quiet = modes.lflag & ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
    cc = bytearray(modes.cc)
    cc[_VMIN], cc[_VTIME] = 1, 0
    set_modes(
        fd, Modes(modes.iflag & ~_MAPPING, modes.oflag, modes.cflag, quiet, modes.line, bytes(cc))
    )
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))
        found = bytearray()
        while _readable(fd) and len(found) < _LIMIT:
            try:
                found += os.read(fd, 65536)
            except BlockingIOError:
                break
    finally:
        set_modes(fd, modes)
    return Held(bytes(found[:count]), bytes(found[count:]), False, modes.canonical, modes.echo)


def give(fd: int, held: Held, master: int | None = None) -> None:
    """Put back what `take` took from this terminal (or from another one with the same modes)."""
    modes = get_modes(fd)
    if held.queued:
        set_modes(fd, _plain(modes, held))
        try:
            _type(fd, _queued_bytes(modes, held.queued))
        finally:
            set_modes(fd, modes)
    if held.raw:
        _type_raw(fd, held.raw, master)
    if held.stopped and modes.iflag & termios.IXON and modes.cc[_VSTOP]:
        _type(fd, modes.cc[_VSTOP : _VSTOP + 1])


def _end_of_file(modes: Modes, queued: bytes) -> int:
    """Return a byte that can stand for ^D because `queued` does not contain it."""
    taken = {*queued, 0, 10, *modes.cc}
    return next((byte for byte in range(1, 256) if byte not in taken), modes.cc[_VEOF])


def _plain(modes: Modes, held: Held) -> Modes:
    """Return modes in which bytes go into the queue as they are, in lines if it is canonical."""
    cc = bytearray(modes.cc)
    for special in (_VERASE, _VKILL, _VREPRINT, _VWERASE, _VLNEXT):
        cc[special] = 0
    cc[_VEOF] = _end_of_file(modes, held.queued)
    iflag = modes.iflag & ~_MAPPING
    if {modes.cc[_VSTART], modes.cc[_VSTOP]} & set(held.queued):
        iflag &= ~termios.IXON
    lflag = modes.lflag & ~(termios.ECHO | termios.ECHONL | termios.ISIG)
    return Modes(iflag, modes.oflag, modes.cflag, lflag, modes.line, bytes(cc))


def _queued_bytes(modes: Modes, queued: bytes) -> bytes:
    if modes.canonical and modes.cc[_VEOF]:
        return queued.replace(b"\0", bytes([_end_of_file(modes, queued)]))
    return queued


def _type(fd: int, data: bytes) -> None:
    for byte in data:
        fcntl.ioctl(fd, _TIOCSTI, bytes([byte]))


def _type_raw(fd: int, data: bytes, master: int | None) -> None:
    """Write input that found no room in the line discipline to the master, where it waits again."""
    found = master if master is not None else find_master(fd)
    if found is None:
        _type(fd, data[:_ROOM])
        return
    try:
        os.write(found, data)
    finally:
        if master is None:
            os.close(found)


def find_master(fd: int) -> int | None:
    """Return a duplicate of the master of this slave, from the process that holds it, or None."""
    wanted = os.fstat(fd)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            numbers = os.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        for number in numbers:
            try:
                if not os.readlink(f"/proc/{name}/fd/{number}").endswith("ptmx"):
                    continue
                found = _duplicate(int(name), int(number))
            except OSError:
                continue
            if _is_master_of(found, wanted):
                return found
            os.close(found)
    return None


def _duplicate(pid: int, number: int) -> int:
    import ctypes

    pidfd = os.pidfd_open(pid)
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, number, 0)  # pidfd_getfd
    finally:
        os.close(pidfd)
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(found)


def _is_master_of(master: int, wanted: os.stat_result) -> bool:
    try:
        peer = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    status = os.fstat(peer)
    os.close(peer)
    return (status.st_rdev, status.st_dev) == (wanted.st_rdev, wanted.st_dev)


def take_printed(master: int) -> Printed:
    """Take out all that the master could read now."""
    packets = struct.unpack("i", fcntl.ioctl(master, _TIOCGPKT, bytes(4)))[0]
    if packets:  # else a byte with its kind would precede each piece
        fcntl.ioctl(master, _TIOCPKT, struct.pack("i", 0))
    poller = select.poll()
    poller.register(master, select.POLLIN)
    found = bytearray()
    try:
        while (events := sum(event for _, event in poller.poll(0))) & select.POLLIN and len(
            found
        ) < _LIMIT:
            found += os.read(master, 65536)
    finally:
        if packets:
            fcntl.ioctl(master, _TIOCPKT, struct.pack("i", packets))
    return Printed(bytes(found), bool(events & select.POLLHUP))


def give_printed(master: int, printed: Printed) -> int:
    """Put back what `take_printed` took; return how many bytes found no room.

    Where the slave is open nowhere else, the master hangs up after it.
    """
    slave = fcntl.ioctl(
        master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    )
    try:
        modes = get_modes(slave)
        stopped = not _writable(slave, 0)
        # without IXON, output stopped by ^S would go on
        plain = modes.iflag & ~termios.IXON if stopped else modes.iflag
        set_modes(
            slave,
            Modes(
                plain, modes.oflag & ~termios.OPOST, modes.cflag, modes.lflag, modes.line, modes.cc
            ),
        )
        called = stopped and not _writable(slave, 0)
        if called:
            termios.tcflow(slave, termios.TCOON)
        try:
            left = _print(slave, printed.data)
        finally:
            set_modes(slave, modes)
            if called:
                termios.tcflow(slave, termios.TCOOFF)
            elif stopped and modes.iflag & termios.IXON and modes.cc[_VSTOP]:
                _type(slave, modes.cc[_VSTOP : _VSTOP + 1])
    finally:
        os.close(slave)
    return left


def _print(slave: int, data: bytes) -> int:
    """Print data in pieces that fill the kernel's buffers best; return how much is left.

    The room that small writes leave cannot hold large ones.
    """
    waited = False
    while data:
        try:
            data = data[os.write(slave, data[:_PIECE]) :]
            waited = False
        except BlockingIOError:
            if waited or not _writable(slave, _PASSING):
                break
            waited = True
    return len(data)


def _block_again(pid: int, number: int, flags: int) -> None:
    """Make a descriptor of a process blocking again, as its flags said before CRIU changed it."""
    fd = _duplicate(pid, number)
    try:
        if os.isatty(fd) and fcntl.fcntl(fd, fcntl.F_GETFL) & _CHANGED == os.O_NONBLOCK:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & _CHANGED)
    finally:
        os.close(fd)


def _writable(fd: int, milliseconds: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poller.poll(milliseconds))


def output_stopped(fd: int) -> bool:
    """Return whether output is stopped by flow control."""
    if _writable(fd, 0):
        return False
    master = find_master(fd)
    if master is None:
        return False
    try:
        return not _readable(master) and not _writable(fd, 0)  # else the buffer is merely full
    finally:
        os.close(master)


class _Guard:
    """The guard program; see the module's docstring."""

    def __init__(self, channel: socket.socket, root: int) -> None:
        self.channel = channel
        self.root = os.pidfd_open(root)
        self.seen: dict[int, Held] = {}
        self.kept: dict[int, Held] = {}  # what was taken away
        self.printed: dict[int, Printed] = {}  # the same for masters, by our descriptors
        self.blocking: list[tuple[int, int, int]] = []  # PID, descriptor and flags
        self.dropped = False
        self.attended = -1

    def take(self, fd: int) -> Held:
        try:
            stopped = output_stopped(fd)
            held = take(fd)
            give(fd, held)
        except OSError:
            return Held()  # hung up meanwhile: it cannot be read any more
        self.seen[fd] = Held(held.queued, held.raw, stopped, held.canonical, held.echo)
        return self.seen[fd]

    def hold(self, fd: int) -> Held:
        try:
            stopped = output_stopped(fd)
            held = take(fd)._replace(stopped=stopped)
        except OSError:
            return Held()
        if held.queued or held.raw:
            self.kept[fd] = held._replace(stopped=False)  # output is stopped again
        return held

    def hold_printed(self, pid: int, number: int) -> Printed:
        master = -1
        try:
            master = _duplicate(pid, number)
            printed = take_printed(master)
        except OSError:
            printed = Printed()
        if printed.data:
            self.printed[master] = printed
        elif master >= 0:
            os.close(master)
        return printed

    def attend(self, pid: int, number: int) -> None:
        self.leave()
        self.attended = _duplicate(pid, number)

    def leave(self) -> None:
        if self.attended >= 0:
            os.close(self.attended)
        self.attended = -1

    def drop(self) -> None:
        self.dropped = True
        self.leave()
        for fd, seen in self.seen.items():
            amount = len(seen.queued) + len(seen.raw)
            if not amount:
                continue
            try:
                held = take(fd)
                everything = held.queued + held.raw
                self.kept[fd] = Held(everything[:amount])
                give(fd, Held(everything[amount:]))
            except OSError:
                continue

    def block(self) -> None:
        for pid, number, flags in self.blocking:
            with contextlib.suppress(OSError):  # it is gone
                _block_again(pid, number, flags)
        self.blocking = []

    def back(self) -> None:
        self.dropped = False
        self.block()
        for fd, held in self.kept.items():
            try:
                newer = take(fd)
                give(fd, Held(held.queued + newer.queued, held.raw + newer.raw))
            except OSError:
                continue
        self.kept = {}
        for master, printed in self.printed.items():
            try:
                give_printed(
                    master, printed._replace(data=printed.data + take_printed(master).data)
                )
            except OSError:
                pass
            os.close(master)
        self.printed = {}
        self.leave()

    def serve(self) -> None:
        for line in self.channel.makefile("rb"):
            word, *numbers = line.split()
            answer: list[Held] = []
            theirs = [tuple(map(int, number.split(b":"))) for number in numbers if b":" in number]
            if word == b"attend":
                with contextlib.suppress(OSError):
                    self.attend(*theirs.pop())
            printed = [self.hold_printed(*master) for master in theirs if len(master) == 2]
            if word in (b"take", b"hold"):
                self.blocking += [
                    (pid, fd, flags) for pid, fd, flags in (one for one in theirs if len(one) == 3)
                ]
                what = self.take if word == b"take" else self.hold
                answer = [what(int(number)) for number in numbers if b":" not in number]
            elif word == b"drop":
                self.drop()
            elif word == b"block":
                self.block()
            elif word == b"back":
                self.back()
            # It never leaves this machine's memory.
            body: list[list[object]] = [
                [_text(h.queued), _text(h.raw), h.stopped, h.canonical, h.echo] for h in answer
            ]
            body += [[_text(p.data), p.hung_up] for p in printed]
            self.channel.sendall(json.dumps(body).encode() + b"\n")

    def settle(self) -> None:
        """Put back what was taken out, unless the tree has ended or ends now."""
        poller = select.poll()
        poller.register(self.root, select.POLLIN)
        ending = _ENDING if self.dropped else 0.0  # else the tree was not asked to end
        if (self.kept or self.printed or self.blocking) and not poller.poll(ending * 1000):
            self.back()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> int:
    """Serve until the channel ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    guard = _Guard(channel, int(sys.argv[2]))
    with contextlib.suppress(OSError):  # criuctl ended in the middle of an answer
        guard.serve()
    guard.settle()
    return 0


if __name__ == "__main__":
    sys.exit(main())
