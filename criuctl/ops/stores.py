"""Making a store, describing it, and its key.

A key is described by its place and its fingerprint, never by its content. Only `store_key` with
`export` writes it, to a new file that only its owner can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from ..checkpoint import keys, recovery, storeconfig
from ..checkpoint.repository import Repository
from ..checkpoint.storepins import Pin, Trusting
from ..config import Config
from ..errors import PlatformError
from ..host.journal import events, operation_facts
from ..store import Store, open_store
from .storing.growth import growth, plain_bytes


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts about a store; counts and sizes by `store_info` only."""

    store: str
    id: str
    format: int
    created: str
    encrypted: bool
    # kind: file | passphrase | recovery | master | writer | none, file, source, fingerprint, slots
    key: dict[str, Any]
    capabilities: dict[str, Any]
    # the store that this host expects there: since, how: init | first-use | trusted, problem: why
    # it is not recorded
    pin: dict[str, Any]
    # sessions, checkpoints, unreadable, hidden, objects, bytes
    contents: dict[str, Any] | None = None
    exported: str | None = None  # where `store_key` wrote the key
    recovery_key: str | None = field(default=None, repr=False)  # made by `store_init`

    def to_dict(self) -> dict[str, Any]:
        """Return one object; the counts of ``contents`` are in it directly, ``recovery_key`` where
        there is a new one.
        """
        body = asdict(self)
        if self.recovery_key is None:
            del body["recovery_key"]
        body.update(body.pop("contents") or {})
        return body


def _facts(repository: Repository, **more: Any) -> StoreFacts:
    about = repository.about
    return StoreFacts(
        store=repository.store.url,
        id=repository.id,
        format=about.version,
        created=about.created,
        encrypted=repository.encrypted,
        key=repository.key_info(),
        capabilities=structs.asdict(repository.capabilities),
        pin=_pin(about.pin, about.unpinned),
        **more,
    )


def _pin(pin: Pin | None, problem: str) -> dict[str, Any]:
    return {"since": pin and pin.since, "how": pin and pin.how, "problem": problem or None}


@contextmanager
def _opened(config: Config) -> Iterator[Repository]:
    store = open_store(config.store, config)
    try:
        repository = Repository.open(store, config)
        try:
            yield repository
        finally:
            repository.close()
    finally:
        store.close()


@events.recorded("store-init", operation_facts.nothing_more)
def store_init(
    config: Config,
    *,
    encryption: bool = True,
    key_file: Path | None = None,
    ask_passphrase: Callable[[], bytes] | None = None,
    recovery_key: bool = False,
) -> StoreFacts:
    """Make the configured store; raise `Conflict` if it is one already.

    The store is pinned, in place of one that was there before (`criuctl.checkpoint.storepins`).
    With `ask_passphrase` the key is sealed with the configured passphrase, or with the result of
    that function. A recovery key is only in the answer.
    """
    store = open_store(config.store, config)
    try:
        passphrase = None
        if ask_passphrase is not None:
            configured, _ = keys.find_passphrase(config)
            passphrase = configured if configured is not None else ask_passphrase()
        named = config.key_file if config.key_file != keys.ASKED else ""
        made = key_file or (Path(named) if named else None)
        secret = recovery.new_secret() if recovery_key else None
        init = Repository.init(
            store,
            encryption=encryption,
            key_file=made,
            passphrase=passphrase,
            recovery=secret,
            config=config,
        )
        return _facts(init, recovery_key=recovery.to_text(secret) if secret is not None else None)
    finally:
        store.close()


def store_info(config: Config) -> StoreFacts:
    """Describe the configured store and count what it holds."""
    with _opened(config) as repository:
        unreadable: list[Any] = []
        hidden: list[Any] = []
        found = repository.list(unreadable=unreadable, hidden=hidden)
        objects, sizes = _weigh(repository.store)
        whole, unique = sum(map(plain_bytes, found)), _unique(repository)
        kept = repository.store.keeping()
        contents = {
            "sessions": len({summary.session for summary in found}),
            "checkpoints": len(found),
            "unreadable": len(unreadable),
            "hidden": len(hidden),
            "objects": objects,
            "bytes": {**sizes, "whole": whole, "unique": unique},
            "ratios": {
                "deduplication": _ratio(whole, unique),
                "compression": _ratio(unique, sizes["packs"]),
                "total": _ratio(whole, sizes["stored"]),
            },
            "growth": [one.to_dict() for one in growth(found)],
            "kept": structs.asdict(kept) if kept is not None else None,
        }
        return _facts(repository, contents=contents)


def _unique(repository: Repository) -> int:
    """Return the plain bytes of all chunks in packs, each counted once, unneeded ones included."""
    repository.index.sync()
    return repository.index.plain_bytes()


def _ratio(plain: int, stored: int) -> float | None:
    return round(plain / stored, 2) if plain and stored else None


def _weigh(store: Store) -> tuple[int, dict[str, int]]:
    """Return the number of objects, and their bytes in all (``stored``) and by kind."""
    count = 0
    sizes = {"stored": 0, "packs": 0, "index": 0, "checkpoints": 0}
    for info in store.list():
        count += 1
        sizes["stored"] += info.size
        kind = info.name.partition("/")[0]
        if kind in sizes:
            sizes[kind] += info.size
    return count, sizes


def store_key(config: Config, *, export: Path | None = None) -> StoreFacts:
    """Describe how the store is opened here; with `export` write its key to that new file, mode
    0600.
    """
    with _opened(config) as repository:
        if export is not None:
            repository.export_key(export)
        return _facts(repository, exported=str(export) if export is not None else None)


@dataclass(frozen=True, slots=True)
class Trusted:
    """The result of `store_trust`."""

    store: str
    id: str
    encrypted: bool
    before: dict[str, Any] | None  # the pin that was replaced: id, encrypted, since

    def to_dict(self) -> dict[str, Any]:
        """Return one object."""
        return asdict(self)


@events.recorded("store-trust", operation_facts.nothing_more)
def store_trust(config: Config, *, store_id: str = "", plain: bool = False) -> Trusted:
    """Pin the store that is at the configured place now, whatever was pinned there before.

    With `store_id`, only a store whose id begins so. A store that is not encrypted, only with
    `plain`.
    """
    store = open_store(config.store, config)
    try:
        trusting = Trusting.at(store, config, store_id, plain=plain)
        before = trusting.before
        about, _opened_by = storeconfig.load(store, config, pinning=trusting)
        if trusting.unrecorded:
            raise PlatformError(
                f"the pin of {store.url} cannot be written: {trusting.unrecorded}",
                hint="Run criuctl as root, or name a state_dir that may be written.",
            )
        old = (
            {"id": before.id, "encrypted": before.encrypted, "since": before.since}
            if before is not None
            else None
        )
        return Trusted(store.url, about.id, about.encrypted, old)
    finally:
        store.close()
