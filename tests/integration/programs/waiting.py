"""Threads that wait, each in another system call, and never expect to be interrupted: ``waiting.py
FOLDER [CALL...]``.

A check tells which of them have left their calls.  When there is a file ``finish``, each gets what
it waits for, and the check tells what its call has returned.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from animal import Check, libc, path, serve

LONG = 100_000  # seconds
FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET = 0, 1, 9
libc.syscall.restype = ctypes.c_long


class Span(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


returned: dict[str, tuple[int, int]] = {}  # call -> its result and errno
entered: list[int] = []
poll_end, poll_other = socket.socketpair()
epoll_end, epoll_other = socket.socketpair()
limited, limited_other = socket.socketpair()
limited.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LONG, 0))
epoll = select.epoll()
epoll.register(epoll_end, select.EPOLLIN)
words = (ctypes.c_uint32 * 2)()  # of the two futexes
left = Span()


def call(number: int, *arguments: object) -> Callable[[], int]:
    return lambda: int(libc.syscall(number, *arguments))


polled = ctypes.create_string_buffer(struct.pack("=ihh", poll_end.fileno(), select.POLLIN, 0))
events = ctypes.create_string_buffer(12)
byte = ctypes.create_string_buffer(1)
alarm = ctypes.c_uint64(1 << (signal.SIGALRM - 1))
span = Span(LONG, 0)
until = Span(int(time.clock_gettime(time.CLOCK_MONOTONIC)) + LONG, 0)
CALLS: dict[str, Callable[[], int]] = {
    "poll": call(7, polled, 1, LONG * 1000),
    "epoll_wait": call(232, epoll.fileno(), events, 1, -1),
    "nanosleep": call(35, ctypes.byref(span), ctypes.byref(left)),
    "futex": call(202, ctypes.byref(words), FUTEX_WAIT, 0, ctypes.byref(span), None, 0),
    "futex until": call(
        202, ctypes.byref(words, 4), FUTEX_WAIT_BITSET, 0, ctypes.byref(until), None, -1
    ),
    "sigtimedwait": call(128, ctypes.byref(alarm), None, ctypes.byref(span), 8),
    "recv": lambda: int(libc.recv(limited.fileno(), byte, 1, 0)),
}
CALLS = {name: CALLS[name] for name in sys.argv[2:] or CALLS}


def wait(name: str) -> None:
    entered.append(threading.get_native_id())
    result = CALLS[name]()
    returned[name] = (result, ctypes.get_errno())


def check(found: Check) -> None:
    if not os.path.exists(path("finish")):
        found.equal("returned", returned, {})
        return
    for end in (poll_other, epoll_other, limited_other):
        end.send(b"x")
    for at in (0, 4):
        words[at // 4] = 1
        libc.syscall(202, ctypes.byref(words, at), FUTEX_WAKE, 1, None, None, 0)
    os.kill(os.getpid(), signal.SIGALRM)
    for thread in threads:
        if thread.name != "nanosleep":
            thread.join()
    results = {name: result for name, (result, _errno) in returned.items()}
    wanted = {
        "poll": 1,
        "epoll_wait": 1,
        "futex": 0,
        "futex until": 0,
        "sigtimedwait": signal.SIGALRM,
        "recv": 1,
    }
    found.equal(
        "results", results, {name: result for name, result in wanted.items() if name in CALLS}
    )


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGUSR1})
threads = [threading.Thread(target=wait, args=(name,), name=name, daemon=True) for name in CALLS]
for thread in threads:
    thread.start()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def state_of(thread: int) -> str:
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


while len(entered) < len(CALLS) or any(state_of(thread) != "S" for thread in entered):
    time.sleep(0.01)
serve(check)
