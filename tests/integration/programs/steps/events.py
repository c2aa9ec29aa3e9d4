"""Descriptors of events, and timers."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import threading
import time

from . import Place, Step, call, kind, libc, readable

CLOCKS = {"realtime": 0, "monotonic": 1, "boottime": 7}
TFD_TIMER_ABSTIME, TFD_TIMER_CANCEL_ON_SET = 1, 2
FAR = 10_000  # seconds


def _timespecs(interval: float, value: float) -> ctypes.Array[ctypes.c_long]:
    parts = [int(interval), int(interval % 1 * 1e9), int(value), int(value % 1 * 1e9)]
    return (ctypes.c_long * 4)(*parts)


@kind
def event_count(place: Place) -> Step:
    fd = os.eventfd(
        place.random.randrange(1 << 20),
        os.EFD_NONBLOCK | place.some([os.EFD_SEMAPHORE, os.EFD_CLOEXEC]),
    )
    yield
    while True:
        os.eventfd_write(fd, 3)
        yield os.eventfd_read(fd)


@kind
def timer(place: Place) -> Step:
    """timerfd: one that runs out long after, once or again and again; or one that has run out and
    was not read.
    """
    clock = place.one(list(CLOCKS.values()))
    fd = libc.timerfd_create(clock, os.O_NONBLOCK | place.some([os.O_CLOEXEC]))
    interval, value = place.one([0.0, 500.25]), place.one([0.0, FAR, 0.01])
    if value == 0.01:
        interval = 0.0  # how often it has run out would be another number each time
    absolute = place.random.random() < 0.4
    start = time.clock_gettime(clock) if absolute and value else 0.0
    flags = TFD_TIMER_ABSTIME if absolute else 0
    if absolute and clock == 0 and place.random.random() < 0.4:
        flags |= TFD_TIMER_CANCEL_ON_SET
    libc.timerfd_settime(fd, flags, _timespecs(interval, start + value), None)
    if value == 0.01:
        readable(fd)
    yield
    while True:
        left = (ctypes.c_long * 4)()
        libc.timerfd_gettime(fd, left)
        try:
            out = struct.unpack("Q", os.read(fd, 8))
        except BlockingIOError:
            out = (0,)
        yield [left[0], left[1], (left[2] > FAR - 300) if left[2] else bool(left[3]), out]


@kind
def signal_file(place: Place) -> Step:
    """signalfd, with a signal that waits for it."""
    number = place.one([signal.SIGUSR2, signal.SIGRTMIN + 3, signal.SIGWINCH])
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    mask = ctypes.c_uint64(1 << (number - 1))
    fd = call(289, -1, ctypes.byref(mask), 8, os.O_NONBLOCK | place.some([os.O_CLOEXEC]))
    count = place.random.randrange(3)
    for _ in range(count):
        signal.pthread_kill(threading.get_ident(), number)  # other threads may not block it
    yield
    while True:
        found = []
        while readable(fd, 0):
            found.append(struct.unpack_from("IiiI", os.read(fd, 128))[0])
        signal.pthread_kill(threading.get_ident(), number)
        yield [found, struct.unpack_from("I", os.read(fd, 128))[0]]


@kind
def event_poll(place: Place) -> Step:
    """epoll over what is ready and what is not, one in another, of a descriptor that has moved."""
    outer, inner = select.epoll(), select.epoll()
    full, empty = os.eventfd(1), os.eventfd(0)
    a, b = socket.socketpair()
    # and EPOLLWAKEUP; an edge (EPOLLET) is reported once more after a restore
    modes = [select.EPOLLONESHOT, 1 << 29]
    watched = {full: "full", empty: "empty", a.fileno(): "a", b.fileno(): "b"}
    for fd in watched:
        if place.random.random() < 0.7:
            inner.register(
                fd,
                place.some([select.EPOLLIN, select.EPOLLOUT, select.EPOLLPRI, select.EPOLLRDHUP])
                | place.some(modes),
            )
    outer.register(inner, select.EPOLLIN | place.some(modes))
    moved = place.random.random() < 0.3
    if moved:
        inner.register(other := os.dup(full), select.EPOLLIN)
        watched[other] = "other"
    yield
    while True:
        found = [sorted((watched[fd], events) for fd, events in inner.poll(0.05))]
        os.eventfd_write(empty, 1)
        b.send(b"x")
        found.append(sorted((watched[fd], events) for fd, events in inner.poll(0.05)))
        found.append([("inner", events) for _, events in outer.poll(0.05)])
        yield found


@kind
def watcher(place: Place) -> Step:
    """inotify on files and folders, and its numbers."""
    fd = libc.inotify_init1(os.O_NONBLOCK)
    folder = place.path("watched")
    os.mkdir(folder)
    name = os.path.join(folder, "file")
    with open(name, "w"):
        pass
    masks = [0x2, 0x4, 0x8, 0x100, 0x200, 0x40, 0x80]
    first = libc.inotify_add_watch(fd, folder.encode(), place.some(masks) | 0x100)
    second = libc.inotify_add_watch(fd, name.encode(), place.some(masks) | 0x2)
    if place.random.random() < 0.3:
        libc.inotify_rm_watch(fd, first)
        os.read(fd, 4096)  # it is reported; what is not read yet does not come back
    yield
    while True:
        with open(name, "a") as file:
            file.write("x")
        with open(os.path.join(folder, "new"), "w"):
            pass
        os.unlink(os.path.join(folder, "new"))
        events = os.read(fd, 4096) if readable(fd, 0) else b""
        yield [
            first,
            second,
            sorted(events[at : at + 8].hex() for at in range(0, len(events), 16))[:3],
            len(events),
        ]


@kind
def posix_timer(place: Place) -> Step:
    """Of a clock, a signal, a number; far off, or run out while the signal is blocked."""
    number = place.one([signal.SIGRTMIN + 5, signal.SIGUSR2, signal.SIGWINCH])
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    event = struct.pack("Qii48x", 4711, number, place.one([0, 1]))  # SIGEV_SIGNAL, SIGEV_NONE
    ident = ctypes.c_int()
    clock = place.one([0, 1, 7, 2, 3])
    call(222, clock, event, ctypes.byref(ident))
    value = place.one([0.0, FAR])
    call(223, ident, 0, _timespecs(place.one([0.0, 77.5]), value), None)
    yield
    while True:
        left = (ctypes.c_long * 4)()
        call(224, ident, left)
        yield [ident.value, left[0], left[1], left[2] > FAR - 300]


@kind
def interval_timer(place: Place) -> Step:
    which = place.one([signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF])
    signal.setitimer(which, FAR, place.one([0, 33.25]))
    yield
    while True:
        left, interval = signal.getitimer(which)
        yield [left > FAR - 300, round(interval, 2)]


@kind
def of_a_process(place: Place) -> Step:
    """pidfd of a child that lives, or that has ended and was not waited for."""
    ended = place.random.random() < 0.5
    child = os.fork()
    if not child:
        while not ended:
            signal.pause()
        os._exit(7)
    fd = os.pidfd_open(child, 0)
    if ended:
        readable(fd)
    yield
    while True:
        found: list[object] = [readable(fd, 0)]
        for ask in (os.P_PID, os.P_PIDFD):
            try:
                result = os.waitid(
                    ask, child if ask == os.P_PID else fd, os.WEXITED | os.WNOHANG | os.WNOWAIT
                )
                found.append([result.si_status, result.si_code] if result else None)
            except OSError as error:
                found.append(error.errno)
        yield found
