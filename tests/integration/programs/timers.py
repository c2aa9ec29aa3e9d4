"""Timer descriptors that run: relative, absolute on two clocks, periodic; each check reports the
time that each has left.
"""

from __future__ import annotations

import ctypes
import struct
import time

from animal import Check, libc, serve

TFD_CLOEXEC, TFD_TIMER_ABSTIME = 0o2000000, 1
SECOND = 10**9


def armed(clock: int, flags: int, first: int, interval: int = 0) -> int:
    fd = libc.timerfd_create(clock, TFD_CLOEXEC)
    libc.timerfd_settime(
        fd, flags, struct.pack("qqqq", *divmod(interval, SECOND), *divmod(first, SECOND)), None
    )
    return int(fd)


def absolute(clock: int) -> int:
    return armed(clock, TFD_TIMER_ABSTIME, time.clock_gettime_ns(clock) + 500 * SECOND)


timers = {
    "relative": armed(time.CLOCK_MONOTONIC, 0, 500 * SECOND),
    "periodic": armed(time.CLOCK_BOOTTIME, 0, 500 * SECOND, 7 * SECOND),
    "absolute": absolute(time.CLOCK_MONOTONIC),
    "absolute, real time": absolute(time.CLOCK_REALTIME),
}


def check(found: Check) -> None:
    for name, fd in timers.items():
        left = ctypes.create_string_buffer(32)
        libc.timerfd_gettime(fd, left)
        seconds, nanoseconds, *first = struct.unpack("qqqq", left.raw)
        found.equal(
            f"interval of {name}", (seconds, nanoseconds), (7 if name == "periodic" else 0, 0)
        )
        found.facts[name] = first[0] + first[1] / SECOND


serve(check)
