"""Where this host keeps its cache of a store."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ..config import Config
from ..store import Store
from .codec import Sealer


def cache_path(
    store: Store, config: Config, store_id: str, sealer: Sealer, writer: bytes | None
) -> Path:
    """Return the path of the local cache: inside a local store if possible, so that it is removed
    with the store.

    `writer` is the id of the write-only host that this host is. Hosts that share a folder must not
    share a database: SQLite's locks do not reach across hosts. A host with other keys can read
    other packs, so it needs its own database too.
    """
    from ..store.local import LocalStore

    who = f"writer {writer.hex()} " if writer is not None else ""
    file = f"index-{sealer.token(f'{who}host {_host()}')[:12]}.sqlite"
    if isinstance(store, LocalStore) and os.access(store.url, os.W_OK):
        return Path(store.url) / ".cache" / file
    return Path(config.cache_dir) / store_id / file


def _host() -> str:
    """Return text that differs between hosts."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            if found := Path(path).read_text().strip():
                return found
        except OSError:
            continue
    return platform.node()
