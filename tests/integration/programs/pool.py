"""Workers forked from one parent, and one from a worker: a part of their memory is their own by
now, the rest is still shared.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path

from animal import Check, libc, pattern, serve

SIZE = 6 << 20
HALF = SIZE // 2
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]


def area() -> int:
    """Its address; mappings without rights around it keep it apart."""
    around: int = libc.mmap(
        None, SIZE + 2 * mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    address = around + mmap.PAGESIZE
    libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.PROT_READ | mmap.PROT_WRITE)
    # Pages of their own: of a huge one that some have in part, a kernel need not know who has which
    # part.
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.MADV_NOHUGEPAGE)
    return address


def fill(address: int, size: int, seed: int) -> None:
    """With zeros, in pages of its own, if `seed` is 0."""
    ctypes.memmove(address, pattern(size, seed) if seed else bytes(size), size)


def sums() -> str:
    return ",".join(
        hashlib.sha256(ctypes.string_at(start, HALF)).hexdigest()
        for start in (memory, memory + HALF, apart)
    )


def worker(number: int | None, before: Callable[[], None] = lambda: None) -> socket.socket:
    """Fork one that has its own first half, unless `number` is None, and answers with its
    checksums.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        if number is not None:
            sharing.append(pid)
        if number:  # a restore need not make pages for zeros
            having.append(pid)
        return ours
    ours.close()
    before()
    if number is not None:
        fill(memory, HALF, number)
        fill(apart, HALF, 100 + number)
    while theirs.recv(10):
        theirs.send(sums().encode())
    os._exit(0)


sharing: list[int] = []
having: list[int] = []
memory, apart = area(), area()
fill(memory, SIZE, 1)

below: list[socket.socket] = []


def forks_again() -> None:
    below.append(worker(50))


# The last one still shares all with the parent, so that the one with zeros has them where it was
# forked with something else.
workers = [worker(2), worker(3, forks_again), worker(0), worker(None)]
fill(apart, HALF, 100)
expected: list[str] = []


def answers() -> list[str]:
    found = [sums()]
    for one in workers:
        one.send(b"sums")
        found.append(one.recv(1000).decode())
    return found


def kilobytes(pid: int, name: str) -> int:
    """What smaps says of the memory of a process that all have."""
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            inside = word.startswith(f"{memory:08x}-")
        elif inside and word == f"{name}:":
            return int(line.split()[1])
    return -1


expected += answers()


def check(found: Check) -> None:
    found.equal("contents", answers(), expected)
    for pid in sharing:
        found.true(f"{pid} still shares a half", kilobytes(pid, "Shared_Dirty") >= HALF >> 10)
    for pid in having:
        found.true(f"{pid} has a half of its own", kilobytes(pid, "Private_Dirty") >= HALF >> 10)


serve(check)
