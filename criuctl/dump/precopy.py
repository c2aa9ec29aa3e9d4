"""Pre-copy: the memory of a tree is stored while the tree runs, so that little is left to do when
it is frozen.

A round reads all of the tree's memory (`criu.ahead`: no process is stopped for it) and hands it to
the writer of the coming checkpoint, which stores what the store does not have: whole windows first,
then the pages that changed (`checkpoint.layers`).  The frozen pass then reads everything once more,
for only that is of one moment, but nearly every page of it is known and dropped.  Nothing that a
round does can make a checkpoint wrong: what it stored is used if it is the same as what CRIU sends,
else it is garbage (`WriterStats.bytes_unused`).

Where the kernel knows soft-dirty pages, later rounds read the windows that were written to;
elsewhere they read and hash everything, and send on what changed.  Another round is worth it while
the one before found more than the freeze may take (`Rules.target` seconds to store it at the rate
seen so far), and as long as rounds shrink: a tree that writes faster than the store takes will not
be caught up with.  Between rounds the compression is fitted to the speed that the way to the store
was seen to have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.writer import CheckpointWriter
from ..criu.memory_ahead import Walk
from ..errors import NoSuchProcess
from ..proc.memory import soft_dirty
from ..proc.tree import read_tree
from ..report import Reporter


class Rules(Struct, frozen=True):
    """When to stop."""

    target: float = 0.3  # seconds that the frozen tree may wait for what changed to be stored
    rounds: int = 5
    seconds: float = 600.0  # for all rounds together
    # a round that finds more than this share of what the one before found is the last
    shrink: float = 0.7


class Round(Struct, frozen=True):
    """What one round came to."""

    number: int
    read: int  # bytes
    new: int  # bytes that the store did not have: all, or what changed since the round before
    stored: int  # bytes written to the store for them
    seconds: float  # until all of it was durable

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "round": self.number,
            "read": self.read,
            "new": self.new,
            "seconds": round(self.seconds, 3),
        }


def precopy(
    writer: CheckpointWriter, root: int, reporter: Reporter, *, rules: Rules | None = None
) -> list[Round]:
    """Store the memory of the tree below `root`, in rounds; everything is durable when this
    returns.

    A tree that ends meanwhile is left to whoever dumps it then.  Raises what the store raises.
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
    """Whether another round would not make the freeze noticeably shorter."""
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
