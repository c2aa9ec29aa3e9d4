"""Waiting until connections are idle: nothing queued on either side, and no byte moved between two
looks.

This is done before the freeze, while the program runs and can finish its requests. It is not
visible from outside whether a peer still works on a request; a connection without traffic for
`PAUSE` counts as idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint.connection_record import ConnectionRecord

PAUSE = 0.1  # seconds between two looks
_COUNTERS = ("bytes_acked", "bytes_received")

Key = tuple[int, int]
"""(PID, descriptor), which name a connection."""


def wait_idle(
    look: Callable[[], Mapping[Key, ConnectionRecord]], deadlines: Mapping[Key, float]
) -> list[ConnectionRecord]:
    """Wait for the connections in `deadlines` (of `time.monotonic`); return those that did not
    become idle in time.

    `look` returns the current records. A connection that is gone is idle.
    """
    waiting = dict(deadlines)
    before: dict[Key, Any] = {}
    restless: list[ConnectionRecord] = []
    while waiting:
        now = look()
        moved: dict[Key, Any] = {}
        for key in list(waiting):
            record = now.get(key)
            if record is None:
                del waiting[key]
                continue
            traffic = moved[key] = _traffic(record)
            if before.get(key) == traffic and not record.rqueue and not record.wqueue:
                del waiting[key]
            elif time.monotonic() >= waiting[key]:
                del waiting[key]
                restless.append(record)
        before = moved
        if waiting:
            time.sleep(PAUSE)
    return restless


def _traffic(record: ConnectionRecord) -> tuple[Any, ...]:
    # A unix socket has no counters; only its queues are visible.
    return (
        record.inode,
        record.rqueue,
        record.wqueue,
        *(record.tcp.get(name) for name in _COUNTERS),
    )
