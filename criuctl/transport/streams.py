"""The two byte streams of a link: read and written without ever blocking for good.

Each stream belongs to one thread, which alone uses and closes its descriptor. Both wait on a third
descriptor as well, readable once the link is over, so that neither a silent nor a full stream holds
its thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import stat
import time

_VECTORS = 1024  # Linux's IOV_MAX
_PIPE = 1 << 20  # bytes in a pipe, the limit for ordinary users
_SOCKET = 4 << 20


class Cut(Exception):
    """The stream ended, or broke."""


class Silent(Exception):
    """Nothing came for as long as the link permits."""


class Stopped(Exception):
    """The link is over."""


def prepare(fd: int) -> None:
    """Make a descriptor non-blocking, and a pipe large."""
    os.set_blocking(fd, False)
    mode = os.fstat(fd).st_mode
    with contextlib.suppress(OSError):  # small ones work, more slowly
        if stat.S_ISFIFO(mode):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)
        elif stat.S_ISSOCK(mode):
            with socket.socket(fileno=os.dup(fd)) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET)


class Stream:
    """The common part of both directions."""

    def __init__(self, fd: int, wake: int, events: int) -> None:
        self._fd = fd
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(fd, events)
        self._poll.register(wake, select.POLLIN)
        self.stopped = False

    def _ready(self, seconds: float | None) -> bool:
        """Wait until the stream is ready, `seconds` at most; `Stopped`."""
        events = self._poll.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
        if self.stopped or any(fd == self._wake for fd, _ in events):
            raise Stopped
        return bool(events)

    def close(self) -> None:
        """Close the stream; only its own thread calls this, at its end."""
        os.close(self._fd)


class Inward(Stream):
    """The receiving direction."""

    def __init__(self, fd: int, wake: int, patience: float) -> None:
        super().__init__(fd, wake, select.POLLIN)
        self.patience = patience  # seconds of permitted silence
        self.last_received = time.monotonic()  # time of the last data

    def try_some(self, view: memoryview) -> int:
        """Read available bytes into `view`; return their number, 0 for none. `Cut`, `Stopped`."""
        if self.stopped:
            raise Stopped
        try:
            count = os.readv(self._fd, [view])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Cut(error.strerror) from error
        if not count:
            raise Cut
        self.last_received = time.monotonic()
        return count

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for data, or for `seconds`; `Silent`, `Stopped`."""
        began = time.monotonic()
        while True:
            # Look once more without waiting after the time is up: we may have been stopped
            # meanwhile.
            left = self.last_received + self.patience - time.monotonic()
            if self._ready(left if seconds is None else seconds):
                return True
            if seconds is not None and time.monotonic() >= began + seconds:
                return False
            if left <= 0:
                raise Silent

    def fill(self, view: memoryview) -> None:
        """Read until `view` is full."""
        while view.nbytes:
            count = self.try_some(view)
            if not count:
                self.wait()
            view = view[count:]


class Outward(Stream):
    """The sending direction."""

    def __init__(self, fd: int, wake: int) -> None:
        super().__init__(fd, wake, select.POLLOUT)

    def send_at_once(self, views: list[memoryview]) -> None:
        """Send all of `views`, or what can be sent without waiting; also when the link is over."""
        with contextlib.suppress(OSError):
            os.writev(self._fd, views)

    def send(self, views: list[memoryview]) -> None:
        """Send all of `views`, uncopied. `Cut`, `Stopped`."""
        pending = [view for view in views if view.nbytes]
        while pending:
            try:
                written = os.writev(self._fd, pending[:_VECTORS])
            except BlockingIOError:
                self._ready(None)
                continue
            except OSError as error:
                raise Cut(error.strerror) from error
            done = 0
            while done < len(pending) and written >= pending[done].nbytes:
                written -= pending[done].nbytes
                done += 1
            del pending[:done]
            if written:
                pending[0] = pending[0][written:]
