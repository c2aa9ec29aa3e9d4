"""Each SIGUSR2 arms timers that run out once, one after the other; their handlers note it in
``fired``.

There is much memory, so that a dump of it takes longer than from one timer to the next.
"""

from __future__ import annotations

import ctypes
import os
import signal

from animal import libc, path, ready, sleeper

COUNT, EVERY = 24, 25_000_000  # nanoseconds
memory = bytearray(os.urandom(1 << 20) * 500)
fired = os.open(path("fired"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
timers = (ctypes.c_int * COUNT)()


def note(line: bytes) -> None:
    os.write(fired, line)


def arm(_number: int, _frame: object) -> None:
    for at in range(COUNT):
        spec = (ctypes.c_long * 4)(0, 0, *divmod((at + 1) * EVERY, 1_000_000_000))
        libc.syscall(223, timers[at], 0, spec, None)
    signal.setitimer(signal.ITIMER_REAL, COUNT / 2 * EVERY / 1e9)


signal.signal(signal.SIGUSR2, arm)
signal.signal(signal.SIGALRM, lambda number, frame: note(b"alarm\n"))
for at in range(COUNT):
    number = signal.SIGRTMIN + at
    signal.signal(number, lambda number, frame: note(b"%d\n" % number))
    event = (ctypes.c_int * 16)(0, 0, number, 0)
    libc.syscall(222, 1, event, ctypes.byref(timers, 4 * at))
ready()
sleeper()
