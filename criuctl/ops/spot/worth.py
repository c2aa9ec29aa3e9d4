"""What is at stake on this host: what each tree has done since its last checkpoint, and how long
its dump takes.

Everything is known already: CPU time from /proc, the last checkpoint from what this host noted of
it (`criuctl.host.latest_checkpoints`), the time that a dump took from the event log. A tree that
was never dumped is estimated by its memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from ...config import Config
from ...host import latest_checkpoints
from ...host.journal.event_log import EventLog
from ...proc import usage
from ..scheduling.subjects import Subject
from .plan import SPARE, Worth

_DUMPS = ("dump", "snapshot")
_START = 1.0  # seconds of a dump besides its memory
_SPEED = 100 << 20  # bytes of memory a second that a first dump stores, at least


def worths(config: Config, subjects: Iterable[Subject]) -> list[Worth]:
    """Return what is known of each of these that runs."""
    found = [s for s in subjects if s.root is not None]
    took = last_seconds(config)
    trees = usage.of_trees([s.root.pid for s in found if s.root is not None])
    now = time.time()
    return [_worth(config, s, trees, took.get(s.name), now) for s in found]


def _worth(
    config: Config,
    subject: Subject,
    trees: Mapping[int, usage.Usage],
    took: float | None,
    now: float,
) -> Worth:
    assert subject.root is not None
    used = trees.get(subject.root.pid, usage.Usage(0.0, 0, 0))
    began = subject.root.start_time / os.sysconf("SC_CLK_TCK")
    life = max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.001)
    known = latest_checkpoints.known(config, subject.name)
    made = latest_checkpoints.moment(known.created) if known is not None else None
    return Worth(
        subject.name,
        subject.order,
        priority_of(subject.labels),
        cpu=used.cpu / life,
        age=max(0.0, min(life, now - made) if made is not None else life),
        seconds=took * SPARE if took is not None else _START + used.memory / _SPEED,
    )


def priority_of(labels: Mapping[str, str]) -> int:
    """Return the label ``priority`` as a number; an invalid one is ignored."""
    try:
        return int(labels.get("priority", 0))
    except ValueError:
        return 0


def last_seconds(config: Config) -> dict[str, float]:
    """Return how long the last complete dump of each session took, in seconds."""
    took: dict[str, float] = {}
    try:
        for event in EventLog(config.state_dir).read():
            if event.get("operation") in _DUMPS and event.get("outcome") in ("done", "degraded"):
                name, seconds = event.get("session"), event.get("seconds")
                if isinstance(name, str) and isinstance(seconds, int | float):
                    took[name] = float(seconds)
    except OSError:
        return took
    return took
