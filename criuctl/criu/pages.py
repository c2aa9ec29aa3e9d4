"""The page server: memory pages to and from CRIU over a socket pair, never through a file system.

On dump CRIU is given one end of an AF_UNIX stream pair as its page server (``ps.fd``). It splices
pages into it, each run of pages after a 32-byte header (CRIU's ``criu/page-xfer.c``).
`PageReceiver` reads the stream in a separate thread, straight into the sink's buffers, and cuts it
into *windows*: all pages of one image that lie in the same 256 KiB of address space with no gap of
`GAP` or more between them. Windows are the unit of deduplication. (Pages further apart seldom
belong to one mapping, and change for other reasons.) Because CRIU walks addresses upwards, a
window's pages arrive one after the other and need no gathering.

CRIU writes no pagemap and no pages files when it has a page server: `write_images` makes them for a
restore, from the entries recorded here.

One page per task needs care. Pages lie in the socket by reference, not as copies, and when a task's
pages are sent CRIU already runs its last system calls inside that task: for an instant the first
bytes of its first executable mapping are a ``syscall`` instruction of CRIU's. A page that was read
in that instant is read again from the frozen task (`PageGuard`).

Invariants: the sink's windows of one image come in address order; the entries and the windows of an
image describe the same pages; a status of 0 is sent to CRIU only when the sink has accepted every
page, so any error here fails the dump and lets the tree go on.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Literal, Protocol, TypeVar

from msgspec import Struct, field

from ..errors import CriuctlError
from ..proc.procfs import read_memory
from . import schema

PAGE = 4096
WINDOW = 256 * 1024
GAP = 64 * 1024  # so a window of address space makes four windows at most
HEADER = struct.Struct("<IxxxxQQQ")  # cmd, nr_pages, vaddr, dst_id
RUN_ENTRY = struct.Struct("<QII")  # vaddr, nr_pages, flags: how entries are stored

ADD, HOLE, OPEN, OPEN2, PARENT, ADD_F, GET = range(1, 8)
CLOSE, FORCE_CLOSE = 0x1023, 0x1024
PE_PARENT, PE_LAZY, PE_PRESENT = 1, 2, 4

_TASK = 1
_KINDS: dict[int, Literal["task", "shmem"]] = {1: "task", 2: "shmem"}
_SOCKET_BUFFER = 8 << 20
_INJECTED = bytes.fromhex("0f05cccccccccccc")  # compel's syscall; int3 ... on x86-64
_GUARD_TIMEOUT = 5.0  # seconds; CRIU needs microseconds


class PageProtocolError(CriuctlError):
    """CRIU's page stream is not what this version of criuctl understands."""

    code = "page-protocol"


class PageStreamCut(PageProtocolError):
    """The page stream ended in the middle of a message: CRIU has failed, and its log says why."""


class ImageKey(Struct, frozen=True):
    """One pagemap: the memory of a task, or of a shared memory object."""

    kind: Literal["task", "shmem"]
    id: int

    @property
    def pagemap_name(self) -> str:
        """CRIU's name of the pagemap image."""
        return f"pagemap-{self.id}.img" if self.kind == "task" else f"pagemap-shmem-{self.id}.img"


class PageBuffer(Protocol):
    """A reusable buffer, at least `WINDOW` long."""

    view: memoryview


B = TypeVar("B", bound=PageBuffer)


class PageSink(Protocol[B]):
    """The receiver of the pages.

    There is one: `criuctl.checkpoint.writer.CheckpointWriter`, which this package may not import.
    """

    def acquire(self) -> B:
        """Return a free buffer.

        Blocks while none is free; raises when the sink has failed.
        """

    def window(self, key: ImageKey, buffer: B, start: int, end: int, at: int) -> None:
        """Take ``buffer.view[start:end]``, the next window of the image `key`.

        `at`: the address of its first page.
        """

    def release(self, buffer: B) -> None:
        """Take the buffer back: the receiver writes no more into it."""


class PageGuard(Struct, frozen=True):
    """The page in which CRIU runs system calls inside a task.

    Our PID of the task, and the page's address.
    """

    pid: int
    vaddr: int

    def settled(self) -> bytes:
        """Return the page's true content, from the frozen task once CRIU's instruction is gone."""
        deadline = time.monotonic() + _GUARD_TIMEOUT
        while (page := read_memory(self.pid, self.vaddr, PAGE)).startswith(_INJECTED):
            if time.monotonic() > deadline:
                raise PageProtocolError(f"PID {self.pid}: CRIU's code stays at {self.vaddr:#x}")
            time.sleep(0.0002)
        return page


class PagemapEntry(Struct):
    """A run of `pages` pages at `vaddr` with CRIU's flags."""

    vaddr: int
    pages: int
    flags: int


class PageImage(Struct):
    """The shape of one image: its runs in address order, and the number of its pages."""

    key: ImageKey
    entries: list[PagemapEntry] = field(default_factory=list)
    pages: int = 0

    def add(self, vaddr: int, pages: int, flags: int) -> None:
        """Record a run; adjacent runs are joined."""
        self.pages += pages
        if self.entries:
            last = self.entries[-1]
            if last.flags == flags and last.vaddr + last.pages * PAGE == vaddr:
                last.pages += pages
                return
        self.entries.append(PagemapEntry(vaddr, pages, flags))

    def pack(self) -> bytes:
        """Return the entries as they are stored."""
        return b"".join(RUN_ENTRY.pack(e.vaddr, e.pages, e.flags) for e in self.entries)


def unpack_entries(packed: bytes) -> list[PagemapEntry]:
    """Return the entries that `PageImage.pack` packed; `ValueError` for an impossible length."""
    if len(packed) % RUN_ENTRY.size:
        raise ValueError("page entries are cut short")
    return [PagemapEntry(*entry) for entry in RUN_ENTRY.iter_unpack(packed)]


def parted(end: int, start: int) -> bool:
    """Return whether the pages at `start`, which come next, begin a new window after `end`."""
    return (end - 1) // WINDOW != start // WINDOW or start - end >= GAP


def window_sizes(entries: Iterable[PagemapEntry]) -> Iterator[int]:
    """Yield the sizes in bytes of the windows that these entries make, in order."""
    last, size = 0, 0
    for entry in entries:
        vaddr, end = entry.vaddr, entry.vaddr + entry.pages * PAGE
        while vaddr < end:
            if size and parted(last, vaddr):
                yield size
                size = 0
            step = WINDOW - vaddr % WINDOW
            step = min(end - vaddr, step)
            size += step
            vaddr += step
            last = vaddr
    if size:
        yield size


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a stream pair with large buffers: (ours, CRIU's)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        for forced, plain in ((33, socket.SO_RCVBUF), (32, socket.SO_SNDBUF)):
            try:
                end.setsockopt(socket.SOL_SOCKET, forced, _SOCKET_BUFFER)
            except PermissionError:
                end.setsockopt(socket.SOL_SOCKET, plain, _SOCKET_BUFFER)
    return ours, theirs


class PageReceiver(threading.Thread, Generic[B]):
    """Receives a whole dump's pages from `sock` into `sink`; join it with `finish`."""

    def __init__(self, sock: socket.socket, sink: PageSink[B]) -> None:
        super().__init__(name="criuctl-pages", daemon=True)
        self.images: dict[int, PageImage] = {}
        # by CRIU's PID of the task; set while the tree is frozen
        self.guards: Mapping[int, PageGuard] = {}
        self.bytes = 0
        self._sock = sock
        self._sink = sink
        self._error: BaseException | None = None
        self._complete = False
        # the window being filled: buffer[start:fill] of image `dst`
        self._buffer: B | None = None
        self._start = self._fill = 0
        self._dst = -1
        self._first = self._end = 0  # the address of its first page, and the end of its last one
        # offset in the buffer of the window's guarded page
        self._guarded: tuple[int, PageGuard] | None = None

    def run(self) -> None:
        try:
            try:
                self._serve()
            finally:
                if self._buffer is not None:
                    self._sink.release(self._buffer)
                    self._buffer = None
        except BaseException as error:  # raised by finish(); the closed socket makes CRIU give up
            self._error = error
        finally:
            self._sock.close()

    def stop(self) -> None:
        """Make CRIU and this thread give up, when the dump is not wanted any more."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already: the thread has ended

    def raise_failure(self) -> None:
        """Raise the error of this thread or its sink, if it is why CRIU failed."""
        self.join(timeout=5)
        if self._error is not None and not isinstance(self._error, ConnectionError | PageStreamCut):
            raise self._error

    def finish(self) -> list[PageImage]:
        """Wait for the stream's end and return the images; raises what went wrong meanwhile."""
        self.join()
        if self._error is not None:
            raise self._error
        if not self._complete:
            raise PageProtocolError("CRIU's page stream ended early")
        return list(self.images.values())

    def _serve(self) -> None:
        header = bytearray(HEADER.size)
        view = memoryview(header)
        have = False
        while True:
            if not have and not self._fill_exactly(view):
                return  # CRIU is gone: its own failure explains it
            have = False
            cmd, pages, vaddr, dst = HEADER.unpack(header)
            operation, flags = cmd & 0xFFFF, cmd >> 16
            if operation in (ADD_F, ADD, HOLE):
                if operation == ADD:
                    flags = PE_PRESENT
                image = self.images.get(dst)
                if image is None or not 0 < pages < 1 << 40 or vaddr % PAGE:
                    raise PageProtocolError(
                        f"unexpected page run: image {dst:#x}, {pages} pages at {vaddr:#x}"
                    )
                if operation == HOLE or not flags & PE_PRESENT:
                    raise PageProtocolError(
                        f"CRIU sent a hole at {vaddr:#x} though it was given no parent images"
                    )
                image.add(vaddr, pages, flags)
                have = self._take(dst, vaddr, pages * PAGE, view)
            elif operation in (OPEN, OPEN2):
                kind = _KINDS.get(dst & 0xFF)
                if kind is None:
                    raise PageProtocolError(f"unknown kind of page image: {dst:#x}")
                self.images.setdefault(dst, PageImage(ImageKey(kind, dst >> 8)))
                if operation == OPEN2:
                    self._sock.sendall(b"\0")
            elif operation == PARENT:
                self._sock.sendall(struct.pack("<i", 0))
            elif operation in (CLOSE, FORCE_CLOSE):
                self._end_window()
                self._sock.sendall(struct.pack("<i", 0))
                self._complete = True
                return
            else:
                raise PageProtocolError(f"unknown page server command {cmd:#x}")

    def _fill_exactly(self, view: memoryview) -> bool:
        """Read all of `view`; return False when the stream ended before its first byte."""
        got = 0
        while got < len(view):
            count = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if count == 0:
                if got:
                    raise PageStreamCut("CRIU's page stream was cut off")
                return False
            got += count
        return True

    def _take(self, dst: int, vaddr: int, length: int, header: memoryview) -> bool:
        """Read one run of `length` bytes.

        The next header is read along with its end; returns True when it was.
        """
        while length:
            if dst != self._dst or parted(self._end, vaddr):
                self._end_window()
                self._dst = dst
            buffer = self._room()
            first = WINDOW - vaddr % WINDOW
            room = len(buffer.view) - self._start
            # whole windows from here on that certainly fit, the present one counted from its start
            take = min(length, first + (room // WINDOW - 1) * WINDOW)
            target = buffer.view[self._fill : self._fill + take]
            whole = take == length
            wanted = take + (len(header) if whole else 0)
            got = self._sock.recvmsg_into(
                [target, header] if whole else [target], 0, socket.MSG_WAITALL
            )[0]
            while got < wanted:  # a signal interrupted it, or the stream ended
                rest = [target[got:], header] if got < take else [header[got - take :]]
                more = self._sock.recvmsg_into(rest if whole else rest[:1], 0, socket.MSG_WAITALL)[
                    0
                ]
                if more == 0:
                    raise PageStreamCut("CRIU's page stream was cut off")
                got += more
            self._watch(dst, vaddr, take)
            self._note(vaddr, take)
            self.bytes += take
            vaddr += take
            length -= take
        return True

    def _watch(self, dst: int, vaddr: int, length: int) -> None:
        """Remember where the guarded page of this image lies, if it is among the bytes after
        `_fill`.
        """
        guard = self.guards.get(dst >> 8) if dst & 0xFF == _TASK else None
        if guard is not None and vaddr <= guard.vaddr < vaddr + length:
            self._guarded = (self._fill + guard.vaddr - vaddr, guard)

    def _room(self) -> B:
        """Return the buffer in use, if a whole window fits after the start of this one, else a new
        one.
        """
        buffer = self._buffer
        if buffer is not None and len(buffer.view) - self._start >= WINDOW:
            return buffer
        fresh = self._sink.acquire()
        if buffer is not None:  # only at a window's start: a started window always fits, see _take
            self._sink.release(buffer)
        self._buffer = fresh
        self._start = self._fill = 0
        return fresh

    def _note(self, vaddr: int, length: int) -> None:
        """Record `length` bytes read after `_fill`, for `vaddr`.

        Pass on every window they complete.
        """
        while length:
            step = min(length, WINDOW - vaddr % WINDOW)
            if self._fill == self._start:
                self._first = vaddr
            self._fill += step
            vaddr += step
            self._end = vaddr
            length -= step
            if vaddr % WINDOW == 0:
                self._end_window()

    def _end_window(self) -> None:
        """Pass the window being filled to the sink, if it holds anything."""
        if self._buffer is not None and self._fill > self._start:
            if self._guarded is not None and self._guarded[0] < self._fill:
                (place, guard), self._guarded = self._guarded, None
                if self._buffer.view[place : place + len(_INJECTED)] == _INJECTED:
                    self._buffer.view[place : place + PAGE] = guard.settled()
            self._sink.window(
                self.images[self._dst].key, self._buffer, self._start, self._fill, self._first
            )
            self._start = self._fill


def write_pagemap(
    folder_fd: int,
    key: ImageKey,
    pages_id: int,
    entries: Iterable[PagemapEntry],
    *,
    lazy: bool = False,
) -> None:
    """Write CRIU's pagemap image for `entries`, whose pages are in ``pages-<pages_id>.img``.

    With `lazy`, pages that CRIU marked LAZY are left to the page server at restore (flags without
    PRESENT).
    """
    head, run = schema.message("PAGEMAP_HEAD"), schema.message("PAGEMAP")
    parts = [struct.pack("<II", schema.magic("IMG_COMMON"), schema.magic("PAGEMAP"))]

    def add(message: object) -> None:
        body = message.SerializeToString()  # type: ignore[attr-defined]  # generated classes have no stubs
        parts.append(struct.pack("<I", len(body)))
        parts.append(body)

    add(head(pages_id=pages_id))
    for entry in entries:
        flags = PE_LAZY if lazy and entry.flags & PE_LAZY else entry.flags
        add(
            run(
                vaddr=entry.vaddr,
                compat_nr_pages=min(entry.pages, 0xFFFFFFFF),
                nr_pages=entry.pages,
                flags=flags,
            )
        )
    fd = os.open(key.pagemap_name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=folder_fd)
    with os.fdopen(fd, "wb") as out:
        out.write(b"".join(parts))
