"""The text of a store's config: JSON in the clear, its version, its shape and its checksum.

``version`` is checked before anything else. ``mac`` is a keyed hash of all the rest under a key
derived from the master key, so that the config cannot be changed without the key, and damage is
found. The same text is in the object ``config`` and in the generations under ``keys/``
(`key_generations`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ..errors import Damaged, ObjectMissing, UnsupportedFormat
from ..store import Store
from .codec import Sealer, keyed_hash

NAME = "config"
FORMAT = "criuctl store"
VERSION = 1
MAX_SLOTS = 64
WRITERS = "writers"  # the config key that says that there are, or have been, write-only hosts
WRITER = "writer"  # the type of their slots
MAX_GENERATION = 10**18
_MAX_SIZE = 1 << 20


def parse(data: bytes) -> dict[str, Any]:
    """Parse the config's JSON and check its version and shape; values that the mac covers are
    trusted later.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise damaged("it is not JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UnsupportedFormat(
            "the object `config` is not that of a criuctl store",
            hint="Name another prefix or folder.",
        )
    version = body.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise damaged("it has no version")
    features = body.get("features")
    if version > VERSION or version < 1 or not isinstance(features, list) or features:
        needs = (
            f", features {', '.join(map(str, features))}"
            if isinstance(features, list) and features
            else ""
        )
        raise UnsupportedFormat(
            f"the store has format {version}{needs}; this criuctl reads format {VERSION}",
            hint="Use the criuctl that made it, or a newer one.",
        )
    slots, encryption = body.get("slots", []), body.get("encryption")
    if encryption not in ("none", "aes-256-gcm"):
        raise UnsupportedFormat(
            f"the store is encrypted by {str(encryption)[:40]!r}, which this criuctl does not know"
        )
    as_bytes(body.get("id"), 16)
    if (
        not isinstance(slots, list)
        or len(slots) > MAX_SLOTS
        or not all(isinstance(slot, dict) for slot in slots)
    ):
        raise damaged("its key slots are not valid")
    generation = body.get("generation", 0)
    if (
        isinstance(generation, bool)
        or not isinstance(generation, int)
        or not 0 <= generation < MAX_GENERATION
    ):
        raise damaged("its generation is not valid")
    return body


def recognised(data: bytes) -> bool:
    """Return whether it is a store's config at all, of any version."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def text(body: Mapping[str, Any], sealer: Sealer) -> bytes:
    """Return the text of the config `body`, with its checksum."""
    return json.dumps({**body, "mac": _mac(body, sealer)}, indent=1).encode()


def fits(body: Mapping[str, Any], sealer: Sealer) -> bool:
    """Return whether the checksum is right, so that the config was written with the store's key."""
    mac = body.get("mac")
    return (
        isinstance(mac, str) and mac.isascii() and secrets.compare_digest(mac, _mac(body, sealer))
    )


def _mac(body: Mapping[str, Any], sealer: Sealer) -> str:
    rest = {key: value for key, value in body.items() if key != "mac"}
    return keyed_hash(
        sealer.config_key, json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    ).hex()


def as_bytes(value: Any, size: int) -> bytes:
    """Return the bytes of a hexadecimal field of the config."""
    try:
        raw = bytes.fromhex(value)
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != size or value != raw.hex():
        raise damaged("an id or key in it is not valid")
    return raw


def fetch(store: Store, name: str = NAME) -> bytes | None:
    """Return the object, or None if it does not exist."""
    try:
        return store.get(name, _MAX_SIZE)
    except ObjectMissing:
        return None
    except Damaged as error:
        raise damaged(error.message) from error


def damaged(what: str) -> Damaged:
    """Return the error for a config that criuctl has not written so."""
    return Damaged(
        f"the store's config is damaged: {what}",
        hint="Bring back a copy of the object `config`.",
        object=NAME,
    )
