"""Post-copy: the tree runs at once, and its pages follow when they are touched.

``criu lazy-pages`` handles the page faults of the restored tree (userfaultfd) and, in the
background, moves all other pages. It asks its page server for runs of pages (GET over a socket
pair) and is answered by `LazyPages`, a thread of criuctl's, from a `PageSource`. Pages that CRIU
did not mark LAZY at the dump are in the pages images as always.

The tree depends on criuctl until the last page has arrived: `finish` waits for that. A page that
never comes would be read as zeros. So after any failure the tree is ended before it can go on with
those: by the caller when `finish` raises, by a small separate process (`criuctl.proc.deathwatch`)
when criuctl is killed. The checkpoint still exists.
"""

from __future__ import annotations

import bisect
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ..errors import RestoreFailed
from ..proc import command, deathwatch
from ..proc.child import Child, InterruptsDeferred
from ..proc.tree import ProcessIdentity
from . import features
from .binary import CriuBinary
from .driver import folder_path
from .pages import (
    ADD_F,
    CLOSE,
    FORCE_CLOSE,
    GET,
    HEADER,
    PAGE,
    PE_LAZY,
    PE_PRESENT,
    PagemapEntry,
    socket_pair,
)

_SOCKET_NAME = "lazy-pages.socket"  # CRIU's name, in its work folder
_START_TIMEOUT = 10.0  # seconds for the daemon to listen


Piece = bytes | bytearray | memoryview


class PageSource(Protocol):
    """The pages of one image, numbered as they are stored."""

    def read(self, first: int, count: int) -> list[Piece]:
        """Return pages `first` to ``first + count``, in any number of pieces."""

    def read_all(self, runs: Iterable[tuple[int, int]]) -> Iterator[Piece]:
        """Yield many such runs, (first, count), one after the other."""


class LazyImage:
    """One task's page map, to find the pages of an address."""

    def __init__(self, entries: Sequence[PagemapEntry], source: PageSource) -> None:
        self.entries = list(entries)
        self.source = source
        self._starts = [entry.vaddr for entry in self.entries]
        self._first: list[int] = []
        total = 0
        for entry in self.entries:
            self._first.append(total)
            total += entry.pages

    def run(self, vaddr: int, pages: int) -> tuple[int, list[Piece]]:
        """Return as many of `pages` pages at `vaddr` as lie in one run: (count, their content)."""
        at = bisect.bisect_right(self._starts, vaddr) - 1
        if at < 0:
            raise RestoreFailed(
                f"CRIU asked for a page at {vaddr:#x}, which the checkpoint does not have"
            )
        entry = self.entries[at]
        skipped = (vaddr - entry.vaddr) // PAGE
        count = min(pages, entry.pages - skipped)
        if count <= 0:
            raise RestoreFailed(
                f"CRIU asked for a page at {vaddr:#x}, which the checkpoint does not have"
            )
        return count, self.source.read(self._first[at] + skipped, count)

    def write_rest(self, fd: int) -> None:
        """Write the pages that are not left to page faults to the pages image `fd`."""
        with os.fdopen(os.dup(fd), "wb") as out:
            kept = [
                (first, entry.pages)
                for entry, first in zip(self.entries, self._first, strict=True)
                if not entry.flags & PE_LAZY
            ]
            for piece in self.source.read_all(kept):
                out.write(piece)


class LazyPages:
    """``criu lazy-pages`` and its page server, around one restore."""

    def __init__(
        self, criu: CriuBinary, folder: int, images: dict[int, LazyImage], enter: Sequence[str]
    ) -> None:
        self._images = images
        self._folder = folder
        self._error: BaseException | None = None
        self._watch: socket.socket | None = None
        self._watcher: Child | None = None
        self._daemon: Child | None = None
        self._sock, self._theirs = socket_pair()
        arguments = [
            "--no-default-config",
            "lazy-pages",
            "-D",
            folder_path(folder),
            "--page-server",
            "-v1",
            "-o",
            "lazy.log",
        ]
        self._criu = criu.argv
        self._argv = [*enter, *criu.argv, *arguments, "--ps-socket", str(self._theirs.fileno())]
        self._thread = threading.Thread(target=self._run, name="criuctl-lazy", daemon=True)

    def __enter__(self) -> LazyPages:
        """Start the daemon, and wait until it listens."""
        try:
            with (
                features.cache_descriptors(self._criu) as features_fds,
                self._theirs,
                InterruptsDeferred(),
            ):
                fds = [self._folder, self._theirs.fileno(), *features_fds]
                self._daemon = command.spawn(self._argv, pass_fds=fds, new_session=True)
            self._thread.start()
            self._start_watcher()
            deadline = time.monotonic() + _START_TIMEOUT
            while _SOCKET_NAME not in os.listdir(self._folder):
                if self._daemon.poll() is not None or time.monotonic() > deadline:
                    raise RestoreFailed(
                        "CRIU's lazy-pages daemon does not start", hint="Restore without --lazy."
                    )
                time.sleep(0.002)
        # also for a signal: the daemon waits for a tree and does not notice that we are gone
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.stop()

    def _start_watcher(self) -> None:
        """Start the process that ends the tree if we end early; it must be given the tree."""
        ours, theirs = socket.socketpair()
        with theirs:
            script = Path(deathwatch.__file__)
            self._watcher = command.spawn(
                [sys.executable, "-I", "-S", str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno(), self._sock.fileno()],
                new_session=True,
            )
        self._watch = ours

    def watch(self, root: ProcessIdentity) -> None:
        """Send the tree's root to the watcher; `watched` waits for its confirmation."""
        assert self._watch is not None
        with suppress(OSError):  # `watched` notices it
            self._watch.sendall(b"%d %d\n" % (root.pid, root.start_time))

    def watched(self) -> None:
        """Wait until the tree cannot outlive criuctl any more; to be called before it runs."""
        assert self._watch is not None
        self._watch.settimeout(_START_TIMEOUT)
        if self._watch.recv(16) != b"watching\n":
            raise RestoreFailed(
                "the process that guards a lazy restore does not start",
                hint="Restore without --lazy.",
            )

    def about_to_run(self) -> None:
        """Note that the tree is about to run; from now on it depends on criuctl."""

    def finish(self) -> None:
        """Wait until every page has arrived.

        Raises what went wrong: the tree must not go on then.
        """
        assert self._daemon is not None
        code = self._daemon.wait()
        self._thread.join()
        if self._error is None and code == 0:
            self._unwatch(b"done\n")
        self._sock.close()
        if self._error is not None:
            raise self._error
        if code != 0:
            raise RestoreFailed(f"CRIU's lazy-pages daemon ended with {code}")

    def _unwatch(self, word: bytes) -> None:
        """Send the watcher a word, or close its channel without one: then it kills."""
        if self._watch is not None and self._watcher is not None:
            if word:
                self._watch.sendall(word)
            self._watch.close()
            self._watcher.wait()
            self._watch = self._watcher = None

    def stop(self) -> None:
        """End the daemon, and the tree if it was restored already; for a restore that failed."""
        self._unwatch(b"")
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed by the peer
        if self._daemon is not None:
            self._daemon.end()
        if self._thread.is_alive():
            self._thread.join()
        self._sock.close()

    def _run(self) -> None:
        try:
            self._serve()
        # whatever it is (out of memory, for example), `finish` raises it: the daemon would wait
        except BaseException as error:
            self._error = error
            with suppress(OSError):  # the daemon has closed it
                self._sock.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        header = bytearray(HEADER.size)
        while self._sock.recv_into(header, 0, socket.MSG_WAITALL) == HEADER.size:
            cmd, pages, vaddr, dst = HEADER.unpack(header)
            operation = cmd & 0xFFFF
            if operation in (CLOSE, FORCE_CLOSE):
                self._sock.sendall(b"\0" * 4)
                return
            if operation != GET:
                raise RestoreFailed(f"unknown page request {cmd:#x}")
            image = self._images.get(dst)
            if image is None:
                raise RestoreFailed(f"CRIU asked for pages of an unknown image {dst:#x}")
            count, pieces = image.run(vaddr, pages)
            self._send([HEADER.pack(ADD_F | PE_PRESENT << 16, count, vaddr, dst), *pieces])

    def _send(self, pieces: list[Piece]) -> None:
        views = [memoryview(piece) for piece in pieces]
        while views:
            sent = self._sock.sendmsg(views[:64])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
