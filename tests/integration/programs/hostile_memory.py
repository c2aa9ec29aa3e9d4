"""Memory that changes in every way, all the time: mapped, unmapped, moved, given back, protected,
locked, written by threads, forked children, other processes and devices; private, shared, of
memfds. Arguments: seed, MiB. By the seed: huge pages where possible, never, or as the host has it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import threading
import time

from animal import Check, libc, path, serve

PAGE = mmap.PAGESIZE
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 1
MIB = int(sys.argv[3]) if len(sys.argv) > 3 else 80
HUGE = ("as the host has it", "wanted", "never")[SEED % 3]
BLOCK = os.urandom(1 << 20)
FAILED = ctypes.c_void_p(-1).value
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
INT, SIZE, PLACE = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
libc.mmap.argtypes = [PLACE, SIZE, INT, INT, INT, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
for name in ("munmap", "mlock", "munlock"):
    getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
for name in ("madvise", "mprotect"):
    getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
libc.process_vm_writev.argtypes = [INT, PLACE, SIZE, PLACE, SIZE, SIZE]
ANONYMOUS, READ_WRITE, MAY_MOVE = 0x22, 3, 1
SHARED, SHARED_ANONYMOUS, PRIVATE = 0x01, 0x21, 0x02
PR_SET_THP_DISABLE, MADV_HUGEPAGE = 41, 14
HUGE_PAGE = 2 << 20
SOURCE = ctypes.create_string_buffer(BLOCK)
# MADV_DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, PAGEOUT, COLLAPSE, COLD, MERGEABLE, UNMERGEABLE
ADVICE = (4, 4, 8, 14, 15, 21, 25, 20, 12, 13)


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class Writer:
    """One thread's own memory, which no other thread unmaps."""

    def __init__(self, seed: int, mib: int) -> None:
        self.random = random.Random(seed)
        self.areas: list[list[int]] = []  # address, pages, the most pages that it can have
        self.deepest = False
        for _ in range(4):
            self.map(mib * 256 // 4)

    def map(self, pages: int) -> None:
        kind = self.random.choices((ANONYMOUS, SHARED_ANONYMOUS, SHARED, PRIVATE), (8, 1, 1, 1))[0]
        fd = -1
        if not kind & 0x20:
            fd = os.memfd_create("hostile")
            os.truncate(fd, pages * PAGE)
        at = libc.mmap(None, pages * PAGE, READ_WRITE, kind, fd, 0)
        if fd >= 0:
            os.close(fd)
        if at != FAILED:
            self.areas.append([at, pages, 1 << 20 if kind == ANONYMOUS else pages])
            if HUGE == "wanted":
                libc.madvise(at, pages * PAGE, MADV_HUGEPAGE)
            for page in range(0, pages, 200):
                size = min(200, pages - page) * PAGE
                libc.memmove(at + page * PAGE, SOURCE, size)

    def part(self) -> tuple[int, int]:
        at, pages, _most = self.random.choice(self.areas)
        first = self.random.randrange(pages)
        return at + first * PAGE, self.random.randint(1, min(pages - first, 600))

    def write(self, how_many: int = 50) -> None:
        for _ in range(how_many):
            at, pages = self.part()
            size = min(pages, 8) * PAGE
            if self.random.random() < 0.5:
                libc.memset(at + self.random.randrange(PAGE - 8), self.random.randrange(256), 8)
            else:
                libc.memmove(at, ctypes.addressof(SOURCE) + self.random.randrange(4096), size)

    def unmap(self) -> None:
        if len(self.areas) > 2:
            at, pages, _most = self.areas.pop(self.random.randrange(len(self.areas)))
            libc.munmap(at, pages * PAGE)
            self.map(pages)

    def hole(self) -> None:
        """Map new memory in the place of a part."""
        at, pages = self.part()
        libc.mmap(at, pages * PAGE, READ_WRITE, ANONYMOUS | 0x10, -1, 0)
        if self.random.random() < 0.7:
            libc.memset(at, self.random.randrange(256), pages * PAGE)

    def move(self) -> None:
        number = self.random.randrange(len(self.areas))
        at, pages, most = self.areas[number]
        wanted = min(most, max(64, pages + self.random.randint(-200, 200)))
        moved = libc.mremap(at, pages * PAGE, wanted * PAGE, MAY_MOVE)
        if moved != FAILED:
            self.areas[number] = [moved, wanted, most]
        else:  # several mappings by now
            libc.munmap(at, pages * PAGE)
            self.areas.pop(number)
            self.map(pages)

    def advise(self) -> None:
        at, pages = self.part()
        libc.madvise(at, pages * PAGE, self.random.choice(ADVICE))

    def protect(self) -> None:
        at, pages = self.part()
        libc.mprotect(at, pages * PAGE, self.random.choice((0, 1, 5, 7)))
        time.sleep(0.001)
        libc.mprotect(at, pages * PAGE, READ_WRITE)

    def lock(self) -> None:
        at, pages = self.part()
        libc.mlock(at, pages * PAGE)
        libc.munlock(at, pages * PAGE)

    def direct(self) -> None:
        """Have a device write into memory: the pages are pinned meanwhile."""
        at, pages = self.part()
        fd = os.open(path("source"), os.O_RDONLY | os.O_DIRECT)
        libc.preadv(fd, ctypes.byref(Vector(at, min(pages, 64) * PAGE)), 1, 0)
        os.close(fd)

    def other(self) -> None:
        """Write as another process does."""
        at, pages = self.part()
        size = min(pages, 64) * PAGE
        libc.process_vm_writev(
            os.getpid(),
            ctypes.byref(Vector(ctypes.addressof(SOURCE), size)),
            1,
            ctypes.byref(Vector(at, size)),
            1,
            0,
        )

    def fork(self) -> None:
        if self.deepest:
            return
        child = os.fork()
        if child == 0:
            self.deepest = True
            if self.random.random() < 0.3:
                os.execv(sys.executable, [sys.executable, "-c", _EXECUTED])
            until = time.monotonic() + self.random.random()
            while time.monotonic() < until:
                self.step()
            os._exit(0)
        else:
            time.sleep(self.random.random() / 4)
            self.write()
            children.append(child)

    def step(self) -> None:
        global turns
        turns += 1
        name = self.random.choices(
            ("write", "unmap", "hole", "move", "advise", "protect", "lock", "direct", "other"),
            (20, 1, 4, 2, 8, 3, 2, 2, 4),
        )[0]
        getattr(self, name)()


_EXECUTED = """
import time
made = bytearray(b"executed" * (1 << 17))
until = time.monotonic() + 0.5
while time.monotonic() < until:
    made[0] ^= 1
    time.sleep(0.001)
"""
turns = 0
children: list[int] = []
with open(path("source"), "wb") as file:
    file.write(os.urandom(64 * PAGE))


def work(seed: int) -> None:
    writer = Writer(seed, MIB // 4)
    while True:
        writer.step()
        time.sleep(0.0005)


def restless() -> None:
    """Write all the time, to the last page before the freeze; each page has the same number."""
    size = 6 << 20
    at = libc.mmap(None, size + HUGE_PAGE, READ_WRITE, ANONYMOUS, -1, 0)
    at = (at + HUGE_PAGE - 1) & -HUGE_PAGE
    if HUGE == "wanted":
        libc.madvise(at, size, MADV_HUGEPAGE)
    number = 0
    while True:
        number += 1
        libc.memset(at, number & 0xFF, size)


def main() -> None:
    """The main thread forks; the others write."""
    if HUGE == "never":
        libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    for number in range(3):
        threading.Thread(target=work, args=(SEED * 10 + number,), daemon=True).start()
    threading.Thread(target=restless, daemon=True).start()
    writer = Writer(SEED * 10 + 9, MIB // 4)

    def forking() -> None:
        while True:
            writer.step()
            if writer.random.random() < 0.02:
                writer.fork()
            while children and os.waitpid(children[0], os.WNOHANG)[0]:
                children.pop(0)
            time.sleep(0.0005)

    threading.Thread(target=forking, daemon=True).start()
    while turns < 100:
        time.sleep(0.01)

    def check(found: Check) -> None:
        found.facts["turns"] = turns

    serve(check)


main()
