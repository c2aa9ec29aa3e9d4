"""Work in threads: one function for many items at once, or a queue of work next to the caller.

``concurrent.futures`` can do both, but loading it (with ``logging``, which it loads) would cost
every command that stores something as much time as all of its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


class Later(Generic[R]):
    """The result of a piece of work, available once it is done."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: R | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work."""
        try:
            self._result = self._work()
        except BaseException as error:  # raised again in result()
            self._error = error
        finally:
            self._done.set()

    def result(self) -> R:
        """Wait for the result; raises what the work raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return cast("R", self._result)


class WorkerThread:
    """A thread that does its work in order; all of it is done when the block is left."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Later[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._work.put(None)
        self._thread.join()

    def do(self, work: Callable[[], R]) -> Later[R]:
        """Queue this work for the thread."""
        later = Later(work)
        self._work.put(later)
        return later

    def _run(self) -> None:
        while (later := self._work.get()) is not None:
            later.run()


def in_parallel(work: Callable[[T], R], items: Iterable[T], threads: int, name: str) -> list[R]:
    """Return the results of `work` for each of `items`, in their order.

    At most `threads` threads do it, the caller's among them. The first error ends it, once all have
    stopped. Where no more threads can be started, the existing ones do all the work.
    """
    waiting = list(items)
    found: list[Any] = [None] * len(waiting)
    numbers = iter(range(len(waiting)))
    errors: list[BaseException] = []
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                number = None if errors else next(numbers, None)
            if number is None:
                return
            try:
                found[number] = work(waiting[number])
            except BaseException as error:
                errors.append(error)

    helpers = [
        threading.Thread(target=run, name=f"{name}-{n}", daemon=True)
        for n in range(1, min(threads, len(waiting)))
    ]
    try:
        with suppress(RuntimeError):
            for helper in helpers:
                helper.start()
        run()
    except BaseException as error:  # an interrupt, between two pieces
        errors.append(error)
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    if errors:
        raise errors[0]
    return found


def side_by_side(name: str, *pieces: Callable[[], Any]) -> list[Any]:
    """Do several pieces of work, each in a thread; return their results in order.

    Errors as those of `in_parallel`.
    """
    return in_parallel(lambda piece: piece(), pieces, len(pieces), name)
