"""Which keys open which object, in a store to which write-only hosts add.

A *domain* is everything that one write-only host has sealed: a key hierarchy like that of the store
itself, under a random master key that the host has made. Each object shows its domain:

- segments, manifests and leases by a required feature, ``writer:<the domain's id>``, so older
  versions refuse them by name;
- a pack by its name, to an owner of the domain's keys: its first bytes are a keyed hash of the
  others (`Sealer.owns`);
- a chunk by its id, in the same way (`Sealer.owns_chunk`): a chunk that is listed in a domain's
  pack must be a chunk of that domain;
- lists of packs (`gclists`) are of no domain: in a store that has writers they are sealed by the
  lists key, for all.

The index does not record domains, and chunk ids of different domains are unrelated. So a write-only
host can neither find out whether other hosts have stored content that it guesses, nor put content
in its place.

`StoreSealer` needs the store's key. It opens domains when it meets them, from the objects
``writers/...``, which are never requested in a store without writers. `WriterSealer` is the
write-only host's: it has only the keys of its own domain, and raises `Foreign` for everything else.
The domain is made when the host writes for the first time, and kept in a file next to its key file.
Without that file it cannot read even what it wrote itself.

RULE: nothing is sealed by a domain's keys before they are durable on this host, and before the
store has the object that lets other hosts open them.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError, Foreign, KeyMissing, ObjectMissing
from . import writer_keys
from .codec import KEY_SIZE, Sealer
from .key_files import read_secret, write_secret
from .writer_keys import ID_SIZE, PREFIX, WRAPPED, WriterKey, lists_key, writer_key

if TYPE_CHECKING:
    from ..store import Store

_LINE = "criuctl writer domain 1"
_FETCHERS = 8


class StoreSealer(Sealer):
    """The store's own keys, and those of the domains in it."""

    def __init__(self, master: bytes, store: Store, store_id: str, *, writers: bool) -> None:
        """Set up the keys; `writers`: whether the store's config says that there are, or have been,
        write-only hosts.
        """
        super().__init__(master, encrypted=True)
        self._master, self._store, self._id = master, store, store_id
        self._writers = writers
        self._lock = threading.Lock()
        self._known: dict[bytes, Sealer] = {}  # replaced, never changed
        self._authors: dict[bytes, bytes] = {}  # domain -> writer's id
        self._listed = False

    @property
    def divided(self) -> bool:
        return self._writers

    def new_pack(self) -> bytes:
        while True:
            name = super().new_pack()
            if not any(domain.owns(name) for domain in self._known.values()):
                return name

    def of(self, domain: bytes, name: str) -> Sealer:
        return self._open(domain) if domain else self

    def of_pack(self, pack: bytes) -> Sealer:
        if self._writers and not self._listed:
            self._learn()
        for domain in self._known.values():
            if domain.owns(pack):
                return domain
        return self

    def author(self, domain: bytes) -> str:
        return writer_key(self._master, self._id, self._authors[domain]).fingerprint

    def of_list(self, name: str, *, shared: bool) -> Sealer:
        if not shared:
            return self
        return Sealer(lists_key(self._master), encrypted=True)

    def for_lists(self) -> tuple[Sealer, bool]:
        return self.of_list("", shared=self._writers), self._writers

    def _open(self, domain: bytes) -> Sealer:
        """Return the keys of one domain, from its object; raise `Damaged`, `UnsupportedFormat` or
        errors of the store.
        """
        if (known := self._known.get(domain)) is not None:
            return known
        name = PREFIX + domain.hex()
        try:
            data = self._store.get(name, WRAPPED.size)
        except ObjectMissing:
            raise writer_keys.lost(name) from None
        opened = Sealer(
            writer_keys.unwrap(self._master, self._id, name, data), encrypted=True, domain=domain
        )
        with self._lock:
            self._writers = True
            self._known = {**self._known, domain: opened}
            self._authors[domain] = writer_keys.author(data)
        return opened

    def _learn(self) -> None:
        """Open all domains; an object that no enrolled host made opens none."""
        from concurrent.futures import ThreadPoolExecutor

        def learn(domain: bytes) -> None:
            with suppress(DataError):
                self._open(domain)

        names = [info.name for info in self._store.list(PREFIX) if info.size == WRAPPED.size]
        fresh = [
            domain
            for name in names
            if (domain := writer_keys.domain_of(name)) is not None and domain not in self._known
        ]
        if fresh:
            with ThreadPoolExecutor(min(_FETCHERS, len(fresh)), "criuctl-domains") as pool:
                for _ in pool.map(learn, fresh):
                    pass
        self._listed = True


class WriterSealer(Sealer):
    """The keys of a write-only host: those of its own domain, once it has one."""

    domain = b""
    selective = True

    def __init__(self, key: WriterKey, folder: Path, store: Store) -> None:
        """Read the domain from `folder`, if it has one; raise `KeyMissing` when its file cannot be
        used.
        """
        self.encrypted = True
        self._key, self._store = key, store
        self._names = key.names
        self._file = folder / f"{key.store.hex()}.{key.id.hex()[:16]}.domain"
        self._wrapped = b""
        self._published = False  # the store has the object that lets others open the domain
        if os.path.lexists(self._file):
            self._enter()

    def prepare(self) -> None:
        """Ensure that the domain exists, that its keys are durable, and that the store's key opens
        it; raise errors of the store.
        """
        if self._published:
            return
        if not self._wrapped:
            _make(self._file, self._key)
            self._enter()
        name = PREFIX + self.domain.hex()
        try:
            there = self._store.get(name) == self._wrapped
        except ObjectMissing:
            there = False
        if not there:
            self._store.put(name, self._wrapped)
        self._published = True

    def of(self, domain: bytes, name: str) -> Sealer:
        if not domain or domain != self.domain:
            raise Foreign(
                f"{name} was written by another host, and this write-only host has no key for it",
                object=name,
            )
        return self

    def of_pack(self, pack: bytes) -> Sealer:
        if not self.owns(pack):
            raise Foreign(
                f"pack {pack.hex()} was written by another host, and this write-only host has no "
                "key for it"
            )
        return self

    def author(self, domain: bytes) -> str:
        return self._key.fingerprint

    def of_list(self, name: str, *, shared: bool) -> Sealer:
        return Sealer(self._key.lists, encrypted=True) if shared else self.of(b"", name)

    def for_lists(self) -> tuple[Sealer, bool]:
        return self.of_list("", shared=True), True

    def _enter(self) -> None:
        domain, master, wrapped = _read(self._file)
        super().__init__(master, encrypted=True, domain=domain)
        self._names = self._key.names  # equal names are one session, whichever host writes
        self._wrapped = wrapped


def _read(path: Path) -> tuple[bytes, bytes, bytes]:
    """Read a domain's id, master key and object from its file; raise `KeyMissing`."""
    lines = read_secret(path).decode("ascii", "replace").split("\n")
    try:
        secret, wrapped = (base64.b64decode(line, validate=True) for line in lines[1:3])
        if (
            lines[0] != _LINE
            or len(secret) != ID_SIZE + KEY_SIZE
            or len(wrapped) != WRAPPED.size
            or any(lines[3:])
        ):
            raise ValueError
    except (ValueError, binascii.Error):
        raise KeyMissing(
            f"{path} is damaged, which opens what this write-only host has stored",
            hint=(
                "Bring a copy of it back. Or remove it: then only hosts with the store's key can "
                "read what is stored so far."
            ),
        ) from None
    return secret[:ID_SIZE], secret[ID_SIZE:], wrapped


def _make(path: Path, key: WriterKey) -> None:
    """Make a new domain in the file `path`, durable; if another process is faster, return the
    domain of that one.
    """
    domain, master = secrets.token_bytes(ID_SIZE), secrets.token_bytes(KEY_SIZE)
    lines = (
        _LINE,
        *(
            base64.b64encode(part).decode()
            for part in (domain + master, writer_keys.wrap(key, domain, master))
        ),
        "",
    )
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_secret(own, "\n".join(lines))
    try:
        with suppress(FileExistsError):
            os.link(own, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyMissing(
            f"{path} cannot be written: {error.strerror}",
            hint="It must be in the same folder as the key file.",
        ) from error
    finally:
        own.unlink(missing_ok=True)
