"""The key slots of a store: each holds the master key, sealed by one secret.

A slot is a mapping in the store's config. Its ``type`` names the kind of secret: ``file`` and
``recovery`` for 32 random bytes, ``passphrase`` for text, which scrypt stretches with the salt and
the parameters of the slot. The secret's key seals the master key with AES-256-GCM; the kind and the
store's id are associated data, so that a slot opens in no other store. Slots of the type ``writer``
hold no master key (`writer_keys`).

Slots come from the store, and nothing authenticates them before one of them opens: parameters of
scrypt that criuctl never chose, or that need too much memory, raise `Damaged`, and so do slots that
need too much time together (`bounded`). A slot that is malformed otherwise opens with no secret.
AES-GCM does not commit to its key: one ciphertext may open with several. A slot therefore has a
``commitment`` to the key. Older slots have none; for them the checksum of the config commits to the
master key, which differs for each key that such a ciphertext opens with.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import Damaged
from .codec import KEY_SIZE, derive, fingerprint
from .key_files import KeyText

_SLOT = "criuctl 2026-11 key slot"
_COMMITMENT = "criuctl 2026-11 key slot commitment"
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}  # 128 MiB, about 0.4 s
_SCRYPT_LEAST = 1 << 15  # n of the slots that older versions made
_SCRYPT_LIMIT = 1 << 30  # bytes; a slot whose scrypt parameters need more memory is refused
# n*r*p of all slots that one opening of a store tries: 64 slots of the present cost, about 30 s
_WORK_LIMIT = 64 * (1 << 20)
_work: ContextVar[list[int] | None] = ContextVar("work of scrypt", default=None)


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the work of scrypt within: a hostile store may have many generations of slots."""
    token = _work.set([0])
    try:
        yield
    finally:
        _work.reset(token)


def file_slot(master: bytes, key: KeyText, store_id: str) -> dict[str, Any]:
    """Return the slot that the key file or recovery key `key` opens."""
    kind = key.slot
    return {
        "type": kind,
        "fingerprint": fingerprint(key.key),
        **_wrap(key.key, master, f"{kind} {store_id}"),
    }


def passphrase_slot(master: bytes, passphrase: bytes, store_id: str) -> dict[str, Any]:
    """Return the slot that `passphrase` opens."""
    slot: dict[str, Any] = {
        "type": "passphrase",
        "kdf": "scrypt",
        **_SCRYPT,
        "salt": secrets.token_hex(16),
    }
    return {**slot, **_wrap(_stretch(slot, passphrase, []), master, f"passphrase {store_id}")}


def slot_fingerprint(slot: dict[str, Any]) -> str:
    """Return the name of a slot: its key's fingerprint, or for a passphrase slot a hash of the
    slot.
    """
    recorded = slot.get("fingerprint")
    return recorded if isinstance(recorded, str) else fingerprint(str(slot.get("wrapped")).encode())


def _stretch(slot: dict[str, Any], passphrase: bytes, work: list[int]) -> bytes:
    """Return the key of a slot; append what it costs to `work`, which is bounded."""
    try:
        n, r, p = (int(slot[key]) for key in ("n", "r", "p"))
        salt = bytes.fromhex(slot["salt"])
        if (
            slot["kdf"] != "scrypt"
            or 128 * n * r > _SCRYPT_LIMIT
            or not 1 <= p <= 16
            or n < _SCRYPT_LEAST
            or not 8 <= r <= 64
        ):
            raise ValueError
        work.append(n * r * p)
        if sum(work) > _WORK_LIMIT:
            raise ValueError
        return hashlib.scrypt(
            passphrase,
            salt=salt,
            n=n,
            r=r,
            p=p,
            maxmem=128 * r * (n + p + 2) + (1 << 20),
            dklen=KEY_SIZE,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Damaged(
            "a passphrase slot in the store's config is not valid, or all of them need too much "
            "time",
            hint="Open the store with a key file, and remove the slots: `criuctl key list`.",
            object="config",
        ) from None


def _wrap(key: bytes, master: bytes, associated: str) -> dict[str, str]:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(12)
    sealed = AESGCM(derive(key, _SLOT)).encrypt(nonce, master, associated.encode())
    return {
        "wrapped": base64.b64encode(nonce + sealed).decode(),
        "commitment": derive(key, _COMMITMENT).hex(),
    }


def _unwrap(key: bytes, slot: dict[str, Any], associated: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        commitment = slot.get("commitment")
        if commitment is not None and not secrets.compare_digest(
            bytes.fromhex(commitment), derive(key, _COMMITMENT)
        ):
            return None
        sealed = base64.b64decode(slot["wrapped"], validate=True)
        return AESGCM(derive(key, _SLOT)).decrypt(sealed[:12], sealed[12:], associated.encode())
    except (KeyError, TypeError, ValueError, InvalidTag):
        return None


def open_slot(
    slots: Sequence[dict[str, Any]], store_id: str, kind: str, secret: bytes
) -> tuple[bytes, dict[str, Any]] | None:
    """Return the master key and the first slot of the kind that `secret` opens."""
    bound = _work.get()
    work = [] if bound is None else bound
    for slot in slots:
        if slot.get("type") == kind:
            key = _stretch(slot, secret, work) if kind == "passphrase" else secret
            if (master := _unwrap(key, slot, f"{kind} {store_id}")) is not None:
                return master, slot
    return None


def has_recovery(slots: Sequence[dict[str, Any]]) -> bool:
    """Return whether a recovery key opens one of these slots."""
    return any(slot.get("type") == "recovery" for slot in slots)


def fingerprints(slots: Sequence[dict[str, Any]], kind: str = "file") -> list[str]:
    """Return the fingerprints of the keys that open these slots: key files, or another kind."""
    return [str(slot.get("fingerprint")) for slot in slots if slot.get("type") == kind]


def opened_by_key(slots: list[dict[str, Any]], store_id: str, key: bytes) -> bytes | None:
    """Return the master key if the key of a key file opens one of the slots."""
    found = open_slot(slots, store_id, "file", key)
    return found and found[0]


def opened_by_passphrase(
    slots: list[dict[str, Any]], store_id: str, passphrase: bytes
) -> bytes | None:
    """Return the master key if the passphrase opens one of the slots."""
    found = open_slot(slots, store_id, "passphrase", passphrase)
    return found and found[0]
