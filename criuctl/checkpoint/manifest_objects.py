"""A manifest as an object of a store.

The object holds the summary in its head, for lists, and the manifest in its body, both sealed
(`objects`). Its name holds the session's token, the checkpoint's number and its id.

RULE: a checkpoint exists if and only if its manifest does. A manifest is put by one atomic put
under a name that holds the checkpoint's random id, so nothing is ever overwritten, whatever the
store guarantees.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import (
    Damaged,
    NoSuchCheckpoint,
    ObjectExists,
    ObjectMissing,
    StoreUnreachable,
    UnsupportedFormat,
)
from ..store import Store
from . import objects
from .catalog import load_json, manifest_name, parse_name
from .codec import Sealer
from .manifest import MANIFEST_VERSION, Manifest
from .summary import CheckpointSummary


def read(store: Store, sealer: Sealer, name: str) -> tuple[Manifest, bytes]:
    """Return the manifest that is the object `name`, and the domain that sealed it (empty for the
    store's own); raise `NoSuchCheckpoint`, `Damaged`, `UnsupportedFormat` or errors of the store.
    """
    _token, number, checkpoint = parse_name(name)
    try:
        data = store.get(name, objects.MANIFEST.limit)
    except ObjectMissing as error:
        raise NoSuchCheckpoint(f"checkpoint {checkpoint[:12]} was removed") from error
    outline = objects.layout(objects.MANIFEST, name, data, len(data))
    loaded = load_json(objects.open_body(name, outline, data, sealer), name, len(data))
    version = loaded.get("version")
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise UnsupportedFormat(
            f"{name} has manifest version {version}; this criuctl reads up to {MANIFEST_VERSION}"
        )
    manifest = Manifest.from_dict(loaded)
    if (manifest.number, manifest.id) != (number, checkpoint):
        raise Damaged(f"{name} holds the manifest of another checkpoint", object=name)
    return manifest, outline.domain


def write(
    store: Store, sealer: Sealer, manifest: Manifest, *, conditional: bool
) -> CheckpointSummary:
    """Put the manifest, whose number is set; return its summary. `conditional`: whether the store
    can create an object only if it is absent.
    """
    name = manifest_name(sealer.token(manifest.session.name), manifest.number, manifest.id)
    body = _json(manifest.to_dict())
    # A manifest that cannot be read back must not be written: this raises before the commit.
    Manifest.from_dict(json.loads(body))
    summary = CheckpointSummary.of(manifest, name)
    head = _json(summary.to_stored())
    data = objects.encode(objects.MANIFEST, name, head, body, sealer, manifest.features)
    put_once(store, name, data, conditional=conditional)
    return summary


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def put_once(store: Store, name: str, data: bytes, *, conditional: bool) -> None:
    """Put an object whose name no other writer can use; after a lost answer the store is asked what
    happened.
    """
    try:
        store.put(name, data, if_absent=conditional)
    except ObjectExists:
        if store.get(name) != data:
            raise
    except StoreUnreachable:
        try:
            if store.stat(name).size == len(data):
                return
        except ObjectMissing:
            pass
        raise
