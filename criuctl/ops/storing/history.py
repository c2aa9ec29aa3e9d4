"""The durations of a session's dumps, which are in whole manifests and not in summaries.

A manifest never changes, so the caller keeps what was read (`known`), and only new manifests are
read.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...checkpoint.repository import Repository
from ...checkpoint.summary import CheckpointSummary
from ...config import Config
from ...errors import DataError, NotFound
from ...store import open_store

_READERS = 4

Known = MutableMapping[str, dict[str, Any]]


def timings(config: Config, session: str, limit: int, known: Known) -> list[dict[str, Any]]:
    """Return ``id, number, created, frozen_ms, total_ms, processes, bytes`` of the newest `limit`
    checkpoints, oldest first.

    Checkpoints that cannot be read, or were removed meanwhile, are left out.
    """
    store = open_store(config.store, config)
    try:
        repository = Repository.open(store, config)
        try:
            wanted = repository.list(session, unreadable=[])[-limit:]
            missing = [summary for summary in wanted if summary.id not in known]

            def read(summary: CheckpointSummary) -> None:
                try:
                    found = repository.manifest(summary).timings
                except (DataError, NotFound):
                    return
                known[summary.id] = {
                    "frozen_ms": found.get("frozen_ms"),
                    "total_ms": found.get("total_ms"),
                }

            if missing:
                with ThreadPoolExecutor(min(_READERS, len(missing)), "criuctl-history") as pool:
                    list(pool.map(read, missing))
        finally:
            repository.close()
    finally:
        store.close()
    return [
        {
            "id": summary.id,
            "number": summary.number,
            "created": summary.created,
            "processes": summary.processes,
            "bytes": dict(summary.bytes),
            **known[summary.id],
        }
        for summary in wanted
        if summary.id in known
    ]
