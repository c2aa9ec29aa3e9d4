"""Post-copy: the tree runs at once, and its pages follow when they are touched.

CRIU leaves pages that it marked LAZY at the dump out of a lazy restore. It registers their memory
with a userfaultfd of each process, and hands those to the server on a socket in its work folder:
as a program of its own, ``criu lazy-pages``, or as here `LazyPages`, a few threads of criuctl's
that answer page faults and put all other pages meanwhile (`criuctl.proc.arriving_pages`). The
content comes from a `PageSource`. All other pages are in the pages images as always.

The tree depends on criuctl until the last page has arrived: `finish` brings them all. A page that
never comes would be read as zeros. So after any failure the tree is ended before it can go on with
those: by the caller when `finish` raises, by a small separate process (`criuctl.proc.deathwatch`)
when criuctl is killed. It has the userfaultfds as well, so that threads that need a page wait until
the tree has ended. The checkpoint still exists.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ..errors import RestoreFailed
from ..proc import command, deathwatch
from ..proc.arriving_pages import Arrival
from ..proc.child import Child
from ..proc.syscalls import Readable
from ..proc.tree import ProcessIdentity
from .driver import folder_path
from .lazy_socket import SOCKET_NAME

_PID = struct.Struct("=i")  # negative for a zombie, which has no memory
_FINISHED = 0x52535446  # in its place: the tree is about to run
_START_TIMEOUT = 10.0  # seconds for the watcher to answer

# puts content at an address of a task, by its PID in the images
Put = Callable[[int, int, Readable], None]
# notes that so many bytes there are zeros
Skip = Callable[[int, int, int], None]


class PageSource(Protocol):
    """The pages of a tree that follow."""

    @property
    def runs(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """The addresses of each task's pages, by its PID in the images."""

    def bring(self, pid: int, address: int, put: Put) -> None:
        """Put this page, and what is stored together with it; called from several threads."""

    def fill(self, put: Put, skip: Skip) -> None:
        """Put or skip all pages."""


class LazyPages:
    """What brings the pages of one restore."""

    def __init__(self, folder: int, source: PageSource) -> None:
        """`folder`: CRIU's work folder."""
        self._folder, self._source = folder, source
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._watch: socket.socket | None = None
        self._watcher: Child | None = None
        self._arrival = Arrival(self._bring, self._hold)
        self._error: BaseException | None = None  # CRIU has not handed over all processes
        self._thread = threading.Thread(target=self._receive, name="criuctl-lazy", daemon=True)

    def __enter__(self) -> LazyPages:
        """Listen for CRIU."""
        try:
            self._listener.bind(f"{folder_path(self._folder)}/{SOCKET_NAME}")
            self._listener.listen()
            self._start_watcher()
            self._arrival.start()
            self._thread.start()
        except BaseException:  # also for a signal
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
        self._watch, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = Path(deathwatch.__file__)
            self._watcher = command.spawn(
                [sys.executable, "-I", "-S", str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                new_session=True,
            )

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
        """Bring all pages.

        Raises what went wrong: the tree must not go on then.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._source.fill(self._arrival.put, self._arrival.skip)
        self._arrival.check()
        if absent := self._arrival.absent():
            pid, home, length = absent[0]
            raise RestoreFailed(f"PID {pid}: nothing has brought {length} bytes at {home:#x}")
        self._unwatch(b"done\n")
        self._close()

    def _unwatch(self, word: bytes) -> None:
        """Send the watcher a word, or close its channel without one: then it kills."""
        watch, self._watch = self._watch, None
        if watch is not None:
            with watch, suppress(OSError):  # it was killed
                if word:
                    watch.sendall(word)
        if self._watcher is not None:
            self._watcher.wait()
            self._watcher = None

    def stop(self) -> None:
        """End the tree, if it was restored already, and all of this; for a restore that failed."""
        self._unwatch(b"")
        with suppress(OSError):  # it does not listen
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._close()

    def _close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            self._arrival.close()

    def _bring(self, pid: int, address: int) -> None:
        self._source.bring(pid, address, self._arrival.put)

    def _hold(self, fd: int) -> None:
        """Give the watcher a copy."""
        watch = self._watch
        if watch is not None:
            with suppress(OSError):  # `watched` notices it
                socket.send_fds(watch, [b"hold\n"], [fd])

    # -- what CRIU sends ---------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take the processes from CRIU, until they are about to run."""
        try:
            with self._listener.accept()[0] as criu:
                while (pid := self._number(criu)) != _FINISHED:
                    if pid >= 0:
                        self._take(criu, pid)
        except BaseException as error:  # `finish` raises it
            self._error = error

    def _number(self, criu: socket.socket) -> int:
        data = criu.recv(_PID.size, socket.MSG_WAITALL)
        if len(data) < _PID.size:
            raise RestoreFailed("CRIU has ended before its tree could run")
        return int(_PID.unpack(data)[0])

    def _take(self, criu: socket.socket, pid: int) -> None:
        _data, fds, _flags, _address = socket.recv_fds(criu, 1, 1)
        if not fds:
            raise RestoreFailed(f"PID {pid}: CRIU has sent no userfaultfd")
        self._hold(fds[0])
        self._arrival.add(fds[0], pid, self._source.runs.get(pid, ()))
