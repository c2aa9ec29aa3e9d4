"""Threads that sleep, and do not ask what is left when they are interrupted: ``sleeps.py FOLDER
MILLISECONDS [filter]``.

What a call returns is in ``returned``, with the milliseconds that it has taken; ``filter``: the
process has a seccomp filter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable

from animal import libc, path, ready, sleeper

LIMIT = int(sys.argv[2])
NANOSLEEP = b"\xb8\x23\x00\x00\x00\x0f\x05\xc3"  # mov eax, 35; syscall; ret
ALLOW = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # return SECCOMP_RET_ALLOW
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38

span = ctypes.create_string_buffer(struct.pack("qq", LIMIT // 1000, LIMIT % 1000 * 1_000_000))
events = ctypes.create_string_buffer(12)
epoll = select.epoll()
code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(NANOSLEEP)
own = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(
    ctypes.addressof(ctypes.c_char.from_buffer(code))
)
returned = os.open(path("returned"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
libc.syscall.restype = ctypes.c_long

SLEEPS: dict[str, Callable[[], int]] = {
    "usleep": lambda: libc.usleep(LIMIT * 1000),
    "clock_nanosleep": lambda: libc.clock_nanosleep(time.CLOCK_MONOTONIC, 0, span, None),
    "epoll_pwait2": lambda: libc.syscall(441, epoll.fileno(), events, 1, span, None, 8),
    "own": lambda: own(ctypes.addressof(span), None),  # not the C library's
}


def sleep(name: str) -> None:
    began = time.monotonic()
    result = SLEEPS[name]()
    os.write(returned, f"{name} {result} {int((time.monotonic() - began) * 1000)}\n".encode())


if "filter" in sys.argv:
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    instructions = ctypes.create_string_buffer(ALLOW)
    program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(instructions))
    if libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
for name in SLEEPS:
    threading.Thread(target=sleep, args=(name,), name=name, daemon=True).start()
ready()
sleeper()
