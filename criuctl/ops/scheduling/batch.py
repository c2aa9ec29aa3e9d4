"""Operations on several things at once, as cron and a boot call them: alone, spread over a while,
and with an end.

`alone` keeps two runs from overlapping, `spread` lets the hosts of a fleet begin at different
moments, and `each` does the work: every piece in a process of its own (`criuctl.proc.forked`), some
at a time.  A piece that fails has an error for an outcome and the others go on.  What is under way
at the deadline is interrupted the way SIGTERM would do it, so it cleans up; it and what was not
begun by then have timed out.  A signal does the same to all, and is passed on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from ...config import Config
from ...errors import Conflict, CriuctlError, TimedOut, of_the_host
from ...host.registry import exclusive
from ...proc import forked
from ...report import Reporter
from ...transport.frames import decode_error, encode_error

JOBS = 2  # at once; each needs `buffers_mib` and compresses with all cores
_LOOK = 0.2  # seconds between two looks at a lock that somebody has

Work = Callable[[Reporter], dict[str, Any]]


class Outcome(Struct, frozen=True):
    """What became of one piece: an answer or an error, never both."""

    key: str
    answer: dict[str, Any] | None = None
    error: CriuctlError | None = None
    told: bool = False  # the error is the piece's own; else it was cut off


@contextmanager
def alone(config: Config, what: str, busy: str, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock `what` on this host; when somebody has it for `wait` seconds more, `Conflict`
    with the sentence `busy`.
    """
    until = time.monotonic() + wait
    while True:
        lock = exclusive(config, what, busy)
        try:
            lock.__enter__()
            break
        except Conflict:
            if (left := until - time.monotonic()) <= 0:
                raise
            time.sleep(min(_LOOK, left))
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def spread(jitter: float) -> None:
    """Wait for a random part of `jitter` seconds."""
    if jitter:
        time.sleep(random.uniform(0, jitter))  # noqa: S311  # spreads load, keeps no secret


def ends_at(deadline: float) -> float | None:
    """The monotonic time that is `deadline` seconds from now; None for none."""
    return time.monotonic() + deadline if deadline else None


def each(
    work: Sequence[tuple[str, Work]],
    *,
    reporter: Reporter,
    jobs: int = JOBS,
    until: float | None = None,
    broken: type[CriuctlError] = CriuctlError,
    late: str = "the deadline has passed",
    begins: Callable[[str], object] = lambda _key: None,
) -> Iterator[Outcome]:
    """Do all of `work`, `jobs` at a time; each outcome is yielded as soon as it is known.

    `begins` is told of each piece just before it is begun.  `broken` is the error of one whose
    process was killed, `late` what is said of those that were not done by `until`.
    """
    pieces = [(key, _piece(one, reporter, key if len(work) > 1 else "")) for key, one in work]
    for ended in forked.run_all(pieces, at_once=jobs, until=until, begins=begins):
        answer = ended.answer or {}
        if "done" in answer:
            yield Outcome(ended.key, answer["done"])
        elif "error" in answer:
            yield Outcome(ended.key, error=decode_error(answer["error"], "this host"), told=True)
        elif ended.late:
            error: CriuctlError = TimedOut(
                late, hint="What was under way was cleaned up and runs on; give it more time."
            )
            yield Outcome(ended.key, error=error)
        elif ended.bug:
            reporter.step("bug", what=ended.key, traceback=ended.bug)
            error = CriuctlError(
                f"this is a bug in criuctl, sorry: {ended.bug.strip().splitlines()[-1]}"
            )
            error.code = "bug"
            yield Outcome(ended.key, error=error)
        else:
            number = -ended.code if ended.code < 0 else ended.code - 128
            how = (
                f"was ended by signal {number}"
                if number > 0
                else f"ended with {ended.code} and no answer"
            )
            yield Outcome(ended.key, error=broken(f"the criuctl that worked on it {how}"))


def _piece(work: Work, reporter: Reporter, name: str) -> Callable[[], dict[str, Any]]:
    def piece() -> dict[str, Any]:
        try:
            return {"done": work(_Named(reporter, name) if name else reporter)}
        except CriuctlError as error:
            return {"error": encode_error(error)}
        except OSError as error:
            if (told := of_the_host(error)) is None:
                raise
            return {"error": encode_error(told)}
        finally:
            reporter.close()  # ours, of this process: what it has drawn is off the terminal

    return piece


class _Named(Reporter):
    """Tells of which of several things it is told; the warnings it keeps are of that one alone."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        super().__init__()
        self._reporter, self._name = reporter, name

    def step(self, name: str, **facts: Any) -> None:
        self.at(name)
        self._reporter.step(name, of=self._name, **facts)

    def progress(self, name: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        self._reporter.progress(name, done, total, unit)

    def warning(self, text: str, hint: str = "") -> None:
        super().warning(text, hint)
        self._reporter.warning(f"{self._name}: {text}", hint)

    def close(self) -> None:
        self._reporter.close()
