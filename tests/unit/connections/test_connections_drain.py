"""Waiting for idle connections."""

from __future__ import annotations

import time
from collections.abc import Iterator

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.drain import Key, wait_idle

KEY = (7, 3)


def _record(received: int, rqueue: int = 0) -> ConnectionRecord:
    return ConnectionRecord(
        7, 3, inode=9, rqueue=rqueue, tcp={"bytes_acked": 1, "bytes_received": received}
    )


def _wait(
    story: list[ConnectionRecord | None], seconds: float = 60.0
) -> tuple[list[ConnectionRecord], int]:
    """How it ends, and how often was looked; the last state lasts."""
    looks = 0

    def states() -> Iterator[ConnectionRecord | None]:
        yield from story
        while True:
            yield story[-1]

    each = states()

    def look() -> dict[Key, ConnectionRecord]:
        nonlocal looks
        looks += 1
        found = next(each)
        return {} if found is None else {KEY: found}

    return wait_idle(look, {KEY: time.monotonic() + seconds}), looks


def test_two_quiet_looks_are_enough() -> None:
    assert _wait([_record(5)]) == ([], 2)


def test_traffic_is_waited_for() -> None:
    assert _wait([_record(5), _record(6), _record(7), _record(7)]) == ([], 4)


def test_queued_data_is_waited_for() -> None:
    assert _wait([_record(5, rqueue=3), _record(5, rqueue=3), _record(5)]) == ([], 4)


def test_a_connection_that_is_gone_is_idle() -> None:
    assert _wait([_record(5), None]) == ([], 2)


def test_a_connection_that_never_rests_is_reported() -> None:
    busy = _record(5, rqueue=1)
    assert _wait([busy], seconds=0.3)[0] == [busy]


def test_nothing_to_wait_for() -> None:
    assert wait_idle(dict, {}) == []
