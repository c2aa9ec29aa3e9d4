"""Memory: heap, copy-on-write, shared anonymous, memfd, mapped files, advice, locks, guards.
Argument: MiB of heap.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import signal
import sys

from animal import Check, libc, path, pattern, serve

F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK = 1033, 1034, 2
PROT_NONE = 0
PAGE = mmap.PAGESIZE
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

MIB = int(sys.argv[2]) if len(sys.argv) > 2 else 16
BIG = pattern(1 << 20, 5)
heap = bytearray(BIG * MIB)
for at in range(0, len(heap), PAGE):
    heap[at : at + 8] = at.to_bytes(8, "big")
shared = mmap.mmap(-1, 4 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
shared[: 1 << 20] = BIG
shared[3 << 20 : (3 << 20) + 5] = b"there"
private = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private[: 1 << 20] = BIG  # then three absent megabytes
private.madvise(mmap.MADV_NOHUGEPAGE)
# Between guards, so that it stays a mapping of its own: the child fills all of it again.
apart = libc.mmap(None, 4 << 20, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0) + (
    1 << 20
)
libc.mprotect(apart, 2 << 20, mmap.PROT_READ | mmap.PROT_WRITE)
ctypes.memmove(apart, bytes(range(1, 256)) * (1 << 13), 255 << 13)
once = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
once.madvise(mmap.MADV_DONTFORK)

memfd = os.memfd_create("zoo", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
os.ftruncate(memfd, 2 << 20)
in_memfd = mmap.mmap(memfd, 2 << 20)
in_memfd[: 1 << 20] = BIG
os.lseek(memfd, 12345, os.SEEK_SET)
fcntl.fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK)
unmapped = os.memfd_create("nobody maps it", 0)
os.write(unmapped, BIG)

with open(path("mapped"), "w+b") as file:
    file.write(bytes(8 * PAGE))
    file.flush()
    file_shared = mmap.mmap(file.fileno(), 4 * PAGE, mmap.MAP_SHARED)
    file_private = mmap.mmap(file.fileno(), 4 * PAGE, mmap.MAP_PRIVATE, offset=4 * PAGE)
file_shared[:6] = b"shared"
file_private[PAGE : PAGE + 7] = b"private"
with open(path("mapped-and-deleted"), "w+b") as file:
    file.write(BIG)
    file.flush()
    deleted = mmap.mmap(file.fileno(), 1 << 20, mmap.MAP_SHARED)
os.unlink(path("mapped-and-deleted"))

guarded = libc.mmap(
    None, 4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
)
ctypes.memmove(guarded, b"behind a guard", 14)
libc.mprotect(guarded, PAGE, PROT_NONE)
locked = libc.mmap(
    None, 4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
)
libc.mlock(locked, 2 * PAGE)
ctypes.memmove(locked, b"locked", 6)


def digest(*parts: object) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part)  # type: ignore[arg-type]  # buffers of several kinds
    return state.hexdigest()


wanted = digest(heap)
go_read, go_write = os.pipe()
answer_read, answer_write = os.pipe()
child = os.fork()
if child == 0:
    heap[PAGE] ^= 0xFF  # one page of its own, the rest shared with the parent
    changed = digest(heap)
    ctypes.memset(apart, 0x5A, 2 << 20)
    while os.read(go_read, 1):
        own = ctypes.string_at(apart, 2 << 20) == b"\x5a" * (2 << 20)
        same = (
            own
            and digest(heap) == changed
            and bytes(shared[:1]) == b"!"
            and digest(deleted) == digest(BIG)
        )
        os.write(answer_write, b"y" if same else b"n")
    os._exit(0)


def check(found: Check) -> None:
    found.equal("heap", digest(heap), wanted)
    shared[:1] = b"!"
    os.write(go_write, b"?")
    found.equal("child's copy-on-write heap and shared memory", os.read(answer_read, 1), b"y")
    shared[:1] = BIG[:1]
    found.equal(
        "shared",
        (digest(shared[: 1 << 20]), shared[3 << 20 : (3 << 20) + 5]),
        (digest(BIG), b"there"),
    )
    found.equal(
        "private", (digest(private[: 1 << 20]), any(private[1 << 20 :])), (digest(BIG), False)
    )
    found.equal(
        "memfd",
        (digest(in_memfd[: 1 << 20]), os.lseek(memfd, 0, os.SEEK_CUR)),
        (digest(BIG), 12345),
    )
    found.equal("memfd's seals", fcntl.fcntl(memfd, F_GET_SEALS), F_SEAL_SHRINK)
    found.equal(
        "unmapped memfd",
        (digest(os.pread(unmapped, 2 << 20, 0)), os.lseek(unmapped, 0, 1)),
        (digest(BIG), len(BIG)),
    )
    found.equal(
        "mapped file",
        (bytes(file_shared[:6]), bytes(file_private[PAGE : PAGE + 7])),
        (b"shared", b"private"),
    )
    found.equal("mapped deleted file", digest(deleted), digest(BIG))
    libc.mprotect(guarded, PAGE, mmap.PROT_READ)
    found.equal("guarded page", ctypes.string_at(guarded, 14), b"behind a guard")
    libc.mprotect(guarded, PAGE, PROT_NONE)
    found.equal(
        "memory that the child has another of",
        ctypes.string_at(apart, 255 << 13),
        bytes(range(1, 256)) * (1 << 13),
    )
    found.equal("locked page", ctypes.string_at(locked, 6), b"locked")
    file_shared[:6] = b"SHARED"
    with open(path("mapped"), "rb") as file:
        found.equal("mapped file through its name", file.read(6), b"SHARED")
    file_shared[:6] = b"shared"
    os.kill(child, signal.SIGCONT)


serve(check)
