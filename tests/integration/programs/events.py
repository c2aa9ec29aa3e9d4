"""Readiness and time: epoll (level, edge, one-shot), eventfd, timerfd, signalfd with a pending
signal, inotify, itimer, pidfd.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time

from animal import Check, libc, path, serve, sleeper

TFD_CLOEXEC, IN_CREATE, IN_CLOEXEC = 0o2000000, 0x100, 0o2000000
CLOCK_MONOTONIC = 1

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGRTMIN, signal.SIGALRM})
mask = ctypes.c_uint64(1 << (signal.SIGUSR2 - 1) | 1 << (signal.SIGRTMIN - 1))
signals = libc.signalfd(-1, ctypes.byref(mask), 0)
os.kill(os.getpid(), signal.SIGUSR2)

counter = os.eventfd(42)
semaphore = os.eventfd(3, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
if os.fork() == 0:
    sleeper()  # it has all of them, too


def timer(first: float, interval: float) -> int:
    fd = libc.timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)
    setting = struct.pack(
        "qqqq", int(interval), int(interval % 1 * 1e9), int(first), int(first % 1 * 1e9)
    )
    libc.timerfd_settime(fd, 0, setting, None)
    return int(fd)


periodic, distant, disarmed = timer(0.2, 0.2), timer(3600, 0), timer(0, 0)
watch = libc.inotify_init1(IN_CLOEXEC)
os.mkdir(path("watched"))
wd = libc.inotify_add_watch(watch, path("watched").encode(), IN_CREATE)

pipe_read, pipe_write = os.pipe()
idle_read, idle_write = os.pipe()
edge_read, edge_write = os.pipe()
os.write(pipe_write, b"x")
poll = select.epoll()
poll.register(pipe_read, select.EPOLLIN)
poll.register(idle_read, select.EPOLLIN | select.EPOLLONESHOT)
poll.register(edge_read, select.EPOLLIN | select.EPOLLET)
poll.register(counter, select.EPOLLIN)
poll.register(periodic, select.EPOLLIN)
nested = select.epoll()
nested.register(poll.fileno(), select.EPOLLIN)
signal.setitimer(signal.ITIMER_VIRTUAL, 3000, 0)
signal.setitimer(signal.ITIMER_REAL, 3000, 7)
asked = 0


def check(found: Check) -> None:
    global asked
    asked += 1
    if asked == 1:
        found.equal("eventfd", os.eventfd_read(counter), 42)
        found.equal("signalfd", struct.unpack("I", os.read(signals, 128)[:4])[0], signal.SIGUSR2)
        os.eventfd_write(counter, 42)
    found.equal("semaphore", os.eventfd_read(semaphore), 1)
    os.eventfd_write(semaphore, 1)
    deadline = time.monotonic() + 30
    wanted = {pipe_read, periodic, counter}
    seen: set[int] = set()
    while seen != wanted and time.monotonic() < deadline:
        # An edge that was reported may be reported once more after a restore, as with any new
        # registration.
        seen |= {fd for fd, _ in poll.poll(1)} - {edge_read}
    found.equal("epoll", seen, wanted)
    found.true("nested epoll", nested.poll(1))
    found.true("timer ticks", struct.unpack("Q", os.read(periodic, 8))[0] >= 1)
    remaining = ctypes.create_string_buffer(32)
    libc.timerfd_gettime(distant, remaining)
    seconds = struct.unpack("qqqq", remaining.raw)[2]
    found.true(f"distant timer: {seconds}", 3000 < seconds <= 3600)
    libc.timerfd_gettime(disarmed, remaining)
    found.equal("disarmed timer", remaining.raw, bytes(32))
    real, virtual = signal.getitimer(signal.ITIMER_REAL), signal.getitimer(signal.ITIMER_VIRTUAL)
    found.true(
        f"itimers: {real} {virtual}",
        2000 < real[0] <= 3000 and real[1] == 7 and 2900 < virtual[0] <= 3001,
    )
    with open(path(f"watched/{asked}"), "w"):
        pass
    event = os.read(watch, 4096)
    found.equal(
        "inotify", (struct.unpack("i", event[:4])[0], event[16:].rstrip(b"\0")), (wd, b"%d" % asked)
    )
    os.write(edge_write, b"e")
    found.true("edge", edge_read in {fd for fd, _ in poll.poll(1)})
    found.true("edge only once", edge_read not in {fd for fd, _ in poll.poll(1)})
    os.write(idle_write, b"i")
    found.equal("one shot", idle_read in {fd for fd, _ in poll.poll(1)}, asked == 1)
    found.true("one shot only once", idle_read not in {fd for fd, _ in poll.poll(1)})


serve(check)
