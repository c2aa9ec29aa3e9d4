"""Pre-copy: store the memory of a tree while it runs, so that little is left for the freeze.

A round reads all of the tree's memory (`criu.ahead`: no process is stopped for it) and hands it to
the writer of the coming checkpoint, which stores what the store does not have: whole windows first,
then the pages that changed (`checkpoint.layers`).  The frozen pass then reads everything once more,
because only that pass shows a single moment, but nearly every page of it is known and dropped.  A
round cannot make a checkpoint wrong: what it stored is used if it equals what CRIU sends, else it
is garbage (`WriterStats.bytes_unused`).

Where the kernel has soft-dirty bits, later rounds read the windows that were written to; elsewhere
they read and hash everything, and send on what changed.  Memory whose writes are tracked is left
out: it is read in rounds of its own (`dump.short_freeze`).  Another round is worth it while the one
before found more than the freeze may take (`Rules.target` seconds to store it at the rate seen so
far), and as long as rounds shrink: more rounds do not help with a tree that writes faster than the
store takes.  Between rounds the compression level is adjusted to the measured upload rate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.writer import CheckpointWriter
from ..criu.memory_ahead import Walk
from ..errors import NoSuchProcess
from ..proc.memory import soft_dirty
from ..proc.tree import read_tree
from ..report import Reporter
from ..tracking.rounds import Round


class Rules(Struct, frozen=True):
    """Limits that end the rounds."""

    target: float = 0.3  # seconds that the frozen tree may wait for what changed to be stored
    rounds: int = 5
    seconds: float = 600.0  # for all rounds together
    # a round that finds more than this share of the one before is the last
    shrink: float = 0.7


def precopy(
    writer: CheckpointWriter,
    root: int,
    reporter: Reporter,
    *,
    rules: Rules | None = None,
    without: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> list[Round]:
    """Store the memory of the tree below `root`, in rounds; everything is durable when this
    returns.

    `without`: by PID, private memory that is left out.  A tree that ends meanwhile is no error
    here: the dump that follows reports it.  Raises what the store raises.
    """
    rules = rules or Rules()
    deadline = time.monotonic() + rules.seconds
    track = soft_dirty()
    rounds: list[Round] = []
    while not enough(rounds, rules) and time.monotonic() < deadline:
        began = time.monotonic()
        before = replace(writer.stats)
        walk = Walk(
            writer,
            dirty_only=track and bool(rounds),
            track=track,
            going=lambda: time.monotonic() < deadline,
            without=without,
        )
        try:
            walk.tree({p.pid: p.ns_pid for p in read_tree(root) if not p.zombie})
        except NoSuchProcess:
            break
        writer.flush()
        made = Round(
            number=len(rounds) + 1,
            read=walk.bytes,
            new=writer.stats.bytes_new - before.bytes_new,
            stored=writer.stats.bytes_stored - before.bytes_stored,
            seconds=time.monotonic() - began,
        )
        rounds.append(made)
        reporter.step(
            "precopy",
            round=made.number,
            read=made.read,
            changed=made.new,
            seconds=round(made.seconds, 3),
        )
        writer.adapt(before)
    return rounds


def enough(rounds: Sequence[Round], rules: Rules) -> bool:
    """Return whether another round would not make the freeze noticeably shorter."""
    if not rounds:
        return rules.rounds <= 0
    last = rounds[-1]
    if not last.new or len(rounds) >= rules.rounds:
        return True
    if len(rounds) > 1 and last.new > rules.shrink * rounds[-2].new:
        return True
    # a round that read much and sent little was not slow at sending
    rate = max(r.new / max(r.seconds, 1e-6) for r in rounds)
    return last.new <= rules.target * rate
