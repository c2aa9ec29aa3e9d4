"""Memory in patches: plain, read-only, executable, locked, growing down, zeros, some of it shared
with a child since a fork.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import signal
import threading

from animal import Check, libc, pattern, serve

PAGE = mmap.PAGESIZE
MAP_GROWSDOWN, MAP_LOCKED = 0x100, 0x2000
PLAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
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

areas: dict[str, tuple[int, int]] = {}


def area(
    name: str, size: int, flags: int = PLAIN, protection: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> None:
    """Filled with what is its own, then given this protection; a gap behind it keeps it apart."""
    address = libc.mmap(None, size + PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    ctypes.memmove(address, pattern(size, len(areas)), size)
    libc.mprotect(address + size, PAGE, 0)
    libc.mprotect(address, size, protection)
    areas[name] = (address, size)


def digest(name: str) -> str:
    address, size = areas[name]
    return hashlib.sha256(ctypes.string_at(address, size)).hexdigest()


area("shared with the child", 3 << 20)
child = os.fork()
if not child:
    while True:
        signal.pause()

area("plain", 5 << 20)
area("read-only", 2 << 20, protection=mmap.PROT_READ)
area("executable", 1 << 20, protection=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
area("out of reach", 1 << 20, protection=0)
area("locked", 1 << 20, PLAIN | MAP_LOCKED)
area("growing down", 1 << 20, PLAIN | MAP_GROWSDOWN)
area("scattered", 4 << 20)
address, size = areas["scattered"]
for page in range(0, size, 3 * 64 * PAGE):  # long runs of nothing between long runs
    libc.madvise(ctypes.c_void_p(address + page), ctypes.c_size_t(64 * PAGE), mmap.MADV_DONTNEED)
area("zeros", 1 << 20)
ctypes.memset(areas["zeros"][0], 0, areas["zeros"][1])

threading.stack_size(4 << 20)
deep = threading.Event()


def thread() -> None:
    """Uses much of its stack, as its own variables and what the kernel tells it about itself are
    behind that.
    """
    libc.memset(ctypes.c_char_p(bytes(8)), 0, 8)

    def recurse(depth: int) -> None:
        if depth:
            recurse(depth - 1)
        else:
            deep.set()
            threading.Event().wait()

    recurse(900)


threading.Thread(target=thread, daemon=True).start()
deep.wait()


def readable() -> None:
    """What is out of reach can be looked at only with other rights; they are taken back."""
    address, size = areas["out of reach"]
    libc.mprotect(address, size, mmap.PROT_READ)


readable()
whole = {name: digest(name) for name in areas}
libc.mprotect(*areas["out of reach"], 0)


def check(found: Check) -> None:
    readable()
    for name, wanted in whole.items():
        found.equal(name, digest(name), wanted)
    libc.mprotect(*areas["out of reach"], 0)
    found.true("the child is there", os.path.exists(f"/proc/{child}"))


serve(check)
