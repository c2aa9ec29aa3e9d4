"""An interrupt ends the bench where it waits, not in between: what was just started is always
known, and so ended.

An exception from a signal handler may come between the start of a process and the note of it; then
that process would not be ended, and its files would stay.  So a signal only becomes an exception
inside `waiting`, or at the next one that begins.  A second signal does not wait for that.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_waiting = 0
_asked: list[int] = []


def install() -> None:
    """Take SIGINT, SIGTERM and SIGHUP; `waiting` then ends by KeyboardInterrupt or by
    SystemExit.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _note)


@contextmanager
def waiting() -> Iterator[None]:
    """Around what only waits: here an interrupt is safe."""
    global _waiting
    _waiting += 1
    try:
        point()
        yield
    finally:
        _waiting -= 1


def point() -> None:
    """Raise what was asked for since the last wait."""
    if _asked:
        _raise(_asked.pop())


def _note(number: int, _frame: object) -> None:
    if _waiting or _asked:
        _asked.clear()
        _raise(number)
    _asked.append(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
