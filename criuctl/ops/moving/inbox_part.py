"""The part of this host's inbox that one source may see: the objects that it has stored itself.

Sources are write-only hosts of the inbox (`criuctl.checkpoint.writer_keys`): a source's key opens
nothing that other hosts have stored or will store. The source does not see those objects either.
Over the link it sees only:

- the objects of its own domains, and those that it has put on this visit;
- the lists by which writers and garbage collections agree (they name packs, and are sealed);
- the names, but not the content, of checkpoints of its own session, so that it can number the next
  one.

A source changes and deletes only what it has put on this visit. It replaces no other object, and
cannot write the objects in which this host, or a collection, records something. The config that it
reads is made for it: the inbox's own, with the source's key as the only one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

from ...checkpoint import configobject, objects, writer_keys
from ...checkpoint.catalog import parse_name
from ...checkpoint.packs import pack_of
from ...checkpoint.repository import Repository
from ...errors import DataError, NoSuchCheckpoint, ObjectExists, ObjectMissing, StoreCannot
from ...store import Capabilities, Store
from ...store.base import PROBE_PREFIX, Data, ObjectInfo, as_views, check_limit, short_object

_KINDS = {"index": objects.INDEX, "checkpoints": objects.MANIFEST, "sessions": objects.LEASE}
_LISTS = ("writing/", "gc/")
# what a source may put
_NEW = ("packs/", "index/", writer_keys.PREFIX, "writing/", "gc/now-", PROBE_PREFIX)


class OwnPart(Store):
    """The inbox as seen by the source with the writer key `key`, which sends the session
    `session`.
    """

    def __init__(self, repository: Repository, key: writer_keys.WriterKey, session: str) -> None:
        self._store, self._sealer, self._writer = repository.store, repository.sealer, key.id
        self.url = repository.store.url
        token = repository.sealer.token(session)
        self._named = tuple(f"{kind}/{token}/" for kind in ("checkpoints", "numbers", "sessions"))
        self._config = _config(repository, key)
        self._lock = threading.Lock()
        self._put: set[str] = set()  # on this visit
        self._own: dict[str, bool] = {}  # whether an older object is the source's
        self._domains: dict[bytes, bool] = {}  # whether a domain is the source's

    def brought(self, checkpoint: str) -> str:
        """Return the manifest's name if the checkpoint of this id is the source's: of its session,
        and stored by it; otherwise an empty string.
        """
        for info in self._store.list(self._named[0]):
            with suppress(NoSuchCheckpoint):
                if parse_name(info.name)[2] == checkpoint:
                    return info.name if self.is_own(info.name) else ""
        return ""

    # -- the store
    # -----------------------------------------------------------------------------------

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        with self._lock:
            again = name in self._put and not if_absent
        if not name.startswith((*_NEW, self._named[0])):
            raise StoreCannot(f"the host that sends a session may not change {name}", object=name)
        if not again and self._there(name):
            raise ObjectExists(f"{name} is in {self.url} already", object=name)
        self._store.put(
            name, data if isinstance(data, bytes) else b"".join(as_views(data)), if_absent=not again
        )
        with self._lock:
            self._put.add(name)

    def get(self, name: str, limit: int | None = None) -> bytes:
        if name == configobject.NAME:
            check_limit(name, self.url, len(self._config), limit)
            return self._config
        self._need(name)
        return self._store.get(name, limit)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        if name == configobject.NAME:
            piece = self._config[offset : offset + length]
            if len(piece) != length:
                raise short_object(name, self.url, offset, length, len(piece))
            return piece
        self._need(name)
        return self._store.get_range(name, offset, length)

    def stat(self, name: str) -> ObjectInfo:
        if name == configobject.NAME:
            return ObjectInfo(name, len(self._config), self._store.stat(name).modified)
        self._need(name)
        return self._store.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self._store.list(prefix):
            if info.name == configobject.NAME:
                yield ObjectInfo(info.name, len(self._config), info.modified)
            elif info.name.startswith(self._named) or self.is_own(info.name):
                yield info

    def delete(self, name: str) -> None:
        with self._lock:
            own = name in self._put
        if not own:
            if self._there(name):
                raise StoreCannot(
                    f"the host that sends a session may not delete {name}", object=name
                )
            return
        self._store.delete(name)
        with self._lock:
            self._put.discard(name)

    def create(self) -> None:
        """Do nothing: the inbox exists."""

    def probe(self) -> Capabilities:
        return self._store.probe()

    # -- ownership
    # ---------------------------------------------------------------------------------

    def _there(self, name: str) -> bool:
        try:
            self._store.stat(name)
        except ObjectMissing:
            return False
        return True

    def _need(self, name: str) -> None:
        if not self.is_own(name):
            raise ObjectMissing(f"{name} is not in {self.url}", object=name)

    def is_own(self, name: str) -> bool:
        """Return whether the object is the source's, which may read it."""
        with self._lock:
            if name in self._put:
                return True
            known = self._own.get(name)
        if known is None:
            try:
                known = self._judge(name)
            except DataError:  # it is damaged
                known = False
            except ObjectMissing:
                return False  # it may be put later
            with self._lock:
                self._own[name] = known
        return known

    def _judge(self, name: str) -> bool:
        kind = name.partition("/")[0]
        if name.startswith(_LISTS):
            return True
        if name.startswith(writer_keys.PREFIX):
            return self._owns(writer_keys.domain_of(name) or b"")
        if (pack := pack_of(name)) is not None:
            return self._owns(self._sealer.of_pack(pack).domain)
        if kind not in _KINDS:
            return False
        start = self._store.get_range(name, 0, objects.DECLARED)
        return self._owns(objects.declared(_KINDS[kind], name, start)[2])

    def _owns(self, domain: bytes) -> bool:
        """Return whether the source has made the domain; the seal of the domain proves it."""
        if not domain:
            return False
        if domain not in self._domains:
            name = writer_keys.PREFIX + domain.hex()
            self._sealer.of(domain, name)
            self._domains[domain] = (
                writer_keys.author(self._store.get(name, writer_keys.WRAPPED.size)) == self._writer
            )
        return self._domains[domain]


def _config(repository: Repository, key: writer_keys.WriterKey) -> bytes:
    """Return the inbox's config as the source reads it."""
    current = repository.key_changer().current()
    body = {name: value for name, value in current.body.items() if name != "mac"}
    return configobject.text(body | {"slots": [key.slot()]}, repository.sealer)
