"""Timer descriptors that were set to an absolute time: never armed, run out and read or not, in
step with the clock.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time

from animal import Check, libc, serve

TFD_TIMER_ABSTIME = 1
SECOND, PERIOD = 10**9, 40 * 10**9


def armed(first: int, interval: int = 0) -> int:
    fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    setting = struct.pack("qqqq", *divmod(interval, SECOND), *divmod(first, SECOND))
    libc.timerfd_settime(fd, TFD_TIMER_ABSTIME, setting, None)
    return int(fd)


began = time.monotonic_ns()
disarmed, read, unread = armed(0), armed(began), armed(began)
periodic = armed(began - 25 * SECOND, PERIOD)  # in step: 15 s from the beginning on, and so on
os.read(read, 8)
asked = 0


def expiries(fd: int) -> int:
    try:
        return int(struct.unpack("Q", os.read(fd, 8))[0])
    except BlockingIOError:
        return 0


def check(found: Check) -> None:
    global asked
    asked += 1
    found.equal("expiries", [expiries(fd) for fd in (disarmed, read, unread)], [0, 0, asked == 1])
    if asked == 1:
        found.true("the periodic one has expired", expiries(periodic))
    left = ctypes.create_string_buffer(32)
    libc.timerfd_gettime(periodic, left)
    _, _, seconds, nanoseconds = struct.unpack("qqqq", left.raw)
    due = time.monotonic_ns() + seconds * SECOND + nanoseconds
    found.true(
        "the periodic one is in step", (due - began - 15 * SECOND + SECOND // 2) % PERIOD < SECOND
    )


serve(check)
