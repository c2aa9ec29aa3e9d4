"""The holder's event loop: epoll and one-shot timers, in one thread.

A handler that raises is a bug, which must not end a session: the exception is written to stderr
(the holder's log), at most a hundred times, and the loop goes on.  A descriptor whose handler keeps
raising is no longer watched.

A holder without clients sleeps in ``epoll_wait`` without a deadline: two hundred of them cost
nothing.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_MAX_BUGS, _MAX_BUGS_OF_ONE = 100, 20
READ, WRITE, HANGUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


@dataclass(order=True, slots=True)
class Timer:
    """An action to do once, at a time of the monotonic clock."""

    due: float
    order: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        """Do not do the action."""
        self.cancelled = True


class Loop:
    """Descriptors with their handlers, and timers."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._events: dict[int, int] = {}
        self._timers: list[Timer] = []
        self._orders = itertools.count()
        self._bugs = 0
        self._bugs_of: dict[int, int] = {}
        self._soon: list[Callable[[], None]] = []
        self.running = False

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events of `fd` as they come."""
        if fd not in self._handlers:
            self._epoll.register(fd, events)
        elif self._events[fd] != events:
            self._epoll.modify(fd, events)
        self._handlers[fd], self._events[fd] = handler, events

    def unwatch(self, fd: int) -> None:
        """Watch `fd` no more; call this before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            del self._events[fd]
            with suppress(OSError):
                self._epoll.unregister(fd)

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Call `action` once, `seconds` from now."""
        timer = Timer(time.monotonic() + seconds, next(self._orders), action)
        heapq.heappush(self._timers, timer)
        return timer

    def soon(self, action: Callable[[], None]) -> None:
        """Call `action` after the handlers of this round."""
        self._soon.append(action)

    def run(self) -> None:
        """Run until `running` is set to False."""
        self.running = True
        while self.running:
            for fd, events in self._poll():
                handler = self._handlers.get(fd)
                if handler is None:
                    continue  # another handler has closed it
                try:
                    handler(events)
                except Exception:
                    self.bug()
                    self._bugs_of[fd] = self._bugs_of.get(fd, 0) + 1
                    if self._bugs_of[fd] >= _MAX_BUGS_OF_ONE:
                        self.unwatch(fd)
            while self._timers and (
                self._timers[0].cancelled or self._timers[0].due <= time.monotonic()
            ):
                timer = heapq.heappop(self._timers)
                if not timer.cancelled:
                    self._do(timer.action)
            soon, self._soon = self._soon, []
            for action in soon:
                self._do(action)

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._epoll.close()

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.bug()

    def bug(self) -> None:
        """Write the exception that is being handled to the log."""
        self._bugs += 1
        if self._bugs <= _MAX_BUGS:
            import traceback  # seldom needed

            traceback.print_exc()

    def _poll(self) -> list[tuple[int, int]]:
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        if self._soon:
            timeout = 0.0
        elif self._timers:
            timeout = max(0.0, self._timers[0].due - time.monotonic())
        else:
            timeout = -1
        return self._epoll.poll(timeout)
