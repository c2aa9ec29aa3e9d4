"""Dispatch the other side's requests to a few threads, and its events, in order, to one thread.

Threads are started when there is work for them. They are daemons: a handler that hangs does not
keep the program from ending.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping

from .frames import ANSWER, ERROR, Broken, encode, encode_error
from .messages import Answer, Handler, Outgoing, Request, unknown_verb

_EVENTS = 1 << 16  # not handled yet; no honest side has as many
_EVENTS_SIZE = 64 << 20  # bytes of their JSON


class Dispatcher:
    """Handles requests with `serve`, at most `window` at a time; `send` takes the answers."""

    def __init__(
        self,
        serve: Handler | None,
        workers: int,
        window: int,
        send: Callable[[Outgoing], None],
        *,
        debug: bool,
    ) -> None:
        self._serve = serve or _refuse
        self._workers = workers
        self._send = send
        self._debug = debug
        self._window = window
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._under_way: set[int] = set()
        self._unsent = 0  # requests whose answers are not sent yet
        self._threads = 0
        self._free = 0
        self._work: queue.SimpleQueue[tuple[int, Request, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._events: queue.SimpleQueue[tuple[Request, int] | None] | None = None
        self._events_size = 0

    def expect(self, number: int) -> None:
        """Note that a request begins to arrive; `Broken` if it is one too many."""
        with self._lock:
            if number in self._under_way or len(self._under_way) >= self._window:
                raise Broken(f"it sends more requests at once than agreed ({self._window})")

    def ask(self, number: int, request: Request, done: Callable[[], None]) -> None:
        """Queue a request; `done` gives its body back."""
        with self._lock:
            self._under_way.add(number)
            self._unsent += 1
            if self._threads < self._workers and len(self._under_way) > self._threads:
                self._threads += 1
                threading.Thread(
                    target=self._answer, name=f"criuctl-link-worker-{self._threads}", daemon=True
                ).start()
        self._work.put((number, request, done))

    def tell(self, request: Request, size: int) -> None:
        """Queue an event of `size` bytes."""
        if self._events is None:
            self._events = queue.SimpleQueue()
            threading.Thread(
                target=self._handle_events,
                args=(self._events,),
                name="criuctl-link-events",
                daemon=True,
            ).start()
        with self._lock:
            self._events_size += size
            if self._events_size > _EVENTS_SIZE or self._events.qsize() >= _EVENTS:
                raise Broken("it sends more events than can be handled")
        self._events.put((request, size))

    def settle(self, seconds: float) -> bool:
        """Wait until every request is answered, and the answers are sent."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unsent, seconds)

    def close(self) -> None:
        """Let the threads end as soon as they have nothing to do."""
        for _ in range(self._threads):
            self._work.put(None)
        if self._events is not None:
            self._events.put(None)

    def _answer(self) -> None:
        while (item := self._work.get()) is not None:
            number, request, done = item
            try:
                views = self._views(number, request)
            except Exception as error:  # is sent to the requester
                views = encode(ERROR, number, encode_error(error, debug=self._debug))
            # First out of the set: as soon as the answer arrives, the other side may ask again.
            with self._idle:
                self._under_way.discard(number)
            self._send(Outgoing(views, done))
            del item, request, views, done
            with self._idle:
                self._unsent -= 1
                self._idle.notify_all()

    def _views(self, number: int, request: Request) -> list[memoryview]:
        answer = self._serve(request)
        if answer is None or isinstance(answer, Mapping):
            answer = Answer(answer or {})
        return encode(ANSWER, number, {"arguments": dict(answer.arguments)}, answer.body)

    def _handle_events(self, events: queue.SimpleQueue[tuple[Request, int] | None]) -> None:
        while (event := events.get()) is not None:
            with self._lock:
                self._events_size -= event[1]
            try:
                self._serve(event[0])
            except Exception:  # an event has no answer that could carry the error
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )


def _refuse(request: Request) -> None:
    if not request.event:
        raise unknown_verb(request)
