"""Who answers what the other side of a link asks: a few threads for requests, and one that takes events in their order.

Threads come when there is work for them.  They are daemons: what hangs in a handler does not keep the program from ending.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping

from .frames import ANSWER, ERROR, Broken, encode, encode_error
from .messages import Answer, Handler, Outgoing, Request, unknown_verb

_EVENTS = 4096  # not yet handled; no honest side has as many


class Desk:
    """Serves requests with `serve`; `send` takes the answers."""

    def __init__(self, serve: Handler | None, workers: int, send: Callable[[Outgoing], None], *, debug: bool) -> None:
        self._serve = serve or _nobody
        self._workers = workers
        self._send = send
        self._debug = debug
        self.window = 2 * workers  # requests that the other side may have under way
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._under_way: set[int] = set()
        self._threads = 0
        self._free = 0
        self._work: queue.SimpleQueue[tuple[int, Request, Callable[[], None]] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Request | None] | None = None

    def ask(self, number: int, request: Request, done: Callable[[], None]) -> None:
        """A request came; `done` gives its body back.  `Broken` if it must not have come."""
        with self._lock:
            if number in self._under_way or len(self._under_way) >= self.window:
                raise Broken(f"more is asked at once than was agreed ({self.window})")
            self._under_way.add(number)
            if self._threads < self._workers and len(self._under_way) > self._threads:
                self._threads += 1
                threading.Thread(target=self._answer, name=f"criuctl-link-worker-{self._threads}", daemon=True).start()
        self._work.put((number, request, done))

    def tell(self, request: Request) -> None:
        """An event came."""
        if self._events is None:
            self._events = queue.SimpleQueue()
            threading.Thread(target=self._hear, args=(self._events,), name="criuctl-link-events", daemon=True).start()
        if self._events.qsize() >= _EVENTS:
            raise Broken(f"more than {_EVENTS} events wait to be handled")
        self._events.put(request)

    def settle(self, seconds: float) -> bool:
        """Wait until everything is answered."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._under_way, seconds)

    def close(self) -> None:
        """Let the threads go as soon as they have nothing to do."""
        for _ in range(self._threads):
            self._work.put(None)
        if self._events is not None:
            self._events.put(None)

    def _answer(self) -> None:
        while (item := self._work.get()) is not None:
            number, request, done = item
            try:
                views = self._views(number, request)
            except Exception as error:  # travels to who asked
                views = encode(ERROR, number, encode_error(error, debug=self._debug))
            # First out of the set: as soon as the answer is there, the other side may ask again.
            with self._idle:
                self._under_way.discard(number)
            large = len(views) > 1
            self._send(Outgoing(views, large, done))
            del item, request, views, done
            with self._idle:
                self._idle.notify_all()

    def _views(self, number: int, request: Request) -> list[memoryview]:
        answer = self._serve(request)
        if answer is None or isinstance(answer, Mapping):
            answer = Answer(answer or {})
        return encode(ANSWER, number, {"arguments": dict(answer.arguments)}, answer.body)

    def _hear(self, events: queue.SimpleQueue[Request | None]) -> None:
        while (request := events.get()) is not None:
            try:
                self._serve(request)
            except Exception:  # nobody waits for an answer in which it could travel
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _nobody(request: Request) -> None:
    if not request.event:
        raise unknown_verb(request)
