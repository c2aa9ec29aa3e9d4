"""The signals that end criuctl: ignored from the point of no return, restored at the end of the
dump.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers at the end, whether or not `ignore_signals` was called."""
    before = [signal.getsignal(number) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore the signals from here on: none of them stops the dump."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
