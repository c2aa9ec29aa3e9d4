"""The cases of the bench, in the order in which they run.

A case is a function from the bench and its options (`__main__.arguments`) to sections of the
report, one `Section` for each tree and place.  To add rows, write a module for them, which makes
its ways and bounds itself, and add a line to `CASES`:

    "forks": Case(lambda bench, asked: forks.forks(bench, asked.runs)),

`--runs` and the largest of `--sizes` are for every case; an option of its own goes into
`__main__.arguments`.  A row is made by its first sample, ``section.row(label, unit,
bound).add(way, value)``: medians, ratios to the way that the bound names, and verdicts follow
(`report`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from . import (
    cases,
    forks,
    frozen,
    lazy,
    migrations,
    screens,
    sessions,
    small,
    steps,
    storage,
    tracking,
)
from .cases import GIB, MIB, Bench
from .report import Section


@dataclass(frozen=True)
class Case:
    """What measures one case, or several together."""

    measure: Callable[[Bench, Namespace], Iterator[Section]]
    # whether it uses `Bench.places`: then every way is warmed up first
    stores: bool = False


def _largest(asked: Namespace, usual: int = GIB) -> int:
    sizes: list[int] = asked.sizes or [usual]
    return max(sizes)


def _dump_restore(bench: Bench, asked: Namespace) -> Iterator[Section]:
    shown = [case for case in ("dump", "restore") if case in asked.case]
    sizes = asked.sizes or [50 * MIB, GIB]
    return cases.dump_restore(bench, sizes, asked.processes, shown)


CASES = {
    "sessions": Case(
        lambda bench, asked: sessions.sessions(bench, asked.sessions, asked.flood, asked.watch)
    ),
    "migrate": Case(
        lambda bench, asked: migrations.migrations(
            bench, _largest(asked), scattered=asked.scattered
        )
    ),
    "store": Case(lambda bench, asked: storage.old_store(bench, *asked.simulated), stores=True),
    "steps": Case(lambda bench, _: steps.steps(bench)),
    "screens": Case(lambda bench, _: screens.screens(bench)),
    "idle": Case(lambda bench, asked: storage.idle_growth(bench, _largest(asked), asked.snapshots)),
    "dump": Case(_dump_restore, stores=True),
    "restore": Case(_dump_restore, stores=True),
    "precopy": Case(
        lambda bench, asked: cases.precopy(bench, asked.sizes or [GIB], asked.processes[:1]),
        stores=True,
    ),
    "increment": Case(
        lambda bench, asked: cases.increment(bench, asked.sizes or [GIB], asked.processes),
        stores=True,
    ),
    "tracked": Case(
        lambda bench, asked: tracking.tracked(bench, asked.sizes or [GIB]), stores=True
    ),
    "frozen": Case(
        lambda bench, asked: frozen.frozen(bench, _largest(asked, 8 * GIB)), stores=True
    ),
    "lazy": Case(lambda bench, asked: lazy.lazy(bench, _largest(asked, 4 * GIB)), stores=True),
    "forks": Case(lambda bench, _: forks.forks(bench)),
    "fixed": Case(lambda bench, _: cases.fixed(bench), stores=True),
    "small": Case(lambda bench, asked: small.small(bench, asked.former), stores=True),
    "list": Case(lambda bench, _: cases.listing(bench), stores=True),
    "rss": Case(
        lambda bench, asked: cases.peak_memory(bench, asked.sizes or [4 * GIB]), stores=True
    ),
}


def stores(names: Sequence[str]) -> bool:
    """Return whether one of these cases uses places to store to."""
    return any(CASES[name].stores for name in names)


def measure(bench: Bench, asked: Namespace) -> Iterator[Section]:
    """Yield the sections of the cases that are asked for."""
    warm = False
    # a function that measures several of them runs once
    wanted = dict.fromkeys(case for name, case in CASES.items() if name in asked.case)
    for case in wanted:
        if case.stores and not warm:
            cases.warm_up(bench)
            warm = True
        yield from case.measure(bench, asked)
