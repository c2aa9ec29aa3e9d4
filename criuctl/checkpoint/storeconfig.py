"""What a store is, and who can open it: making its config, and finding the one in force.

The config is JSON in the clear (`configobject`), the object ``config``; since keys are added and
removed, newer versions of it may be under ``keys/`` (`key_generations`). Opening reads the first,
lists the second, and reads of them only what is newer.

A write-only host (`writer_keys`) cannot verify the config, since the key that verifies it could
also make one. It uses the newest that contains its slot. So an attacker who can put objects can
keep it from writing, but learns nothing.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..config import Config
from ..errors import (
    Conflict,
    Damaged,
    DataError,
    KeyMissing,
    NoSuchBucket,
    ObjectExists,
    PlatformError,
    StoreNotInitialised,
    StoreUnreachable,
    UntrustedPath,
    WrongKey,
)
from ..store import Capabilities, Store
from ..store.base import PROBE_PREFIX
from . import configobject, key_files, key_generations, key_slots, keys
from .codec import KEY_SIZE, Sealer
from .configobject import FORMAT, NAME, VERSION, WRITER, WRITERS, damaged, fetch
from .domains import StoreSealer, WriterSealer
from .key_generations import Candidate, Current
from .manifest import now
from .packs import pack_of
from .records import Confidential
from .storepins import Pin, Pinning

# other names that a folder used only as a store may contain
_OURS = {".tmp", ".cache", "lost+found"}
_GONE_HINT = (
    "Put `config` back from a copy: a backup of the folder, an older version in the bucket.\n"
    "Without it nothing there can be read; then make a store elsewhere, or remove what is left."
)
_ATTEMPTS = 8  # to read generations while other hosts replace them


class StoreConfig(Confidential, frozen=True):
    """The contents of the config that are used."""

    id: str
    encrypted: bool
    capabilities: Capabilities
    created: str
    sealer: Sealer
    slots: tuple[dict[str, Any], ...] = ()
    version: int = VERSION
    generation: int = 0
    # what this host expects at the place; None where it cannot record that, or nothing is pinned
    pin: Pin | None = None
    unpinned: str = ""  # why this host cannot record it
    made: bool = False  # by this process


def create(
    store: Store,
    *,
    encryption: bool,
    key_file: Path | None,
    passphrase: bytes | None,
    config: Config,
    recovery: bytes | None = None,
) -> tuple[StoreConfig, keys.Opened | None]:
    """Make the store and its key; see `Repository.init`."""
    store.create()
    if fetch(store) is not None or key_generations.names(store):
        raise _exists(store)
    if _has_packs(store):
        if fetch(store) is not None:  # another criuctl was faster
            raise _exists(store)
        raise Damaged(
            f"{store.url} is a criuctl store whose config is gone", object=NAME, hint=_GONE_HINT
        )
    capabilities = store.probe()
    store_id = secrets.token_hex(16)
    master = secrets.token_bytes(KEY_SIZE)
    sealer = (
        StoreSealer(master, store, store_id, writers=False)
        if encryption
        else Sealer(master, encrypted=False)
    )
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "features": [],
        "id": store_id,
        "created": now(),
        "encryption": "aes-256-gcm" if encryption else "none",
        "capabilities": {
            "conditional_create": capabilities.conditional_create,
            "kind": capabilities.kind,
        },
    }
    opened: keys.Opened | None = None
    made = False
    pinning = Pinning.of(store, config)
    if not encryption:
        body["key"] = master.hex()
    else:
        opened, made = _first_key(master, store_id, key_file, passphrase, config)
        body["slots"] = [opened.by]
    if encryption and recovery is not None:
        body["slots"].append(
            key_slots.file_slot(master, key_files.KeyText(recovery, recovery=True), store_id)
        )
    data = configobject.text(body, sealer)
    try:
        _put(store, data)
    except BaseException:
        # After a lost answer the config may exist nevertheless: keep a key that may be needed. A
        # file that the operator has named may be another store's key by now.
        if made and key_file is None and _surely_absent(store, data):
            keys.key_path(config, store_id).unlink(missing_ok=True)
        raise
    pinning.record(store_id, opened, encrypted=encryption, how="init")
    # no later command would use the store
    if pinning.unrecorded and pinning.remote and not encryption:
        raise PlatformError(
            f"the store in {store.url} was made, but could not be pinned as a plain one: "
            f"{pinning.unrecorded}",
            hint="Name a state_dir that may be written (CRIUCTL_STATE_DIR), then: "
            f"`criuctl store trust --store {shlex.quote(store.url)} --no-encrypt`.",
        )
    about = _with_pin(_understood(body, sealer, body.get("slots", ())), pinning)
    return replace(about, made=True), opened


def _first_key(
    master: bytes, store_id: str, key_file: Path | None, passphrase: bytes | None, config: Config
) -> tuple[keys.Opened, bool]:
    """Return how the passphrase, or else the key file, opens the new store, and whether the file
    was made, because it was missing.
    """
    if passphrase is not None:
        if not passphrase:
            raise WrongKey("the passphrase is empty", hint="Give a passphrase of several words.")
        slot = key_slots.passphrase_slot(master, passphrase, store_id)
        text = key_files.KeyText(master, master=True)
        return keys.Opened(master, "passphrase", text, "passphrase", by=slot), False
    path = key_file or keys.key_path(config, store_id)
    try:
        key, made = key_files.new_key_file(path)
    except (KeyMissing, UntrustedPath) as error:
        plain = "`--no-encrypt` makes a store that is not encrypted."
        raise type(error)(error.message, hint=f"{error.hint} {plain}".strip()) from error
    if key.master:
        raise WrongKey(
            f"{path} holds the exported master key of a store",
            hint="Name a new file, or a key file.",
        )
    slot = key_slots.file_slot(master, key, store_id)
    return keys.Opened(master, str(path), key, key.slot, path, slot), made


def load(
    store: Store,
    config: Config,
    *,
    create_local: bool = False,
    find: keys.Finder = keys.find_master,
    pinning: Pinning | None = None,
) -> tuple[StoreConfig, keys.Opened | None]:
    """Read the store's config, compare it with its pin, let `find` find its key, and prove it; see
    `Repository.open`.

    `pinning` is the pin to use, if not this host's.
    """
    pinning = pinning or Pinning.of(store, config)
    with key_slots.bounded():
        about, opened = _load(store, config, create_local, find, pinning)
    pinning.check_key(opened, store.url)
    pinning.met(about.id, opened, encrypted=about.encrypted, url=store.url)
    return _with_pin(about, pinning), opened


def _with_pin(about: StoreConfig, pinning: Pinning) -> StoreConfig:
    return replace(about, pin=pinning.pin, unpinned=pinning.unrecorded)


def _load(
    store: Store, config: Config, create_local: bool, find: keys.Finder, pinning: Pinning
) -> tuple[StoreConfig, keys.Opened | None]:
    sealed = pinning.pin is not None and pinning.pin.encrypted
    try:
        first, problem = _config(store)
    except NoSuchBucket:
        if not create_local or not _empty_folder(store):
            raise
        if sealed:
            raise pinning.gone(store.url) from None
        first, problem = None, None
    if first is None and problem is None and create_local and not sealed:
        if _empty_folder(store):
            try:
                about, opened = _create_here(store, config, pinning)
                pinning.pin = about.pin
                return about, opened
            except Conflict:  # another criuctl was faster
                first, problem = _config(store)
        else:
            # another criuctl may have made it since it was looked for
            first, problem = _config(store)
    if first is not None:
        pinning.check_config(first.body, store.url)
    if first is not None and first.body["encryption"] == "none":
        pinning.check_plain(first.body["id"], config, store.url)
        return _plain(first)
    for _attempt in range(_ATTEMPTS):
        names = key_generations.names(store)
        if first is None and not names:
            if problem is None and _has_packs(store):
                raise StoreNotInitialised(
                    f"the config of the criuctl store in {store.url} is gone", hint=_GONE_HINT
                )
            if problem is None and pinning.pin is not None:
                raise pinning.gone(store.url)
            raise problem or StoreNotInitialised(f"there is no criuctl store in {store.url}")
        newer = _newer(names, first)
        found, gone = key_generations.read(store, newer)
        if not gone:
            break
        first, problem = _config(store)
    candidates = _expected([*([first] if first else []), *found], pinning, store)
    try:
        return _open(store, candidates, problem, config, find)
    except (DataError, KeyMissing):
        # A generation was not read because `config` says the same. If `config` is damaged, that is
        # not so.
        more, _gone = key_generations.read(store, [name for name in names if name not in newer])
        known = {candidate.data for candidate in candidates}
        if all(candidate.data in known for candidate in more):
            raise
        return _open(store, candidates + _expected(more, pinning, store), problem, config, find)


def _create_here(
    store: Store, config: Config, pinning: Pinning
) -> tuple[StoreConfig, keys.Opened | None]:
    """Make a store in an empty place, encrypted unless `Config.plain_store` says otherwise, or this
    host knows the place as that of a plain store.
    """
    named = config.key_file if config.key_file != keys.ASKED else ""
    return create(
        store,
        encryption=not config.plain_store and pinning.pin is None,
        key_file=Path(named) if named else None,
        passphrase=None,
        config=config,
    )


def _expected(candidates: list[Candidate], pinning: Pinning, store: Store) -> list[Candidate]:
    """Return the candidates of the pinned store, if one is pinned; others are ignored. Raise
    `StoreChanged`.
    """
    if pinning.pin is None:
        return candidates
    expected = [candidate for candidate in candidates if candidate.body["id"] == pinning.pin.id]
    for other in candidates[: not expected]:
        pinning.check_config(other.body, store.url)
    return expected


def _config(store: Store) -> tuple[Candidate | None, Damaged | None]:
    """Read the object ``config``; a damaged one does not end the search."""
    try:
        return Candidate.read(store, NAME), None
    except Damaged as error:
        return None, error


def _newer(names: Mapping[str, int], first: Candidate | None) -> list[str]:
    """Return the generations that may differ from `first`: newer ones, and several of its own
    number.
    """
    known = first.generation if first is not None else -1
    several = list(names.values()).count(known) > 1
    return [
        name
        for name, generation in names.items()
        if generation > known or (several and generation == known)
    ]


def _plain(first: Candidate) -> tuple[StoreConfig, None]:
    sealer = Sealer(configobject.as_bytes(first.body.get("key"), KEY_SIZE), encrypted=False)
    if not configobject.fits(first.body, sealer):
        raise damaged("its checksum does not fit")
    return _understood(first.body, sealer), None


def _open(
    store: Store,
    candidates: list[Candidate],
    problem: Damaged | None,
    config: Config,
    find: keys.Finder,
) -> tuple[StoreConfig, keys.Opened]:
    """Open the newest valid candidate. Validity is unknown for a candidate that `find`
    cannot open.
    """
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.generation, candidate.body["id"]), []).append(candidate)
    failed: DataError | KeyMissing | None = None
    for (generation, store_id), group in sorted(
        groups.items(), key=lambda item: item[0], reverse=True
    ):
        try:
            opened = find(key_generations.union(group), store_id, config)
        except (DataError, KeyMissing) as error:
            failed = failed or error
            continue
        if opened.writer is not None:
            if any(
                candidate.generation > generation
                for candidate in candidates
                if candidate.body["id"] == store_id
            ):
                continue  # a newer candidate no longer has its slot
            others = WriterSealer(opened.writer, Path(opened.source).parent, store)
            return _understood(group[0].body, others, key_generations.union(group)), opened
        sealer = Sealer(opened.master, encrypted=True)
        current = Current.among((c for c in candidates if c.body["id"] == store_id), sealer)
        if current is None:
            if opened.slot == "master":
                failed = failed or WrongKey(
                    f"the master key in {opened.source} is not that of store {store_id[:12]}"
                )
            else:
                failed = failed or damaged("its checksum does not fit")
            continue
        if opened.by is not None and opened.by not in current.slots:
            try:
                opened = find(current.slots, store_id, config)
            except (WrongKey, KeyMissing):
                raise WrongKey(
                    f"the key from {opened.source} was removed from store {store_id[:12]}",
                    hint=(
                        "`criuctl key list` shows which keys open it, on a host that has one of "
                        "them."
                    ),
                ) from None
        has = any(c.body.get(WRITERS) is True for c in current.texts) or any(
            s.get("type") == WRITER for s in current.slots
        )
        own = StoreSealer(opened.master, store, store_id, writers=has)
        return _understood(current.body, own, current.slots), opened
    if failed is not None and store.url not in failed.message:
        raise type(failed)(
            f"{store.url}: {failed.message}", hint=failed.hint, **failed.details
        ) from failed
    raise failed or problem or damaged("nothing in it can be read")


def _understood(
    body: Mapping[str, Any], sealer: Sealer, slots: Iterable[dict[str, Any]] = ()
) -> StoreConfig:
    can = body.get("capabilities")
    if not isinstance(can, dict) or not isinstance(can.get("conditional_create"), bool):
        raise damaged("it does not say what the store can do")
    return StoreConfig(
        id=body["id"],
        encrypted=sealer.encrypted,
        capabilities=Capabilities(can["conditional_create"], str(can.get("kind", ""))),
        created=str(body.get("created", "")),
        sealer=sealer,
        slots=tuple(slots),
        version=body["version"],
        generation=body.get("generation", 0),
    )


def _put(store: Store, data: bytes) -> None:
    try:
        store.put(NAME, data, if_absent=True)
    except (ObjectExists, StoreUnreachable) as error:
        if fetch(store) == data:
            return
        if isinstance(error, ObjectExists):
            raise _exists(store) from None
        raise


def _surely_absent(store: Store, data: bytes) -> bool:
    try:
        return fetch(store) != data
    except Exception:
        return False


def _empty_folder(store: Store) -> bool:
    """Return whether `store` is a local folder that does not exist, or is empty."""
    from ..store.local import LocalStore

    if not isinstance(store, LocalStore):
        return False
    try:
        return all(name in _OURS or name.startswith(PROBE_PREFIX) for name in os.listdir(store.url))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _has_packs(store: Store) -> bool:
    """Return whether there are objects that only a store has, although there is no config."""
    return any(pack_of(info.name) is not None for info in store.list("packs/"))


def _exists(store: Store) -> Conflict:
    return Conflict(
        f"there is a criuctl store in {store.url} already",
        hint="It was left as it is: see `criuctl store info`.",
    )
