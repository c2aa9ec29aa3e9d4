"""Signal-driven input: each kind of descriptor that can says by a signal of its own that something
has arrived (O_ASYNC).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import signal
import socket
import struct
import threading
import tty
from collections.abc import Callable

from animal import Check, libc, path, serve

F_SETSIG, F_GETSIG, F_SETOWN_EX, F_GETOWN_EX = 10, 11, 15, 16
F_OWNER_TID = struct.pack("i", 0)

kinds: dict[str, tuple[int, int]] = {}  # descriptor, signal
trigger: dict[str, Callable[[], object]] = {}


def arm(name: str, fd: int, action: Callable[[], object], flags: int = 0) -> None:
    number = signal.SIGRTMIN + len(kinds)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, F_SETSIG, number)
    fcntl.fcntl(
        fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK | flags
    )
    kinds[name] = fd, number
    trigger[name] = action


def terminal() -> tuple[int, int]:
    """Both ends of a raw one, the slave opened by its path."""
    master, peer = pty.openpty()
    slave = os.open(os.ttyname(peer), os.O_RDWR | os.O_NOCTTY)
    os.close(peer)
    tty.setraw(slave)
    return master, slave


read_end, write_end = os.pipe()
arm("pipe", read_end, lambda: os.write(write_end, b"x"))
os.mkfifo(path("fifo"))
fifo = os.open(path("fifo"), os.O_RDWR)
arm("fifo", fifo, lambda: os.write(fifo, b"x"))
stream, stream_peer = socket.socketpair()
arm("stream", stream.fileno(), lambda: stream_peer.send(b"x"))
datagram, datagram_peer = socket.socketpair(type=socket.SOCK_DGRAM)
arm("datagram", datagram.fileno(), lambda: datagram_peer.send(b"x"))
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
served, _ = listener.accept()
arm("tcp", served.fileno(), lambda: client.send(b"x"))
clients: list[socket.socket] = []
arm(
    "listener",
    listener.fileno(),
    lambda: clients.append(socket.create_connection(listener.getsockname())),
)
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
sender = socket.socket(type=socket.SOCK_DGRAM)
arm("udp", udp.fileno(), lambda: sender.sendto(b"x", udp.getsockname()))
master, slave = terminal()
arm("terminal", slave, lambda: os.write(master, b"x"))
second, second_slave = terminal()
arm("master", second, lambda: os.write(second_slave, b"x"))
os.mkdir(path("watched"))
appending = os.pidfd_open(os.getpid())
fcntl.fcntl(appending, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)
watcher = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
libc.inotify_add_watch(watcher, path("watched").encode(), 0x100)  # IN_CREATE
arm("inotify", watcher, lambda: open(path("watched/new"), "w").close(), os.O_APPEND)


def waits() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    libc.pause()


thread = threading.Thread(target=waits, daemon=True)
thread.start()
owner = F_OWNER_TID + struct.pack("i", thread.native_id or 0)
thread_read, thread_write = os.pipe()
arm("thread", thread_read, lambda: os.write(thread_write, b"x"))
fcntl.fcntl(thread_read, F_SETOWN_EX, owner)
thread_signal = kinds.pop("thread")[1]


def signalled_fd(number: int) -> int | None:
    """The signal's ``si_fd``; None if none comes within a second."""
    mask = (ctypes.c_uint64 * 16)(1 << number - 1)
    info = ctypes.create_string_buffer(128)
    if libc.sigtimedwait(mask, info, struct.pack("qq", 1, 0)) < 0:
        return None
    return int(struct.unpack_from("i", info, 24)[0])


def check(found: Check) -> None:
    for name, (fd, number) in kinds.items():
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        found.true(f"{name} is asynchronous", flags & os.O_ASYNC and flags & os.O_NONBLOCK)
        found.equal(f"{name}: signal", fcntl.fcntl(fd, F_GETSIG), number)
        found.equal(f"{name}: owner", fcntl.fcntl(fd, fcntl.F_GETOWN), os.getpid())
        while signal.sigtimedwait([number], 0) is not None:
            pass
        trigger[name]()
        found.equal(f"{name}: descriptor of the signal", signalled_fd(number), fd)
        if name == "listener":
            listener.accept()[0].close()
            clients.pop().close()
        elif name == "inotify":
            os.unlink(path("watched/new"))
            found.true("inotify: its event", os.read(fd, 4096))
        else:
            found.equal(f"{name}: data", os.read(fd, 100), b"x")
    found.equal("thread: owner", fcntl.fcntl(thread_read, F_GETOWN_EX, bytes(8)), owner)
    trigger["thread"]()
    with open(f"/proc/self/task/{thread.native_id}/status") as file:
        pending = next(int(line.split()[1], 16) for line in file if line.startswith("SigPnd"))
    found.true("thread: has its signal", pending >> thread_signal - 1 & 1)
    found.equal("thread: data", os.read(thread_read, 100), b"x")
    found.true("inotify appends", fcntl.fcntl(watcher, fcntl.F_GETFL) & os.O_APPEND)


# a process that makes another one act must not leave traces
signal.signal(signal.SIGTRAP, lambda number, frame: None)
serve(check)
