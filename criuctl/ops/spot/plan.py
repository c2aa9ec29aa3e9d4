"""The order of storing when a machine is about to be taken away, and what will not fit.

Nothing here reads a clock, a process or a store (`worth` gathers the facts), so the simulation of a
fleet uses the same rules (`scripts/spot-fleet`).

If all fits into the time that is left, the order is that of every maintenance: by falling
``order``, what is needed by others last. If it does not, value alone decides, because what is not
stored is lost: by the label ``priority``, the higher first; then by the processor time that a loss
would cost, which is the tree's share of processors times the time since its last checkpoint; then
by that time. What could not be stored within the time even alone comes last: it would only keep
others from a place.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec import Struct

SPARE = 1.2  # a dump may take this many times as long as the last one


class Worth(Struct, frozen=True):
    """One session, or configured tree, and what is at stake."""

    name: str
    order: int = 50
    priority: int = 0  # the label; higher is worth more
    cpu: float = 0.0  # processors in use, over the tree's life
    age: float = 0.0  # seconds since its last checkpoint, or since it began
    seconds: float = 1.0  # that a dump takes, by the last one

    @property
    def lost(self) -> float:
        """Return the processor seconds that are lost with it."""
        return self.cpu * self.age

    @property
    def rank(self) -> tuple[float, float, float, str]:
        """Return a key by which the most valuable one is the first."""
        return (-self.priority, -self.lost, -self.age, self.name)


class Plan(Struct, frozen=True):
    """Groups of names: those of one group are stored side by side, in this order."""

    groups: tuple[tuple[str, ...], ...]
    late: tuple[str, ...]  # what will not be stored in time, by the estimate
    needs: float  # seconds for all of it


def plan(worths: Sequence[Worth], left: float, jobs: int) -> Plan:
    """Return the order for `left` seconds, with `jobs` dumps at the same time."""
    usual = [
        sorted((w for w in worths if w.order == order), key=lambda w: w.rank)
        for order in sorted({w.order for w in worths}, reverse=True)
    ]
    needs = sum(max(_ends(group, jobs), default=0.0) for group in usual)
    if needs <= left:
        return Plan(tuple(tuple(w.name for w in group) for group in usual), (), needs)
    by_value = sorted(worths, key=lambda w: (w.seconds > left, *w.rank))
    ends = _ends(by_value, jobs)
    late = tuple(w.name for w, end in zip(by_value, ends, strict=True) if end > left)
    return Plan((tuple(w.name for w in by_value),), late, max(ends, default=0.0))


def too_slow(worths: Sequence[Worth], window: float) -> list[Worth]:
    """Return those that a notice gives no time to dump even alone, longest first."""
    return sorted((w for w in worths if w.seconds > window), key=lambda w: -w.seconds)


def _ends(worths: Sequence[Worth], jobs: int) -> list[float]:
    """Return when each is stored, if each is begun as soon as one of `jobs` places is free."""
    free = [0.0] * max(1, jobs)
    ends = []
    for w in worths:
        end = heapq.heappop(free) + w.seconds
        heapq.heappush(free, end)
        ends.append(end)
    return ends
