"""Threads that wait for what never comes, with a time limit: ``limited.py FOLDER [MORE]``.

What a call returns is in ``returned``; MORE other threads wait in poll."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from collections.abc import Callable

from animal import libc, path, ready, sleeper

LIMIT = 1_000_000  # milliseconds
MORE = int(sys.argv[2]) if len(sys.argv) > 2 else 0

libc.syscall.restype = ctypes.c_long
epoll = select.epoll()
events = ctypes.create_string_buffer(12)
returned = os.open(path("returned"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)


def call(number: int, *arguments: object) -> Callable[[], None]:
    def wait() -> None:
        result = int(libc.syscall(number, *arguments))
        os.write(returned, b"%d: %d %d\n" % (number, result, ctypes.get_errno()))

    return wait


for wait in (
    *[call(7, None, 0, LIMIT)] * (1 + MORE),
    call(232, epoll.fileno(), events, 1, LIMIT),
    call(281, epoll.fileno(), events, 1, LIMIT, None, 8),
):
    threading.Thread(target=wait, daemon=True).start()
ready()
sleeper()
