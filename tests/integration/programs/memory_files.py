"""Memory files (memfd_create) with seals, mapped in every way. Arguments: which, and for some the
descriptor of a program.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys

from animal import Check, libc, pattern, serve

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, WRITE, FUTURE, EXEC = 1, 2, 4, 8, 16, 32
ALLOW, NOEXEC_SEAL, EXECUTABLE = 2, 8, 16
PAGE = 4096
READ, EXECUTE = mmap.PROT_READ, mmap.PROT_EXEC
CONTENT = pattern(5 * PAGE, 3)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

WHICH = sys.argv[2]
files: dict[int, tuple[bytes, int]] = {}  # descriptor -> contents, seals
# address of a shared mapping, contents, whether it may become writable
shown: list[tuple[int, bytes, bool]] = []


def file(name: str, flags: int = ALLOW, content: bytes = CONTENT) -> int:
    """Make one with contents."""
    fd = os.memfd_create(name, flags | os.MFD_CLOEXEC)
    os.write(fd, content)
    files[fd] = content, 0
    return fd


def seal(fd: int, seals: int) -> None:
    """Seal it."""
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    files[fd] = files[fd][0], fcntl.fcntl(fd, F_GET_SEALS)


def show(fd: int, prot: int = READ, way: int = mmap.MAP_SHARED, *, writable: bool = False) -> int:
    """Map it whole; returns the address."""
    content = files[fd][0]
    address: int = libc.mmap(None, len(content), prot, way, fd, 0)
    assert address != ctypes.c_void_p(-1).value
    shown.append((address, content, writable))
    return address


match WHICH:
    case "write":
        fd = file("sealed")
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        show(fd)
    case "open-ended":
        fd = file("sealed")
        seal(fd, SHRINK | GROW | WRITE)
        show(fd)
        show(fd)
    case "only-write":
        fd = file("sealed")
        seal(fd, WRITE)
        show(fd)
    case "future":
        fd = file("sealed")
        show(fd, READ | mmap.PROT_WRITE, writable=True)
        show(fd, READ, writable=True)
        seal(fd, FUTURE | SEAL)
        show(fd)
    case "future-and-write":
        fd = file("sealed")
        seal(fd, FUTURE)
        show(fd)
        seal(fd, WRITE)
        show(fd)
    case "no-exec":
        fd = file("data", NOEXEC_SEAL)
        seal(fd, SHRINK)
        show(fd, READ | mmap.PROT_WRITE, writable=True)
    case "exec":
        fd = file("code", ALLOW | EXECUTABLE)
        seal(fd, EXEC)
        show(fd)
        show(fd, READ | EXECUTE)
    case "processes":
        fd = file("shared")
        seal(fd, SHRINK | GROW | WRITE)
        show(fd)
        for _ in range(2):
            if os.fork() == 0:
                show(fd)
                if _:
                    os.close(fd)
                while True:
                    os.read(os.pipe()[0], 1)
    case "private":
        fd = file("both")
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        show(fd)
        address = show(fd, READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, writable=True)
        ctypes.memmove(address, b"mine", 4)
        shown[-1] = (address, b"mine" + CONTENT[4:], True)
    case "code":
        # mov $42,%eax; ret
        fd = file("code", content=b"\xb8\x2a\x00\x00\x00\xc3".ljust(PAGE, b"\x90"))
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        show(fd, READ | EXECUTE, mmap.MAP_PRIVATE, writable=True)
        show(fd, READ | EXECUTE)
    case "holes":
        fd = file("holes", content=b"")
        os.ftruncate(fd, 1 << 30)
        os.pwrite(fd, b"end", (1 << 30) - 3)
        os.pwrite(fd, b"middle", 123 << 20)
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        shown.append(
            (libc.mmap(None, 1 << 30, READ, mmap.MAP_SHARED, fd, 0) + (123 << 20), b"middle", False)
        )
    case "unmapped":
        seal(file("whole"), SEAL | SHRINK | GROW | WRITE)
        seal(file("empty", content=b""), SHRINK | GROW | WRITE)
        seal(file("odd", content=CONTENT[:5000]), WRITE)
        file("free")
    case "reader":
        fd = file("sealed")
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        files[reader] = files.pop(fd)
        os.close(fd)
        os.lseek(reader, 77, os.SEEK_SET)
        show(reader)
    case "closed":
        fd = file("sealed")
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        show(fd)
        show(fd)
        os.close(fd)
        del files[fd]
    case "odd-size":
        fd = file("odd", content=CONTENT[:5000])
        seal(fd, SEAL | SHRINK | GROW | WRITE)
        show(fd)
    case "reading-descriptor":  # whose mappings were never writable
        fd = file("plain")
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        files[reader] = files[fd]
        show(reader)
        show(fd, READ, writable=True)


def check(found: Check) -> None:
    for fd, (content, seals) in files.items():
        found.equal(
            "contents", os.pread(fd, len(content) + 1, 0) if WHICH != "holes" else content, content
        )
        if seals or WHICH == "unmapped":
            found.equal("seals", fcntl.fcntl(fd, F_GET_SEALS), seals)
        for bit, name, act in (
            (WRITE | FUTURE, "write", lambda fd: os.pwrite(fd, b"x", 0)),
            (GROW, "grow", lambda fd: os.ftruncate(fd, os.fstat(fd).st_size + 1)),
        ):
            if seals & bit:
                try:
                    act(fd)
                    found.true(f"no {name} of what is sealed", False)
                except OSError:
                    pass
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for address, content, writable in shown:
        found.equal("mapped", ctypes.string_at(address, len(content)), content)
        page = address & -PAGE
        prot = READ | mmap.PROT_WRITE
        now = next(
            line.split()[1]
            for line in lines
            if page in range(*(int(part, 16) for part in line.split()[0].split("-")))
        )
        became = libc.mprotect(page, PAGE, prot) == 0
        found.equal(f"whether {page:x} ({now}) can be made writable", became, writable)
        libc.mprotect(
            page,
            PAGE,
            sum(bit for letter, bit in zip("rwx", (1, 2, 4), strict=True) if letter in now[:3]),
        )
    if WHICH == "code":
        for address, _, _ in shown:
            found.equal("the code", ctypes.CFUNCTYPE(ctypes.c_int)(address)(), 42)


serve(check)
