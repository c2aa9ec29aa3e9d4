"""Operations on several things at once, for cron and the boot: exclusive, spread over a while, and
with a deadline.

`alone` keeps two runs from overlapping, `spread` lets the hosts of a fleet begin at different
moments, and `each` does the work: every item in its own process (`criuctl.proc.forked`), some at a
time. An item that fails has an error for an outcome and the others continue. At the deadline the
items under way are interrupted as by SIGTERM, so they clean up; they and the items that were not
begun have timed out. A signal does the same to all, and is raised again.
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
_LOOK = 0.2  # seconds between two tries of a lock that is held

Work = Callable[[Reporter], dict[str, Any]]


class Outcome(Struct, frozen=True):
    """The outcome of one item: an answer or an error, never both."""

    key: str
    answer: dict[str, Any] | None = None
    error: CriuctlError | None = None
    own_error: bool = False  # the error is the item's own; otherwise it was cut off


@contextmanager
def alone(config: Config, what: str, busy: str, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock `what` on this host; if it stays held for `wait` seconds more, raise `Conflict`
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
    """Return the monotonic time that is `deadline` seconds from now; None for none."""
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
    """Do all of `work`, `jobs` at a time; yield each outcome as soon as it is known.

    `begins` is called with each item just before it is begun. `broken` is the error of one whose
    process was killed, `late` the error text of those that were not done by `until`.
    """
    pieces = [(key, piece(one, reporter, key if len(work) > 1 else "")) for key, one in work]
    for ended in forked.run_all(pieces, at_once=jobs, until=until, begins=begins):
        yield outcome_of(ended, reporter, broken=broken, late=late)


def outcome_of(
    ended: forked.Ended, reporter: Reporter, *, broken: type[CriuctlError], late: str = ""
) -> Outcome:
    """Return the outcome of a `piece` of work that has ended."""
    answer = ended.answer or {}
    if "done" in answer:
        return Outcome(ended.key, answer["done"])
    if "error" in answer:
        return Outcome(ended.key, error=decode_error(answer["error"], "this host"), own_error=True)
    if ended.late:
        hint = "Interrupted dumps were cleaned up and their trees run on; allow more time."
        return Outcome(ended.key, error=TimedOut(late, hint=hint))
    if ended.bug:
        reporter.step("bug", what=ended.key, traceback=ended.bug)
        last = ended.bug.strip().splitlines()[-1]
        error = CriuctlError(f"this is a bug in criuctl, sorry: {last}")
        error.code = "bug"
        return Outcome(ended.key, error=error)
    number = -ended.code if ended.code < 0 else ended.code - 128
    how = (
        f"was ended by signal {number}" if number > 0 else f"ended with {ended.code} and no answer"
    )
    return Outcome(ended.key, error=broken(f"the criuctl that worked on it {how}"))


def piece(work: Work, reporter: Reporter, name: str = "") -> Callable[[], dict[str, Any]]:
    """Return `work` for a process of its own; `outcome_of` reads how that has ended."""

    def run() -> dict[str, Any]:
        try:
            return {"done": work(_Named(reporter, name) if name else reporter)}
        except CriuctlError as error:
            return {"error": encode_error(error)}
        except OSError as error:
            if (known := of_the_host(error)) is None:
                raise
            return {"error": encode_error(known)}
        finally:
            reporter.close()  # this process's own: remove its progress bars from the terminal

    return run


class _Named(Reporter):
    """A reporter that names the item; the warnings it keeps are those of that item alone."""

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

    def notice(self, text: str, hint: str = "") -> None:
        self._reporter.notice(text, hint)

    def close(self) -> None:
        self._reporter.close()
