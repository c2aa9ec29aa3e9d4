"""Each SIGUSR2 arms timers that run out once, one after the other, and that all send one signal;
their values go to ``fired``.

There is much memory, so that a dump of it takes longer than from one timer to the next.
"""

from __future__ import annotations

import ctypes
import os
import signal

from animal import libc, path, ready

COUNT, EVERY = 24, 25_000_000  # nanoseconds
VALUE = slice(24, 28)  # of a siginfo
memory = bytearray(os.urandom(1 << 20) * 500)
fired = os.open(path("fired"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
timers = (ctypes.c_int * COUNT)()
awaited = {signal.SIGUSR2, signal.SIGRTMIN}
mask = ctypes.c_uint64(sum(1 << number - 1 for number in awaited))
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
for at in range(COUNT):
    event = (ctypes.c_int * 16)(at, 0, signal.SIGRTMIN, 0)
    libc.syscall(222, 1, event, ctypes.byref(timers, 4 * at))
ready()
info = ctypes.create_string_buffer(128)
while True:
    number = libc.syscall(128, ctypes.byref(mask), info, None, 8)
    if number == signal.SIGRTMIN:
        os.write(fired, b"%d\n" % int.from_bytes(info.raw[VALUE], "little"))
    for at in range(COUNT) if number == signal.SIGUSR2 else ():
        spec = (ctypes.c_long * 4)(0, 0, *divmod((at + 1) * EVERY, 1_000_000_000))
        libc.syscall(223, timers[at], 0, spec, None)
