"""Signals: handled, blocked, waiting, with values; alternate stacks."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading

from . import Place, Step, call, kind

SYS_SIGACTION, SYS_SIGQUEUE, SYS_TGSIGQUEUE, SYS_SIGALTSTACK = 13, 129, 297, 131
NUMBERS = [
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGWINCH,
    signal.SIGURG,
    signal.SIGRTMIN + 7,
    signal.SIGRTMAX,
]


@kind
def actions(place: Place) -> Step:
    """Handlers as the kernel knows them: flags and masks."""
    for number in NUMBERS:
        choice = place.random.random()
        if choice < 0.3:
            signal.signal(number, signal.SIG_IGN)
        elif choice < 0.7:
            signal.signal(number, lambda *_: None)
            action = ctypes.create_string_buffer(32)
            call(SYS_SIGACTION, number, None, action, 8)
            handler, flags, restorer, mask = struct.unpack("QQQQ", action.raw)
            flags |= place.some([0x10000000, 0x40000000, 0x80000000, 1, 2, 0x08000000, 0x800])
            mask |= place.some([1 << (one - 1) for one in NUMBERS])
            call(
                SYS_SIGACTION, number, struct.pack("QQQQ", handler, flags, restorer, mask), None, 8
            )
    yield
    while True:
        found = []
        for number in NUMBERS:
            action = ctypes.create_string_buffer(32)
            call(SYS_SIGACTION, number, None, action, 8)
            handler, flags, _, mask = struct.unpack("QQQQ", action.raw)
            found.append([min(2, handler), hex(flags), hex(mask)])
        yield found


@kind
def waiting_signals(place: Place) -> Step:
    """Blocked, and queued to the process or this thread, with values, more than one of the same."""
    numbers = [signal.SIGRTMIN + 9, signal.SIGRTMIN + 10, signal.SIGTERM]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for value in range(place.random.randrange(6)):
        number = place.one(numbers)
        info = struct.pack("iiii", number, 0, -1, 0) + struct.pack(
            "iIQ", os.getpid(), os.getuid(), value
        )
        info = info.ljust(128, b"\0")
        if place.random.random() < 0.5 and threading.active_count() == 1:  # others may not block it
            call(SYS_SIGQUEUE, os.getpid(), number, info)
        else:
            call(SYS_TGSIGQUEUE, os.getpid(), threading.get_native_id(), number, info)
    made = os.getpid()
    yield
    while True:
        found = []
        while (got := signal.sigtimedwait(numbers, 0)) is not None:
            found.append([got.si_signo, got.si_code, got.si_uid, got.si_pid == made])
        yield found


@kind
def children_not_waited_for(place: Place) -> Step:
    """SIGCHLD ignored or not wanted: children leave nothing behind."""
    if place.random.random() < 0.5:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    while True:
        child = os.fork()
        if not child:
            os._exit(3)
        try:
            yield os.waitpid(child, 0)[1]
        except OSError as error:
            yield error.errno


@kind
def stack_of_signals(place: Place) -> Step:
    """sigaltstack, armed so that it is disarmed by its use."""
    area = ctypes.create_string_buffer(1 << 16)
    call(
        SYS_SIGALTSTACK,
        struct.pack("QiiQ", ctypes.addressof(area), place.one([0, -(1 << 31)]), 0, 1 << 16),
        None,
    )
    yield
    while True:
        buffer = ctypes.create_string_buffer(24)
        call(SYS_SIGALTSTACK, None, buffer)
        pointer, flags, _, size = struct.unpack("QiiQ", buffer.raw)
        yield [pointer == ctypes.addressof(area), flags, size]
