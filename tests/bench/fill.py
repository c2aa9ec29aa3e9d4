"""Fill the configured store with copies of one checkpoint's manifest: ``python -m bench.fill REF
COUNT``.

A store of many checkpoints in a second, for ``criuctl list``.  A program of its own, so that it
sees criuctl's environment.
"""

from __future__ import annotations

import secrets
import sys
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.config import load
from criuctl.store import open_store

SESSIONS = 8


def fill(ref: str, count: int) -> None:
    """Publish `count` more checkpoints like the one that `ref` names, of some sessions."""
    config = load()
    store = open_store(config.store, config)
    repository = Repository.open(store, config)
    try:
        manifest = repository.manifest(ref)

        def publish(number: int) -> None:
            session = SessionRef(f"{manifest.session.name}-{number}", secrets.token_hex(16))
            for _ in range(number, count, SESSIONS):
                repository.publish(replace(manifest, id=secrets.token_hex(16), session=session))

        with ThreadPoolExecutor(SESSIONS) as pool:
            for _ in pool.map(publish, range(SESSIONS)):
                pass
    finally:
        repository.close()
        store.close()


if __name__ == "__main__":
    fill(sys.argv[1], int(sys.argv[2]))
