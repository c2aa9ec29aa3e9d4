"""The sending half of a link: one thread writes all frames, so that frames never interleave.

An operator's interrupt (an exception in the main thread) therefore never leaves half a frame
behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from . import frames
from .messages import Outgoing
from .streams import Cut, Outward, Stopped


class Sender:
    """Writes frames to `out`, beginning with `hello`; calls `broke` when that fails."""

    def __init__(
        self, out: Outward, hello: list[memoryview], interval: float, broke: Callable[[Cut], None]
    ) -> None:
        self._out = out
        self._hello = hello
        self._interval = interval
        self._broke = broke
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._gone = threading.Condition(self._lock)  # notified when a frame is sent
        self._first: deque[Outgoing] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._sending: Outgoing | None = None
        self._ending = False  # end once all is sent
        self._ended = False  # end now
        self._farewell = ""

    def put(self, outgoing: Outgoing) -> None:
        """Queue a frame; those without a body are sent first."""
        with self._lock:
            if not self._ended:
                (self._bulk if len(outgoing.views) > 1 else self._first).append(outgoing)
                self._work.notify()
                return
        outgoing.let_go()

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Remove a frame; return whether it was removed before it began.

        Otherwise returns when it is sent, or never will be.
        """
        with self._lock:
            for line in (self._first, self._bulk):
                if outgoing in line:
                    line.remove(outgoing)
                    return True
            while self._sending is outgoing:
                self._gone.wait()
        return False

    def hurry(self, interval: float) -> None:
        """Send a ping after `interval` seconds without a frame."""
        with self._lock:
            self._interval = interval
            self._work.notify()

    def finish(self, farewell: str) -> None:
        """Send what is queued, then the frame `farewell`."""
        with self._lock:
            self._ending, self._farewell = True, farewell
            self._work.notify()

    def stop(self, farewell: str = "") -> None:
        """Send nothing more except, if possible, the frame `farewell`."""
        self._out.stopped = True
        with self._lock:
            self._ended, self._farewell = True, farewell
            waste = [*self._first, *self._bulk]
            self._first.clear()
            self._bulk.clear()
            self._work.notify()
        for outgoing in waste:
            outgoing.let_go()

    def run(self) -> None:
        """Run the thread."""
        try:
            self._out.send(self._hello)
            while (outgoing := self._next()) is not None:
                self._out.send(outgoing.views)
                outgoing.let_go()
                del outgoing
            if self._farewell:
                self._out.send_at_once(frames.encode(frames.BYE, 0, {"reason": self._farewell}))
        except Cut as cut:
            self._broke(cut)
        except Stopped:
            pass
        finally:
            with self._lock:
                self._ended, self._sending = True, None
                self._gone.notify_all()
            self._out.close()

    def _next(self) -> Outgoing | None:
        """Return the next frame, a ping after a long pause, None at the end."""
        with self._lock:
            self._sending = None
            self._gone.notify_all()
            while not (self._first or self._bulk or self._ending or self._ended):
                if not self._work.wait(self._interval):
                    self._first.append(Outgoing(frames.encode(frames.PING, 0)))
            if not self._ended and (self._first or self._bulk):
                self._sending = self._first.popleft() if self._first else self._bulk.popleft()
            return self._sending
