"""A program whose memory is missing at first, and which uses it in every way at random.

``python served.py SOCKET SEED STEPS``: it maps memory, registers it for missing pages, sends the
userfaultfd, waits, and then compares each page that it touches with what it must be, by a model of
its own.  It ends with 0 if all was right.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import socket
import struct
import sys
import threading
import traceback

PAGE = 4096
PAGES = 1024
_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_FORK, _REMAP, _REMOVE, _UNMAP = 1 << 1, 1 << 2, 1 << 3, 1 << 6
_MISSING = 1
_DONTNEED, _MAYMOVE, _FIXED = 4, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("mmap", "mremap"):
    getattr(_libc, _name).restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]


def content(number: int) -> bytes:
    """Page `number` of the file; every 16th is not in it, and zeros."""
    return bytes(PAGE) if number % 16 == 5 else struct.pack("<I", number + 1) * (PAGE // 4)


class Program:
    """The mapping, page by page: None (unmapped) or what it must contain."""

    def __init__(self, seed: int, pages: int = PAGES) -> None:
        self.random = random.Random(seed)
        self.start, self.size = self._map(pages), pages * PAGE
        self.model: dict[int, bytes | None] = {n: content(n) for n in range(PAGES)}
        self.moved: list[tuple[int, list[bytes | None]]] = []

    @staticmethod
    def _map(pages: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        at = _libc.mmap(None, pages * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        return int(at)

    def register(self) -> int:
        """Return a userfaultfd that reports the missing pages."""
        fd = _libc.syscall(_USERFAULTFD[os.uname().machine], os.O_CLOEXEC | os.O_NONBLOCK)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        wanted = _FORK | _REMAP | _REMOVE | _UNMAP
        fcntl.ioctl(fd, _API, bytearray(struct.pack("<3Q", 0xAA, wanted, 0)))
        argument = struct.pack("<4Q", self.start, self.size, _MISSING, 0)
        fcntl.ioctl(fd, _REGISTER, bytearray(argument))
        return int(fd)

    def run(self, steps: int) -> None:
        """Do so many random things."""
        work = [self.read, self.read, self.write, self.give_back, self.move, self.unmap]
        work += [self.protect, self.fork, self.threads]
        for _ in range(steps):
            self.random.choice(work)()

    def _run_of(self) -> tuple[int, int]:
        first = self.random.randrange(PAGES)
        return first, min(PAGES, first + self.random.choice((1, 1, 3, 17, 80)))

    def _check(self, at: int, expected: bytes, what: str) -> None:
        found = ctypes.string_at(at, PAGE)
        assert found == expected, f"{what}: {found[:8].hex()} and not {expected[:8].hex()}"

    def read(self) -> None:
        for n in range(*self._run_of()):
            if (expected := self.model[n]) is not None:
                self._check(self.start + n * PAGE, expected, f"page {n}")
        for at, pages in self.moved:
            n = self.random.randrange(len(pages))
            if (moved := pages[n]) is not None:
                self._check(at + n * PAGE, moved, f"moved page {n}")

    def write(self) -> None:
        for n in range(*self._run_of()):
            if (old := self.model[n]) is not None:
                place = self.random.randrange(PAGE)
                byte = bytes([self.random.randrange(256)])
                ctypes.memmove(self.start + n * PAGE + place, byte, 1)
                self.model[n] = old[:place] + byte + old[place + 1 :]

    def give_back(self) -> None:
        first, last = self._run_of()
        for n in range(first, last):
            if self.model[n] is not None:
                assert _libc.madvise(self.start + n * PAGE, PAGE, _DONTNEED) == 0
                self.model[n] = bytes(PAGE)

    def unmap(self) -> None:
        first, last = self._run_of()
        # Up to the first hole: moved pages or memory of Python's own may be there now.
        last = next((n for n in range(first, last) if self.model[n] is None), last)
        if self.random.random() < 0.3 and first < last:
            assert _libc.munmap(self.start + first * PAGE, (last - first) * PAGE) == 0
            self.model.update(dict.fromkeys(range(first, last), None))

    def move(self) -> None:
        first, last = self._run_of()
        if any(self.model[n] is None for n in range(first, last)) or len(self.moved) > 40:
            return
        size = (last - first) * PAGE
        to = self._map(last - first)
        at = _libc.mremap(self.start + first * PAGE, size, size, _MAYMOVE | _FIXED, to)
        if at == ctypes.c_void_p(-1).value:
            _libc.munmap(to, size)
            return  # several mappings cannot be moved at once
        self.moved.append((to, [self.model[n] for n in range(first, last)]))
        self.model.update(dict.fromkeys(range(first, last), None))

    def protect(self) -> None:
        first, last = self._run_of()
        for n in range(first, last):
            if self.model[n] is not None:
                for kind in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE):
                    assert _libc.mprotect(self.start + n * PAGE, PAGE, kind) == 0

    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                self.random.seed(self.random.random())
                for _ in range(10):
                    self.random.choice([self.read, self.write, self.give_back])()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == 0, f"a child ended with {ended}"

    def threads(self) -> None:
        """Touch the same pages from several threads at once."""
        first, last = self._run_of()
        wrong: list[str] = []

        def look() -> None:
            for n in range(first, last):
                if (expected := self.model[n]) is not None:
                    try:
                        self._check(self.start + n * PAGE, expected, f"page {n}")
                    except AssertionError as error:
                        wrong.append(str(error))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[0]


def main() -> None:
    """Run as a program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    program = Program(int(sys.argv[2]))
    fd = program.register()
    socket.send_fds(channel, [struct.pack("<Q", program.start)], [fd])
    os.close(fd)
    channel.recv(1)
    program.run(int(sys.argv[3]))
    channel.sendall(b"check")
    channel.recv(1)  # all of it was filled in
    for n, expected in program.model.items():
        if expected is not None:
            program._check(program.start + n * PAGE, expected, f"page {n}, in the end")
    for at, pages in program.moved:
        for n, moved in enumerate(pages):
            if moved is not None:
                program._check(at + n * PAGE, moved, f"moved page {n}, in the end")


if __name__ == "__main__":
    main()
