"""Masters of terminals, and what was printed on these and not read yet, whether or not a process
has them open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import struct
import termios

from animal import Check, serve

TIOCPKT = 0x5420
MANY = b"".join(b"%07d\n" % n for n in range(1500))


def opened() -> tuple[int, int]:
    master, first = pty.openpty()
    os.set_blocking(master, False)
    slave = os.open(os.ttyname(first), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    os.close(first)
    return master, slave


def printed(slave: int, data: bytes) -> bytes:
    """Print as much of it as there is room for; returns what that is."""
    done = 0
    try:
        while done < len(data):
            done += os.write(slave, data[done:])
    except BlockingIOError:
        pass
    return data[:done]


def translated(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def read(master: int, size: int) -> bytes:
    """So many bytes; what has just been printed may be on its way."""
    data = b""
    while len(data) < size and select.select([master], [], [], 10.0)[0]:
        try:
            data += os.read(master, size - len(data))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            break
    return data


def ended(master: int) -> bool:
    try:
        return os.read(master, 1) == b""
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno == errno.EIO


few, few_slave = opened()
os.write(few_slave, b"a line\nand\thalf a")
many, many_slave = opened()
much = printed(many_slave, MANY)
packets, packets_slave = opened()
fcntl.ioctl(packets, TIOCPKT, struct.pack("i", 1))
os.write(packets_slave, b"in a packet\n")
stopped, stopped_slave = opened()
os.write(stopped_slave, b"before ^S\n")
os.write(stopped, b"\x13")
while select.select([], [stopped_slave], [], 0)[1]:
    pass  # it takes a moment to get there
held, held_slave = opened()
os.write(held_slave, b"before it was held up\n")
termios.tcflow(held_slave, termios.TCOOFF)
closed, closed_slave = opened()
os.write(closed_slave, b"last words\n")
os.close(closed_slave)
done, done_slave = opened()
os.close(done_slave)
fresh = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
alive = [(few, few_slave), (many, many_slave), (stopped, stopped_slave)]
full = True


def check(found: Check) -> None:
    global full
    if full:
        full = False
        found.true("few", read(few, 18) == b"a line\r\nand\thalf a")
        found.true("many", read(many, len(translated(much))) == translated(much))
        found.true("packets", read(packets, 14) == b"\0in a packet\r\n")
        found.true("stopped", read(stopped, 11) == b"before ^S\r\n")
        found.true("held up", read(held, 23) == b"before it was held up\r\n")
        found.true("closed", read(closed, 12) == b"last words\r\n")
    found.true("stopped still", not select.select([], [stopped_slave], [], 0)[1])
    found.true(
        "all read", not select.select([few, many, packets, stopped, held, fresh], [], [], 0)[0]
    )
    found.true("closed, then the end", ended(closed))
    found.true("closed long ago", ended(done))
    found.true("not opened yet", not ended(fresh))
    os.write(stopped, b"\x11")
    for master, slave in alive:
        found.true("goes on", bool(select.select([], [slave], [], 10.0)[1]))
        os.write(slave, b"more\n")
        found.true("more", read(master, 6) == b"more\r\n")
    os.write(stopped, b"\x13")
    while select.select([], [stopped_slave], [], 0)[1]:
        pass


serve(check)
