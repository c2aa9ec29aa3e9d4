"""The store's config object: what the store is, and who can open it.

JSON in the clear, under the name ``config``, written once.  ``version`` is looked at before anything else.  ``mac`` is a
keyed hash of all the rest under a key derived from the master key, so that nobody without the key can
change what the config says, and damage is found.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import (
    Conflict,
    Damaged,
    NoSuchBucket,
    ObjectExists,
    ObjectMissing,
    StoreNotInitialised,
    StoreUnreachable,
    UnsupportedFormat,
    WrongKey,
)
from ..store import Capabilities, Store
from ..store.base import PROBE_PREFIX
from . import keys
from .codec import KEY_SIZE, Sealer, keyed_hash
from .manifest import now

NAME = "config"
FORMAT = "criuctl store"
VERSION = 1
_MAX_SIZE = 1 << 20
_OURS = {".tmp", ".cache"}  # what a folder that only ever was a store may hold besides objects


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What the config object says."""

    id: str
    encrypted: bool
    capabilities: Capabilities
    created: str
    sealer: Sealer = field(repr=False)
    slots: tuple[dict[str, Any], ...] = field(repr=False, default=())
    version: int = VERSION


def create(
    store: Store, *, encryption: bool, key_file: Path | None, passphrase: bytes | None, config: Config
) -> tuple[StoreConfig, keys.Opened | None]:
    """Make the store and its key; see `Repository.init`."""
    store.create()
    if _fetch(store) is not None:
        raise _exists(store)
    capabilities = store.probe()
    store_id = secrets.token_hex(16)
    master = secrets.token_bytes(KEY_SIZE)
    sealer = Sealer(master, encrypted=encryption)
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "features": [],
        "id": store_id,
        "created": now(),
        "encryption": "aes-256-gcm" if encryption else "none",
        "capabilities": {"conditional_create": capabilities.conditional_create, "kind": capabilities.kind},
    }
    opened: keys.Opened | None = None
    made: Path | None = None
    if not encryption:
        body["key"] = master.hex()
    elif passphrase is not None:
        if not passphrase:
            raise WrongKey("the passphrase is empty", hint="Give a passphrase of several words.")
        body["slots"] = [keys.passphrase_slot(master, passphrase, store_id)]
        opened = keys.Opened(master, "passphrase", keys.KeyText(master, master=True), "passphrase")
    else:
        path = key_file or keys.key_path(config, store_id)
        made = None if os.path.lexists(path) else path
        key = keys.new_key_file(path)
        if key.master:
            raise WrongKey(f"{path} holds the exported master key of a store", hint="Name a new file, or a key file.")
        body["slots"] = [keys.file_slot(master, key, store_id)]
        opened = keys.Opened(master, str(path), key, "file", path)
    body["mac"] = _mac(body, sealer)
    data = json.dumps(body, indent=1).encode()
    try:
        _put(store, data)
    except BaseException:
        # After a lost answer the config may be there all the same: a key that may be needed is kept.
        if made is not None and _surely_absent(store, data):
            made.unlink(missing_ok=True)
        raise
    return _understood(body, sealer), opened


def load(
    store: Store, config: Config, *, create_local: bool = False, find: keys.Finder = keys.find_master
) -> tuple[StoreConfig, keys.Opened | None]:
    """Read the store's config, let `find` find its key, and prove it; see `Repository.open`."""
    try:
        data = _fetch(store)
    except NoSuchBucket:
        if not create_local or not _empty_folder(store):
            raise
        data = None
    if data is None:
        if create_local and _empty_folder(store):
            try:
                return create(store, encryption=False, key_file=None, passphrase=None, config=config)
            except Conflict:  # another criuctl was faster
                data = store.get(NAME)
        elif create_local:
            data = _fetch(store)  # another criuctl may have made it since we looked
        if data is None:
            raise StoreNotInitialised(f"there is no criuctl store in {store.url}")
    body = _parse(data)
    if body["encryption"] == "none":
        keys.refuse_downgrade(body["id"], config)
        sealer = Sealer(_hex(body.get("key"), KEY_SIZE), encrypted=False)
        opened = None
    else:
        opened = find(body.get("slots", []), body["id"], config)
        sealer = Sealer(opened.master, encrypted=True)
    mac = body.pop("mac", None)
    if not isinstance(mac, str) or not secrets.compare_digest(mac.encode(), _mac(body, sealer).encode()):
        if opened is not None and opened.slot == "master":
            raise WrongKey(f"the master key in {opened.source} is not that of store {body['id'][:12]}")
        raise _damaged("its checksum does not fit")
    return _understood(body, sealer), opened


def _parse(data: bytes) -> dict[str, Any]:
    """The config's JSON, its version and its shape checked; values that the mac covers are trusted later."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged("it is not JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UnsupportedFormat("the object `config` is not that of a criuctl store", hint="Name another prefix or folder.")
    version = body.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise _damaged("it has no version")
    features = body.get("features")
    if version > VERSION or version < 1 or not isinstance(features, list) or features:
        needs = f", features {', '.join(map(str, features))}" if isinstance(features, list) and features else ""
        raise UnsupportedFormat(
            f"the store has format {version}{needs}; this criuctl reads format {VERSION}",
            hint="Use the criuctl that made it, or a newer one.",
        )
    slots, encryption = body.get("slots", []), body.get("encryption")
    if encryption not in ("none", "aes-256-gcm"):
        raise UnsupportedFormat(f"the store is encrypted by {str(encryption)[:40]!r}, which this criuctl does not know")
    _hex(body.get("id"), 16)
    if not isinstance(slots, list) or len(slots) > 64 or not all(isinstance(slot, dict) for slot in slots):
        raise _damaged("its key slots are not valid")
    return body


def _understood(body: Mapping[str, Any], sealer: Sealer) -> StoreConfig:
    can = body.get("capabilities")
    if not isinstance(can, dict) or not isinstance(can.get("conditional_create"), bool):
        raise _damaged("it does not say what the store can do")
    return StoreConfig(
        id=body["id"],
        encrypted=sealer.encrypted,
        capabilities=Capabilities(can["conditional_create"], str(can.get("kind", ""))),
        created=str(body.get("created", "")),
        sealer=sealer,
        slots=tuple(body.get("slots", ())),
        version=body["version"],
    )


def _mac(body: Mapping[str, Any], sealer: Sealer) -> str:
    rest = {key: value for key, value in body.items() if key != "mac"}
    return keyed_hash(sealer.config_key, json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hex()


def _hex(value: Any, size: int) -> bytes:
    try:
        raw = bytes.fromhex(value)
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != size or value != raw.hex():
        raise _damaged("an id or key in it is not valid")
    return raw


def _fetch(store: Store) -> bytes | None:
    try:
        size = store.stat(NAME).size
        if size > _MAX_SIZE:
            raise _damaged(f"it has {size} bytes")
        return store.get(NAME)
    except ObjectMissing:
        return None


def _put(store: Store, data: bytes) -> None:
    try:
        store.put(NAME, data, if_absent=True)
    except (ObjectExists, StoreUnreachable) as error:
        if _fetch(store) == data:
            return
        if isinstance(error, ObjectExists):
            raise _exists(store) from None
        raise


def _surely_absent(store: Store, data: bytes) -> bool:
    try:
        return _fetch(store) != data
    except Exception:
        return False


def _empty_folder(store: Store) -> bool:
    """Whether `store` is a local folder that does not exist, or holds nothing."""
    from ..store.local import LocalStore

    if not isinstance(store, LocalStore):
        return False
    try:
        return all(name in _OURS or name.startswith(PROBE_PREFIX) for name in os.listdir(store.url))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _exists(store: Store) -> Conflict:
    return Conflict(f"there is a criuctl store in {store.url} already", hint="It was left as it is: see `criuctl store info`.")


def _damaged(what: str) -> Damaged:
    return Damaged(f"the store's config is damaged: {what}", hint="Bring back a copy of the object `config`.", object=NAME)
