"""A store in this process's memory: for tests and experiments.

``memory:NAME`` opened twice in one process is the same store; ``memory:`` is always a new one.
Everything is copied in under one lock, so the contract holds by construction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from ..errors import ObjectExists, ObjectMissing
from .base import (
    Capabilities,
    Data,
    ObjectInfo,
    Store,
    as_views,
    check_limit,
    check_name,
    check_prefix,
    short_object,
)

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore(Store):
    """Objects in a dictionary."""

    def __init__(self, url: str = "memory:") -> None:
        self.url = url
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @classmethod
    def named(cls, url: str) -> MemoryStore:
        """Return the store of this URL in this process; a nameless one is always new."""
        if url == "memory:":
            return cls(url)
        with _named_lock:
            return _named.setdefault(url, cls(url))

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        content = b"".join(as_views(data))
        check_name(name)
        with self._lock:
            if if_absent and name in self._objects:
                raise ObjectExists(f"{name} is in {self.url} already", object=name)
            self._objects[name] = (content, time.time())

    def get(self, name: str, limit: int | None = None) -> bytes:
        content = self._find(name)[0]
        check_limit(name, self.url, len(content), limit)
        return content

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        piece = self._find(name)[0][offset : offset + length]
        if len(piece) != length:
            raise short_object(name, self.url, offset, length, len(piece))
        return piece

    def stat(self, name: str) -> ObjectInfo:
        content, modified = self._find(name)
        return ObjectInfo(name, len(content), modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = [
                ObjectInfo(name, len(content), modified)
                for name, (content, modified) in self._objects.items()
                if name.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda info: info.name))

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            self._objects.pop(name, None)

    def create(self) -> None:
        """Do nothing: there is nothing to make."""

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=True, kind="memory")

    def _find(self, name: str) -> tuple[bytes, float]:
        check_name(name)
        with self._lock:
            try:
                return self._objects[name]
            except KeyError:
                raise ObjectMissing(f"{name} is not in {self.url}", object=name) from None
