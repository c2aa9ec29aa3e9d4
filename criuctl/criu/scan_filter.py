"""Hide memory from a CRIU that dumps: it finds no pages there, and so dumps none.

CRIU asks the kernel for the pages of a process with PAGEMAP_SCAN (an ioctl of its pagemap). It runs
under a seccomp filter that hands exactly this call to us; all others go to the kernel directly. For
memory that is hidden we leave pages out of the answer, by asking the kernel ourselves for the rest.
Everything else in the images is as it would be: mappings, registers, files.

The filter is inherited by all that a process starts, so it is never used for a restore. It is set
in a thread of ours that lives only to start CRIU. If criuctl is killed, CRIU's call fails and CRIU
rolls back. If an answer of ours fails, CRIU gets an error and the dump fails: it never dumps less
than what was not hidden.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import CriuctlError
from ..proc.child import InterruptsDeferred
from ..proc.procfs import open_pidfd, read_status
from ..proc.syscalls import address_of, pidfd_getfd

_SECCOMP, _SET_FILTER, _NEW_LISTENER = 317, 1, 8
_IOCTL, _X86_64 = 16, 0xC000003E
_PAGEMAP_SCAN = 0xC0606610
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _SECOND_ARGUMENT = 0, 4, 24  # offsets in struct seccomp_data
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_PROGRAM = (
    (_LOAD, 0, 0, _ARCHITECTURE),
    (_EQUAL, 0, 5, _X86_64),
    (_LOAD, 0, 0, _NUMBER),
    (_EQUAL, 0, 3, _IOCTL),
    (_LOAD, 0, 0, _SECOND_ARGUMENT),
    (_EQUAL, 0, 1, _PAGEMAP_SCAN),
    (_RETURN, 0, 0, _NOTIFY),
    (_RETURN, 0, 0, _ALLOW),
)
_RECEIVE, _SEND, _VALID = 0xC0502100, 0xC0182101, 0x40082102
_NOTICE = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_CONTINUE = 1
_SCAN = struct.Struct("=12Q")  # struct pm_scan_arg
_FLAGS, _START, _END, _WALK_END, _VECTOR, _LENGTH, _MOST_PAGES = range(1, 8)
_REGION = struct.Struct("=3Q")  # struct page_region
_MOST = 1 << 16  # regions that are asked for at once

T = TypeVar("T")
Range = tuple[int, int]


class ScanFilter:
    """The filter of one dump's CRIU; `close` it."""

    def __init__(self) -> None:
        self.unavailable = ""  # why there is no filter, once it was tried
        self._hidden: Mapping[int, Sequence[Range]] = {}
        self._numbers: dict[int, int] | None = None  # CRIU's number of a process -> ours
        self._threads: list[threading.Thread] = []
        self._ended, self._end = os.pipe2(os.O_CLOEXEC)

    def hide(self, hidden: Mapping[int, Sequence[Range]]) -> None:
        """Hide these ascending ranges of processes, by our PIDs, from now on."""
        self._hidden, self._numbers = hidden, None

    def run(self, start: Callable[[], T]) -> T:
        """Return the result of `start`: what it starts is under the filter, if there can be one."""
        results: list[T] = []
        errors: list[BaseException] = []

        listeners: SimpleQueue[int] = SimpleQueue()

        def work() -> None:
            try:
                listeners.put(_filtered())
            except OSError as error:  # refused, or we are under such a filter ourselves
                self.unavailable = f"seccomp(2): {error.strerror}"
                listeners.put(-1)
            try:
                results.append(start())
            except BaseException as error:
                errors.append(error)

        # The thread that answers comes from this one: what the other one starts has the filter.
        server = threading.Thread(
            target=lambda: self._serve(listeners.get()), name="criuctl-scans", daemon=True
        )
        with InterruptsDeferred():
            server.start()
            self._threads.append(server)
            thread = threading.Thread(target=work, name="criuctl-start-criu")
            thread.start()
            thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """End; CRIU has ended, or its next scan fails."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1
            for thread in self._threads:
                thread.join()
            os.close(self._ended)

    def _serve(self, listener: int) -> None:
        """Answer until all processes under the filter have ended; -1: there is none."""
        if listener < 0:
            return
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(self._ended, 0)
        try:
            while True:
                events = dict(poller.poll())
                if not events.get(listener, 0) & select.POLLIN:
                    return
                notice = bytearray(_NOTICE.size)
                try:
                    fcntl.ioctl(listener, _RECEIVE, notice)
                except OSError:  # the caller was killed
                    continue
                number, tid, _flags, _nr, _arch, _ip, fd, _command, address, *_ = _NOTICE.unpack(
                    notice
                )
                try:
                    answer = self._answer(listener, number, tid, fd, address)
                except OSError as error:
                    answer = _ANSWER.pack(number, 0, -(error.errno or errno.EIO), 0)
                except Exception:
                    answer = _ANSWER.pack(number, 0, -errno.EIO, 0)
                with suppress(OSError):
                    fcntl.ioctl(listener, _SEND, bytearray(answer))
        finally:
            os.close(listener)

    def _answer(self, listener: int, number: int, tid: int, fd: int, address: int) -> bytes:
        """Return the answer to one scan by CRIU's thread `tid`."""
        onward = _ANSWER.pack(number, 0, 0, _CONTINUE)
        if not self._hidden:
            return onward
        pagemap = _borrowed(tid, fd)
        try:
            hidden = self._hidden_of(tid, pagemap)
            if not hidden:
                return onward
            memory = os.open(f"/proc/{tid}/mem", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(
                    listener, _VALID, struct.pack("=Q", number)
                )  # `tid` is still that thread
                scan = list(_SCAN.unpack(os.pread(memory, _SCAN.size, address)))
                start, end = scan[_START], scan[_END]
                if not any(low < end and start < high for low, high in hidden):
                    return onward
                if scan[_FLAGS] or scan[_MOST_PAGES]:
                    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
                count, reached = _scanned(pagemap, memory, scan, list(_left(start, end, hidden)))
                scan[_WALK_END] = reached
                os.pwrite(memory, _SCAN.pack(*scan), address)
                return _ANSWER.pack(number, count, 0, 0)
            finally:
                os.close(memory)
        finally:
            os.close(pagemap)

    def _hidden_of(self, tid: int, pagemap: int) -> Sequence[Range]:
        """Return what is hidden of the process that this pagemap belongs to."""
        if self._numbers is None:
            depth = len(read_status(tid)["NSpid"].split())
            self._numbers = {}
            for pid in self._hidden:
                with suppress(CriuctlError, IndexError):
                    self._numbers[int(read_status(pid)["NSpid"].split()[depth - 1])] = pid
        number, _, name = os.readlink(f"/proc/self/fd/{pagemap}").rpartition("/")
        number = number.rpartition("/")[2]
        if name != "pagemap" or not number.isdecimal():
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return self._hidden.get(self._numbers.get(int(number), 0), ())


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


def _filtered() -> int:
    """Put the calling thread under the filter, and return its listener."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in _PROGRAM))
    program = ctypes.create_string_buffer(struct.pack("HP", len(_PROGRAM), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    listener = libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, program)
    if listener < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.set_inheritable(int(listener), False)
    return int(listener)
