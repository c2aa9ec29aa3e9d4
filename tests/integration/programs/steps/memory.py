"""Mappings of all kinds, and the advice that the kernel got about them."""

from __future__ import annotations

import ctypes
import mmap
import os

from . import Place, Step, call, kind, libc

PAGE = mmap.PAGESIZE
READ, WRITE, EXECUTE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
NORESERVE, POPULATE, STACK = 0x4000, 0x8000, 0x20000
DONTNEED, COLD, PAGEOUT, GUARD_INSTALL = 4, 20, 21, 102
HUGEPAGE, WIPEONFORK = 14, 18
# and DONTFORK, DONTDUMP, MERGEABLE, NOHUGEPAGE, RANDOM, SEQUENTIAL
ADVICES = [10, 16, 12, HUGEPAGE, 15, WIPEONFORK, 1, 2]
SYS_MMAP, SYS_MPROTECT, SYS_MADVISE, SYS_PRCTL, SYS_MLOCK2, SYS_PKEY_MPROTECT, SYS_PKEY_ALLOC = (
    9,
    10,
    28,
    157,
    325,
    329,
    330,
)
PR_SET_VMA = 0x53564D41
# What smaps tells of a mapping and should be so again; not that it is accounted for, nor that pages
# are locked when touched, nor ("gu") that it, or one that it was merged with, may have guard pages.
FLAGS = frozenset(
    [
        "rd",
        "wr",
        "ex",
        "sh",
        "mr",
        "mw",
        "me",
        "ms",
        "gd",
        "lo",
        "io",
        "sr",
        "rr",
        "dc",
        "de",
        "nr",
        "ht",
        "dd",
        "wf",
        "mg",
        "hg",
        "nh",
        "um",
        "uw",
        "dp",
    ]
)


def _map(length: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    return call(
        SYS_MMAP,
        ctypes.c_void_p(0),
        ctypes.c_size_t(length),
        protection,
        flags,
        fd,
        ctypes.c_size_t(offset),
    ) & ((1 << 64) - 1)


def _put(address: int, data: bytes) -> None:
    ctypes.memmove(ctypes.c_void_p(address), data, len(data))


def _see(address: int, length: int = 16) -> str:
    return ctypes.string_at(ctypes.c_void_p(address), length).hex()


def _mapping(address: int) -> list[str]:
    """Protection, name and flags of the mapping at that address."""
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        for line in lines:
            first = line.partition(" ")[0]
            if "-" not in first or ":" in first:
                continue
            start, end = (int(part, 16) for part in first.split("-"))
            if start <= address < end:
                kept = (
                    [line.split()[1], " ".join(line.split()[5:])]
                    if "[anon" in line
                    else [line.split()[1]]
                )
                for line in lines:
                    if line.startswith("VmFlags"):
                        return [*kept, " ".join(flag for flag in line.split()[1:] if flag in FLAGS)]
                    if line.startswith("ProtectionKey"):
                        kept.append(" ".join(line.split()))
    return ["not mapped"]


@kind
def anonymous(place: Place) -> Step:
    """Private or shared, advised, locked, with some pages never touched and some protected."""
    pages = place.random.randint(2, 40)
    shared = place.random.random() < 0.3
    flags = (
        (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        | mmap.MAP_ANONYMOUS
        | place.some([NORESERVE, STACK, POPULATE])
    )
    address = _map(pages * PAGE, READ | WRITE, flags)
    written = [number for number in range(pages) if place.random.random() < 0.5]
    for number in written:
        _put(address + number * PAGE + 100, place.bytes(50).ljust(50, b"-"))
    for advice in ADVICES:
        if place.random.random() < 0.15 and not (shared and advice == WIPEONFORK):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE), advice)
            if advice == WIPEONFORK:
                written = []  # a restore wipes it
    if place.random.random() < 0.2:
        call(SYS_MLOCK2, ctypes.c_void_p(address), ctypes.c_size_t(PAGE), place.one([0, 1]))
    protected = place.random.randrange(pages)
    call(
        SYS_MPROTECT,
        ctypes.c_void_p(address + protected * PAGE),
        ctypes.c_size_t(PAGE),
        place.one([READ, READ | EXECUTE]),
    )
    yield
    while True:
        mapping = _mapping(address)
        if mapping == ["not mapped"]:  # MADV_DONTFORK
            yield mapping
            continue
        yield [
            [_see(address + number * PAGE + 100) for number in written],
            mapping,
            _mapping(address + protected * PAGE),
        ]


@kind
def of_a_file(place: Place) -> Step:
    """A private or shared mapping of a file, written to, perhaps removed, perhaps shorter than the
    mapping.
    """
    path = place.path("mapped")
    with open(path, "wb") as file:
        file.write(place.random.randbytes(5 * PAGE + 123))
    fd = os.open(path, os.O_RDWR)
    shared = place.random.random() < 0.5
    offset = place.one([0, PAGE])
    address = _map(
        8 * PAGE, READ | WRITE, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, fd, offset
    )
    _put(address + 2 * PAGE + 5, b"changed")
    if place.random.random() < 0.5:
        os.close(fd)
        fd = -1
    if place.random.random() < 0.4:
        os.unlink(path)
    if place.random.random() < 0.3:
        call(SYS_MPROTECT, ctypes.c_void_p(address), ctypes.c_size_t(PAGE), place.one([0, READ]))
    yield
    while True:
        _put(address + 3 * PAGE, b"again")
        found: list[object] = [
            _see(address + PAGE, 30),
            _see(address + 2 * PAGE),
            _see(address + 3 * PAGE),
            _mapping(address),
        ]
        if fd >= 0:
            found.append(os.pread(fd, 20, 2 * PAGE + offset).hex())
        yield found


@kind
def of_a_memory_file(place: Place) -> Step:
    fd = os.memfd_create("mapped", os.MFD_ALLOW_SEALING)
    os.truncate(fd, 4 * PAGE)
    shared = _map(4 * PAGE, READ | WRITE, mmap.MAP_SHARED, fd)
    private = _map(4 * PAGE, READ | WRITE, mmap.MAP_PRIVATE, fd)
    _put(shared, b"for all")
    _put(private + PAGE, b"for me")
    if place.random.random() < 0.5:
        os.close(fd)
    yield
    while True:
        _put(shared + 2 * PAGE, place.random.randbytes(9))
        yield [
            _see(shared),
            _see(private),
            _see(private + PAGE),
            _see(private + 2 * PAGE),
            _mapping(shared),
            _mapping(private),
        ]


@kind
def guarded(place: Place) -> Step:
    """Guard pages without mappings of their own (MADV_GUARD_INSTALL)."""
    address = _map(6 * PAGE, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for number in range(6):
        _put(address + number * PAGE, b"before")
    call(SYS_MADVISE, ctypes.c_void_p(address + 2 * PAGE), ctypes.c_size_t(2 * PAGE), GUARD_INSTALL)
    yield
    with open("/proc/self/mem", "rb", buffering=0) as file:
        while True:
            found: list[object] = []
            for number in range(6):
                file.seek(address + number * PAGE)
                try:
                    found.append(file.read(6).hex())
                except OSError as error:
                    found.append(error.errno)
            yield [found, _mapping(address)]


@kind
def protection_key(place: Place) -> Step:
    key = call(SYS_PKEY_ALLOC, 0, 0)
    address = _map(2 * PAGE, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _put(address, b"with a key")
    call(SYS_PKEY_MPROTECT, ctypes.c_void_p(address), ctypes.c_size_t(PAGE), READ | WRITE, key)
    yield
    while True:
        yield [key, _see(address), _mapping(address)]


@kind
def named(place: Place) -> Step:
    """PR_SET_VMA_ANON_NAME."""
    address = _map(3 * PAGE, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    call(
        SYS_PRCTL, PR_SET_VMA, 0, ctypes.c_void_p(address), ctypes.c_size_t(2 * PAGE), b"of a step"
    )
    _put(address, b"named")
    yield
    while True:
        yield [_see(address), _mapping(address)]


@kind
def freed(place: Place) -> Step:
    """Parts that are given back, or to be reclaimed."""
    address = _map(9 * PAGE, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for number in range(9):
        _put(address + number * PAGE, place.random.randbytes(30))
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(2 * PAGE), place.one([COLD, PAGEOUT]))
    libc.madvise(ctypes.c_void_p(address + 3 * PAGE), ctypes.c_size_t(2 * PAGE), DONTNEED)
    yield
    while True:
        yield [_see(address + number * PAGE) for number in range(9)]


@kind
def remapped(place: Place) -> Step:
    """One mapping moved, cut and merged; the heap's end moved."""
    libc.mremap.restype = ctypes.c_void_p
    libc.sbrk.restype = ctypes.c_void_p
    address = _map(16 * PAGE, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for number in range(16):
        _put(address + number * PAGE, b"page %d" % number)
    libc.munmap(ctypes.c_void_p(address + 5 * PAGE), ctypes.c_size_t(2 * PAGE))
    moved = libc.mremap(
        ctypes.c_void_p(address + 8 * PAGE),
        ctypes.c_size_t(4 * PAGE),
        ctypes.c_size_t(64 * PAGE),
        1,
    )
    yield
    while True:
        yield [
            _see(address),
            _see(address + 7 * PAGE),
            _see(moved),
            _see(moved + 3 * PAGE),
            _mapping(address + 5 * PAGE) == ["not mapped"],
        ]


@kind
def of_a_device(place: Place) -> Step:
    """Mappings of /dev/zero."""
    fd = os.open("/dev/zero", os.O_RDWR)
    address = _map(3 * PAGE, READ | WRITE, place.one([mmap.MAP_SHARED, mmap.MAP_PRIVATE]), fd)
    os.close(fd)
    _put(address + PAGE, b"zero no more")
    yield
    while True:
        yield [_see(address), _see(address + PAGE)]


@kind
def huge(place: Place) -> Step:
    """Two megabytes in one page, as transparent huge pages."""
    address = _map(6 << 20, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = (address + (2 << 20) - 1) & ~((2 << 20) - 1)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 << 20), HUGEPAGE)
    _put(start, place.random.randbytes(2 << 20) if place.random.random() < 0.3 else b"only here")
    yield
    while True:
        yield [_see(start), _see(start + (1 << 20)), _mapping(start)]
