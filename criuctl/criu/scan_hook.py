"""Hide memory from a CRIU that dumps: it finds no pages there, and so dumps none.

CRIU asks the kernel for the pages of a process with PAGEMAP_SCAN (an ioctl of its pagemap). Before
it touches the tree, its pointer to the C library's ioctl() is set to a few instructions of ours:
they hand exactly this call over a socket to us, and all others to the C library. For memory that is
hidden we leave pages out of the answer, by asking the kernel ourselves for the rest. Everything
else in the images is as it would be: mappings, registers, files.

If criuctl is killed, CRIU's call fails and CRIU rolls back. If an answer of ours fails, CRIU gets
an error and the dump fails: it never dumps less than what was not hidden.

A seccomp filter on CRIU could do the same, but under one CRIU cannot dump a process that has a
filter itself, as most sessions have (PTRACE_O_SUSPEND_SECCOMP is refused then).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import CriuctlError
from ..proc import inject
from ..proc.mappings import Mapping as Mapped
from ..proc.mappings import mappings
from ..proc.procfs import open_pidfd, read_status
from ..proc.syscalls import address_of, pidfd_getfd
from . import call_table

_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("=12Q")  # struct pm_scan_arg
_FLAGS, _START, _END, _WALK_END, _VECTOR, _LENGTH, _MOST_PAGES = range(1, 8)
_REGION = struct.Struct("=3Q")  # struct page_region
_MOST = 1 << 16  # regions that are asked for at once
_CALL = struct.Struct("=QQQ")  # the third, second and first argument
_ANSWER = struct.Struct("=q")
_ONWARD, _FAILED = -4096, -1
_LIBC = ("libc.so.", "libc-")
_MMAP, _READ_EXECUTE, _PRIVATE_ANONYMOUS, _PAGE = 9, 5, 0x22, 4096

Range = tuple[int, int]


class ScanHook:
    """The hook in one dump's CRIU; `close` it."""

    def __init__(self) -> None:
        self.unavailable = "CRIU was not reached"  # why there is no hook
        self._hidden: Mapping[int, Sequence[Range]] = {}
        self._numbers: dict[int, int] | None = None  # CRIU's number of a process -> ours
        # where anything is hidden, in whichever process
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._criu = 0
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def hide(self, hidden: Mapping[int, Sequence[Range]]) -> None:
        """Hide these ascending ranges of processes, by our PIDs, from now on."""
        self._hidden, self._numbers = hidden, None
        self._starts, self._ends = _united(hidden)

    def descriptor(self) -> int:
        """Return the end of a new socket for the next CRIU to inherit."""
        self._end()
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return self._theirs.fileno()

    def attach(self, pid: int, name: str) -> None:
        """Hook into CRIU, which waits for us and has not touched the tree: `pid`, or a child of
        it, whose program file is called `name`.

        Where that is impossible, `unavailable` says why.
        """
        assert self._ours is not None and self._theirs is not None
        number = self._theirs.fileno()
        self._theirs.close()  # the conversation must end when CRIU does
        try:
            self._criu, place, original = _found(pid, name)
            _set(self._criu, place, _code(number, original))
        except (OSError, CriuctlError, ValueError) as error:
            self.unavailable = f"CRIU cannot be hooked: {error}"
            return
        self.unavailable = ""
        self._thread = threading.Thread(
            target=self._serve, args=(self._ours,), name="criuctl-scans", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End; CRIU has ended, or its next scan fails."""
        self._end()

    def _end(self) -> None:
        for end in (self._ours, self._theirs):
            if end is not None:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for end in (self._ours, self._theirs):
            if end is not None:
                end.close()
        self._ours = self._theirs = None

    def _serve(self, ours: socket.socket) -> None:
        """Answer until CRIU has ended."""
        with suppress(OSError):
            while message := ours.recv(_CALL.size + 1):
                try:
                    address, _command, fd = _CALL.unpack(message)
                    answer = self._answer(fd & 0xFFFFFFFF, address)  # an int in a register
                except Exception:  # CRIU fails, and the dump with it
                    answer = _FAILED
                ours.sendall(_ANSWER.pack(answer))

    def _answer(self, fd: int, address: int) -> int:
        """Return the answer to one scan by CRIU."""
        if not self._hidden:
            return _ONWARD
        memory = os.open(f"/proc/{self._criu}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            scan = list(_SCAN.unpack(os.pread(memory, _SCAN.size, address)))
            start, end = scan[_START], scan[_END]
            # most scans are of libraries: whose they are need not be known
            if bisect_right(self._ends, start) == bisect_left(self._starts, end):
                return _ONWARD
            pagemap = _borrowed(self._criu, fd)
            try:
                hidden = self._hidden_of(pagemap)
                if not any(low < end and start < high for low, high in hidden):
                    return _ONWARD
                if scan[_FLAGS] or scan[_MOST_PAGES]:
                    return _FAILED
                count, reached = _scanned(pagemap, memory, scan, list(_left(start, end, hidden)))
                scan[_WALK_END] = reached
                os.pwrite(memory, _SCAN.pack(*scan), address)
                return count
            finally:
                os.close(pagemap)
        finally:
            os.close(memory)

    def _hidden_of(self, pagemap: int) -> Sequence[Range]:
        """Return what is hidden of the process that this pagemap belongs to."""
        if self._numbers is None:
            depth = len(read_status(self._criu)["NSpid"].split())
            self._numbers = {}
            for pid in self._hidden:
                with suppress(CriuctlError, IndexError):
                    self._numbers[int(read_status(pid)["NSpid"].split()[depth - 1])] = pid
        number, _, name = os.readlink(f"/proc/self/fd/{pagemap}").rpartition("/")
        number = number.rpartition("/")[2]
        if name != "pagemap" or not number.isdecimal():
            raise ValueError(f"not a pagemap: {name}")
        return self._hidden.get(self._numbers.get(int(number), 0), ())


def _united(hidden: Mapping[int, Sequence[Range]]) -> tuple[list[int], list[int]]:
    """Return the starts and the ends of the ranges of all processes, those that overlap or touch
    as one.
    """
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted({part for ranges in hidden.values() for part in ranges}):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


def _borrowed(tid: int, fd: int) -> int:
    pidfd = open_pidfd(tid)
    try:
        return pidfd_getfd(pidfd, fd)
    finally:
        os.close(pidfd)


def _left(start: int, end: int, hidden: Sequence[Range]) -> Iterator[Range]:
    """Yield the parts of a range that are not hidden."""
    for low, high in hidden:
        if high <= start:
            continue
        if low >= end:
            break
        if start < low:
            yield start, low
        start = high
    if start < end:
        yield start, end


def _scanned(pagemap: int, memory: int, scan: list[Any], parts: list[Range]) -> tuple[int, int]:
    """Scan these parts in CRIU's stead, into its vector; return the number of regions, and the
    address that was reached.
    """
    count, length = 0, scan[_LENGTH]
    regions = bytearray(min(length, _MOST) * _REGION.size)
    for start, end in parts:
        while start < end:
            if count == length:
                return count, start
            own = list(scan)
            own[_START], own[_END], own[_WALK_END] = start, end, 0
            own[_VECTOR], own[_LENGTH] = address_of(regions), min(length - count, _MOST)
            arguments = bytearray(_SCAN.pack(*own))
            found = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, arguments, True)
            os.pwrite(
                memory,
                memoryview(regions)[: found * _REGION.size],
                scan[_VECTOR] + count * _REGION.size,
            )
            count += found
            # The kernel's own "walk_end" may lie before regions that it has returned.
            if found < own[_LENGTH]:
                break
            start = _REGION.unpack_from(regions, (found - 1) * _REGION.size)[1]
    return count, scan[_END]


def _found(pid: int, name: str) -> tuple[int, int, int]:
    """Return CRIU's PID, the address of its pointer to ioctl(), and that of ioctl() itself."""
    for candidate in _family(pid):
        mapped = mappings(candidate)
        program = next((m for m in mapped if os.path.basename(m.path) == name), None)
        library = next((m for m in mapped if os.path.basename(m.path).startswith(_LIBC)), None)
        if program is not None and library is not None:
            place = program.start + call_table.slot(_content(candidate, program), "ioctl")
            # The pointer itself may wait for its first use to be set.
            original = library.start + call_table.function(_content(candidate, library), "ioctl")
            return candidate, place, original
    raise ValueError("its program was not found")


def _content(pid: int, mapped: Mapped) -> bytes:
    with open(f"/proc/{pid}/map_files/{mapped.start:x}-{mapped.end:x}", "rb") as file:
        return file.read()


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as children:
        for child in children.read().split():
            yield from _family(int(child))


def _set(pid: int, place: int, code: bytes) -> None:
    """Put the code into the process, and let the pointer at `place` point to it."""
    with inject.stopped(pid):
        address = inject.call(pid, _MMAP, 0, _PAGE, _READ_EXECUTE, _PRIVATE_ANONYMOUS, -1, 0)
        if address < 0:
            raise OSError(-address, os.strerror(-address))
        inject.write_memory(pid, address, code)
        inject.write_memory(pid, place, struct.pack("=Q", address))


def _code(fd: int, original: int) -> bytes:
    """Return the function that is called instead of ioctl() (x86-64).

    It sends the arguments of PAGEMAP_SCAN to descriptor `fd` and returns the answer; all else, and
    what the answer says, goes on to `original`.
    """
    number = struct.pack("<i", fd)
    ask = (
        b"\x57\x56\x52"  # push rdi, rsi, rdx
        b"\xb8\x2c\x00\x00\x00\xbf" + number + b"\x48\x89\xe6"  # sendto(fd, rsp,
        b"\xba\x18\x00\x00\x00\x41\xba\x00\x40\x00\x00"  # 24, MSG_NOSIGNAL,
        b"\x45\x31\xc0\x45\x31\xc9\x0f\x05"  # 0, 0)
        b"\x6a\x00"  # push 0
    )
    receive = b"\x31\xc0\xbf" + number + b"\x48\x89\xe6\xba\x08\x00\x00\x00\x0f\x05"  # read
    receive += b"\x48\x83\xf8\xfc"  # cmp rax, -EINTR
    receive += b"\x74" + struct.pack("<b", -(len(receive) + 2))  # je: read again
    failed = b"\x48\xc7\xc0\xff\xff\xff\xff\xc3"  # return -1
    decide = (
        b"\x48\x3d"
        + struct.pack("<i", _ONWARD)  # cmp rax, ONWARD
        + b"\x74"
        + struct.pack("<b", 1 + len(failed))  # je original
        + b"\xc3"  # ret
    )
    answer = b"\x48\x89\xc1\x58\x5a\x5e\x5f\x48\x83\xf9\x08"  # pop all; cmp rcx, 8
    answer += b"\x75" + struct.pack("<b", len(decide))  # jne failed
    asked = ask + receive + answer + decide + failed
    first = b"\x81\xfe" + struct.pack("<I", _PAGEMAP_SCAN)  # cmp esi, PAGEMAP_SCAN
    first += b"\x75" + struct.pack("<b", len(asked))  # jne original
    return first + asked + b"\x49\xbb" + struct.pack("<Q", original) + b"\x41\xff\xe3"
