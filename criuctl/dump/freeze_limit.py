"""``max_freeze``: the longest time that a dump may keep its tree frozen.

A watchdog thread waits for the deadline while the main thread works, so it does not matter what the
main thread waits for.  The clock starts when CRIU may stop the first process, or when the holder
has stopped the tree.  At the deadline the dump is undone and the tree runs on:

1. Everything that waits for the store gives up (`CheckpointWriter.give_up`), and no more pages are
   taken from CRIU, which then fails and rolls back by itself.  CRIU is never killed: it may be at
   work inside a process.
2. If CRIU waits for an answer, the main thread is interrupted, cleans up, and answers no.
3. If the main thread has not answered within `GRACE`, because it is in a system call that no signal
   interrupts (a write to a file system that hangs), the watchdog itself gives the tree back what
   was taken from it, and answers no.

`decide` is the point of no return, just before CRIU is answered yes: either the deadline has passed
before, or the dump goes on.

Limits: a step of CRIU between two messages is not interrupted; it takes milliseconds for most
trees.  After the tree runs again, the command may need longer to end: each request to an S3 store
has a deadline, and a folder on a file system that hangs has none.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..config import MAX_FREEZE, Config
from ..errors import FrozenTooLong
from ..report import Reporter

GRACE = 1.0  # seconds for the main thread to answer CRIU
_WAKE = signal.SIGURG  # ignored by default: a signal that comes late does no harm

_PHRASES = {
    "freeze": "stopping its processes",
    "frozen": "looking at it",
    "hooks-frozen": "hooks of the phase frozen",
    "pages": "taking over its memory",
    "collect": "taking over its memory",
    "describe": "storing its memory",
    "store": "storing its memory",
    "hooks-post-dump": "hooks of the phase post-dump",
    "commit": "storing the checkpoint",
    "index": "storing the checkpoint",
    "manifest": "storing the checkpoint",
    "hand-over": "the restore on the other host",
    "there": "the restore on the other host",
    "decide": "the restore on the other host",
    "kill": "ending it",
}


def allowed(config: Config, asked: float | None, kind: str) -> float:
    """Return the bound in seconds, 0 for none: `asked`, else the configuration's for this
    `kind`.
    """
    return asked if asked is not None else config.max_freeze.get(kind, MAX_FREEZE[kind])


class Interrupted(KeyboardInterrupt):
    """Interrupt the main thread at the deadline.

    It is no `CriuctlError`, so no handler of criuctl's errors catches it.
    """


class FreezeLimit:
    """The watchdog of one dump; `close` it."""

    def __init__(
        self,
        seconds: float,
        reporter: Reporter,
        *,
        break_off: Callable[[FrozenTooLong], None],
        undo: Callable[[], None],
        progress: Callable[[], str],
    ) -> None:
        """`seconds`: 0 for no bound.  The watchdog's thread calls `break_off` (1) and `undo`
        (3).
        """
        self.seconds = seconds
        self.error: FrozenTooLong | None = None  # once the time is over
        self._reporter = reporter
        self._break_off, self._undo, self._progress = break_off, undo, progress
        self._state = threading.Condition()
        self._since = 0.0
        self._running = False
        self._raises = False  # the main thread may be interrupted
        self._thread: threading.Thread | None = None
        self._before: Any = None
        if seconds and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(_WAKE, self._woken)

    def close(self) -> None:
        """Stop the clock and restore the handler of the signal."""
        self._stop()
        if self._before is not None:
            signal.signal(_WAKE, self._before)
            self._before = None

    @contextmanager
    def freeze(self, since: float = 0.0) -> Iterator[None]:
        """Stop the clock at the end of one freeze, and raise `FrozenTooLong` if it was too late.

        With `since`, a monotonic time, the tree is frozen already.
        """
        if since:
            self.start(since)
        try:
            yield
        except BaseException as error:
            self._stop()
            if self.error is not None and error is not self.error:
                raise self.error from error
            raise
        else:
            self._stop()

    def start(self, since: float = 0.0) -> None:
        """Start the clock, now or at `since`, unless it runs already."""
        if not self.seconds or self._running:
            return
        self._since, self._running = since or time.monotonic(), True
        self._thread = threading.Thread(target=self._watch, name="criuctl-freeze", daemon=True)
        self._thread.start()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the deadline interrupt the main thread inside: CRIU waits for it."""
        with self._state:
            if self.error is not None:
                raise self.error
            self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def stop_clock(self) -> None:
        """Stop the clock, or raise `FrozenTooLong` if time is already over."""
        with self._state:
            self._raises = False
            if self.error is not None:
                raise self.error
            self._running = False
            self._state.notify_all()

    def _stop(self) -> None:
        with self._state:
            self._raises = self._running = False
            self._state.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _woken(self, _number: int, _frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False  # once: the clean-up is not interrupted
            raise Interrupted(_WAKE.name)

    def _watch(self) -> None:
        with self._state:
            left = self._since + self.seconds - time.monotonic()
            if self._state.wait_for(lambda: not self._running, left):
                return
            self.error = self._describe()
        self._break_off(self.error)
        if self._before is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
        with self._state:
            if self._state.wait_for(lambda: not self._running, GRACE):
                return
        self._undo()

    def _describe(self) -> FrozenTooLong:
        """Return the error, which says what has taken longest."""
        now = time.monotonic()
        marks = [mark for mark in self._reporter.marks if mark[1] >= self._since]
        steps = [("freeze", self._since), *marks]
        ends = [*(begun for _, begun in marks), now]
        spent: dict[str, float] = {}
        for (name, begun), end in zip(steps, ends, strict=True):
            phrase = _PHRASES.get(name, name)
            spent[phrase] = spent.get(phrase, 0.0) + end - begun
        longest = max(spent, key=lambda phrase: spent[phrase])
        return FrozenTooLong(
            f"the tree was frozen for {now - self._since:.3g} s, max_freeze is {self.seconds:g} s: "
            f"{longest} took {spent[longest]:.3g} s{self._progress()}; the dump was undone",
            frozen_ms=round((now - self._since) * 1000, 1),
            max_freeze=self.seconds,
            step=steps[-1][0],
        )
