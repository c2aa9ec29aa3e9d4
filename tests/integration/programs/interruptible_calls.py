"""Children that wait for ever, each in another system call; what one returns is written to
``returns``.

SIGUSR2 has a handler that interrupts every call, but those whose name ends with "again": there it
lets them go on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from animal import libc, path, ready, sleeper

returns = os.open(path("returns"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
nothing, _other = os.pipe()
listening = socket.create_server(("127.0.0.1", 0))
locked = os.open(path("locked"), os.O_CREAT | os.O_RDWR, 0o600)
fcntl.flock(locked, fcntl.LOCK_EX)
epoll = select.epoll()
byte = ctypes.create_string_buffer(16)
word = ctypes.c_uint32(0)
mask = ctypes.c_uint64(0)
until = (ctypes.c_long * 2)(int(time.clock_gettime(time.CLOCK_MONOTONIC)) + 100_000, 0)


def call(number: int, *arguments: object) -> Callable[[], int]:
    return lambda: int(libc.syscall(number, *arguments))


CALLS = {
    "read": call(0, nothing, byte, 1),
    "read again": call(0, nothing, byte, 1),
    "accept": call(43, listening.fileno(), None, None),
    "flock": lambda: int(libc.flock(os.open(path("locked"), os.O_RDWR), fcntl.LOCK_EX)),
    "futex": call(202, ctypes.byref(word), 0, 0, None, None, 0),
    "pause": call(34),
    "sigsuspend": call(130, ctypes.byref(mask), 8),
    "select": call(23, 0, None, None, None, None),
    "poll": call(7, None, 0, -1),
    "epoll_wait": call(232, epoll.fileno(), byte, 1, -1),
    "sleep until": call(230, time.CLOCK_MONOTONIC, 1, until, None),
}
signal.signal(signal.SIGUSR2, lambda number, frame: None)
libc.syscall.restype = ctypes.c_long
children = []
for name, enter in CALLS.items():
    child = os.fork()
    if not child:
        signal.siginterrupt(signal.SIGUSR2, not name.endswith("again"))
        result = enter()
        os.write(returns, f"{name}: {result} {ctypes.get_errno()}\n".encode())
        sleeper()
    children.append(child)


def waits(child: int) -> bool:
    with open(f"/proc/{child}/stat") as stat, open(f"/proc/{child}/syscall") as now:
        return stat.read().rpartition(")")[2].split()[0] == "S" and not now.read().startswith(
            "running"
        )


while not all(waits(child) for child in children):
    pass
ready()
sleeper()
