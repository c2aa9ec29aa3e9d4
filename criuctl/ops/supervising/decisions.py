"""The decisions of a supervisor: when to take a snapshot, when to try again, when to stop, and
which lease has expired.

Nothing here reads a clock, a store or a process: every moment is an argument, in seconds of one
monotonic clock, so each rule can be tested by itself. `criuctl.ops.supervise` is the caller.

    Schedule    a snapshot each period, begun so early that it is stored by the end of it, or once
                the terminal is idle or a shell has come to its prompt again; after a failure again
                soon, then at growing distances; and whether more would be lost by now than allowed
    Guard       a restore that fails, or that dies again soon, counts; each that counts makes the
                next wait longer, and after a number of them in a row there is no next one
    LeaseWatch  a lease has expired when, over its time to live, it was read again and again and
                never changed
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from ...checkpoint.leases import Head

Restart = Literal["on-failure", "always", "never"]
Reason = Literal["period", "idle", "step", "again", "asked"]

# seconds after the newest snapshot before one by idleness, by step, or after a failure, at least
GAP = 1.0
_RETRY_CEILING = 60.0
_SPARE = 1.5  # the next snapshot may take this many times as long as the last one
PERIOD = 60.0  # seconds, the default


def period(every: float, *, terminal: bool, max_loss: float) -> float:
    """Return the seconds between snapshots: as requested, otherwise as the allowed loss needs,
    otherwise none if the `terminal` is watched.
    """
    if every:
        return every
    if max_loss:
        return min(PERIOD, max_loss / 2)
    return 0.0 if terminal else PERIOD


class Schedule(Struct):
    """When the next snapshot is due; 0 is never, for each of `every`, `idle` and `max_loss`."""

    every: float
    idle: float = 0.0
    step: bool = False
    max_loss: float = 0.0
    _last: float = 0.0  # when the newest checkpoint was taken
    _next: float = 0.0
    _lead: float = 0.0  # a snapshot is begun so long before the end of a period
    _again: float | None = None  # when to try again after a failure
    _failures: int = 0
    _offset: int = -1  # of the terminal's output
    _since: float = 0.0  # when it reached that offset
    _stored: int = -1  # the offset at the newest checkpoint

    def begin(self, now: float, age: float | None) -> None:
        """Begin, or begin again; `age` is that of the newest checkpoint, None: there is none and
        one is due at once.
        """
        known = max(age, 0.0) if age is not None else 0.0
        self._last = now - known
        self._next = now + max(0.0, self.every - self._lead - known) if age is not None else now
        self._again, self._failures, self._offset, self._stored = None, 0, -1, -1
        if age is None and not self.every:
            self._again = now

    def taken(self, began: float, now: float) -> None:
        """Record that a snapshot that was begun at `began` is stored; after a long one the tree
        gets as much time, or a period.
        """
        self._last = began
        self._lead = min(self.every / 2, _SPARE * (now - began))
        self._next = max(began + self.every - self._lead, now + min(self.every, now - began))
        self._again, self._failures, self._stored = None, 0, self._offset

    def failed(self, now: float) -> None:
        """Record that a snapshot failed."""
        self._failures += 1
        ceiling = min(max(self.every, GAP), _RETRY_CEILING) if self.every else _RETRY_CEILING
        self._again = now + min(ceiling, GAP * 2 ** min(self._failures - 1, 16))

    def seen(self, now: float, offset: int, *, at_prompt: bool = False) -> Reason | None:
        """Return whether a snapshot is due because the terminal's output is at `offset`."""
        if offset != self._offset:
            first = self._offset < 0
            self._offset, self._since = offset, now
            if first and self._stored < 0:
                # the output before the start is in the newest checkpoint, or in the first one
                self._stored = offset
        if self._offset == self._stored or self._again is not None or now - self._last < GAP:
            return None
        if self.step and at_prompt:
            return "step"
        return "idle" if self.idle and now - self._since >= self.idle else None

    def due(self, now: float) -> Reason | None:
        """Return whether a snapshot is due by time."""
        if self._again is not None:
            return "again" if now >= self._again else None
        return "period" if self.every and now >= self._next else None

    def wait(self, now: float) -> float | None:
        """Return the seconds until `due` may be true; None: never by time alone."""
        at = self._again if self._again is not None else self._next if self.every else None
        return None if at is None else max(0.0, at - now)

    @property
    def failures(self) -> int:
        """Return how many snapshots failed in a row."""
        return self._failures

    def loss(self, now: float) -> float:
        """Return the seconds that would be lost if the tree died now."""
        return now - self._last

    def at_risk(self, now: float) -> bool:
        """Return whether that is more than allowed."""
        return self.max_loss > 0 and self.loss(now) > self.max_loss


class Guard(Struct):
    """Limits the restores of a session that does not survive."""

    limit: int  # restores in a row that fail or die again, after which it gives up
    stable: float  # seconds that a restored tree must live to count as well
    first: float  # seconds before the second try; twice as long before each further one
    ceiling: float
    failures: int = 0
    _restored: float | None = None

    def restored(self, now: float) -> None:
        """Record that the tree runs again."""
        self._restored = now

    def failed(self) -> None:
        """Record that a restore failed."""
        self.failures += 1
        self._restored = None

    def died(self, now: float) -> None:
        """Record that the tree has died, soon after a restore or later."""
        soon = self._restored is not None and now - self._restored < self.stable
        self.failures = self.failures + 1 if soon else 0
        self._restored = None

    @property
    def exhausted(self) -> bool:
        """Return whether there is no further try."""
        return self.failures >= self.limit

    def delay(self) -> float:
        """Return the seconds to wait before the next try; the first is made at once."""
        return (
            0.0
            if not self.failures
            else min(self.ceiling, self.first * 2 ** min(self.failures - 1, 32))
        )


class LeaseWatch(Struct):
    """Another host's lease, watched from here, by this host's clock.

    A look that failed, or that comes late, makes the time count from the next one: a watcher that
    was asleep, or as cut off from the store as the home may have been, cannot conclude that nothing
    has happened.
    """

    seen: Head | None = None
    since: float = 0.0
    _looked: float = field(default=0.0)

    def look(self, now: float, head: Head | None) -> bool:
        """Return whether the lease has expired. `head` is the lease now, None if there is none or
        the store did not answer.
        """
        if head is None or head.state != "held" or not head.ttl:
            self.seen = None
            return False
        if (
            self.seen is None
            or not head.is_beat_of(self.seen)
            or now - self._looked > head.ttl / 2000
        ):
            self.since = now
        self.seen, self._looked = head, now
        return now - self.since > head.ttl / 1000

    def pause(self, usual: float) -> float:
        """Return the seconds until the next look: several times in the time to live."""
        return max(0.02, min(usual, self.seen.ttl / 8000)) if self.seen is not None else usual


class End(Struct, frozen=True):
    """How a tree has ended."""

    code: int | None = None  # None: it was killed, or the code is unknown
    signal: int | None = None

    @property
    def text(self) -> str:
        """Return the end in words."""
        if self.signal is not None:
            return f"was killed by signal {self.signal}"
        return (
            "ended, its exit status is unknown"
            if self.code is None
            else f"ended with exit code {self.code}"
        )

    def restarts(self, policy: Restart) -> bool:
        """Return whether it is to be restored: always, if it has not ended by itself."""
        if self.code is None:
            return True
        return policy == "always" or (policy == "on-failure" and self.code != 0)
