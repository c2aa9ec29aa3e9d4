"""Write-only hosts: the keys that they have, and how the store's key opens what they wrote.

A host that may be broken into need not be able to read what others have stored. A host with the
store's key makes a *writer key* for it, a file with

    the public half of the store's key pair    to seal for the store what only the store's key opens
    an id and a secret of its own              which prove that the host was enrolled
    the names key and the lists key            to name sessions, and to read the lists of garbage
                                               collections

and records it in a slot of the store's config, of the type ``writer``, that opens nothing. All of
it follows from the master key (the secret from the id), so nothing else is stored, and what a
removed writer has written stays readable.

What such a host writes is sealed by keys of a *domain* that it has made itself (`domains`). The
domain's master key is in

    writers/<32 hex, the domain's id>   8 s magic, u16 version, u16 zero, u32 zero,
                                        16 s the writer's id, 32 s ephemeral public key,
                                        48 s sealed master key

sealed by AES-256-GCM with a key that is derived from the X25519 secret of the ephemeral and the
store's key pair, both public keys, the writer's secret, and the ids of store, writer and domain.
With a public key alone, anyone who can put objects could add checkpoints that are restored, and
run, on other hosts: the writer's secret prevents that.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import struct
from typing import Any

from ..errors import Damaged, UnsupportedFormat, WrongKey
from .codec import KEY_SIZE, NAMES, TAG_SIZE, derive, fingerprint, keyed_hash
from .configobject import WRITER
from .records import Confidential

PREFIX = "writers/"
LINE = "criuctl writer key 1"
ID_SIZE = 16
MAGIC, VERSION = b"CRIUCTLW", 1
WRAPPED = struct.Struct(f"<8sHHI{ID_SIZE}s{KEY_SIZE}s{KEY_SIZE + TAG_SIZE}s")
_SEALED = KEY_SIZE + TAG_SIZE

_PAIR = "criuctl 2026-11 writers' key pair"
_SECRETS = "criuctl 2026-11 writers"
_LISTS = "criuctl 2026-11 lists"
_DOMAIN = "criuctl 2026-11 writer's domain"
_AGAIN = "The write-only host that made it puts it again when it dumps."
CONTEXTS = (_PAIR, _SECRETS, _LISTS, _DOMAIN)


class WriterKey(Confidential, frozen=True):
    """The content of a write-only host's key file."""

    store: bytes  # id
    public: bytes  # of the store's key pair
    id: bytes
    secret: bytes
    names: bytes
    lists: bytes

    def text(self) -> str:
        """Return the file's content."""
        content = b"".join((self.store, self.public, self.id, self.secret, self.names, self.lists))
        return f"{LINE}\n{base64.b64encode(content).decode()}\n"

    @classmethod
    def parse(cls, text: bytes, where: str) -> WriterKey:
        """Parse a key file's content, the inverse of `text`; raise `WrongKey`."""
        lines = text.decode("ascii", "replace").split("\n")
        if lines[0] != LINE and lines[0].startswith("criuctl writer key "):
            raise UnsupportedFormat(f"{where} is a key file of a newer criuctl: {lines[0]}")
        try:
            content = base64.b64decode(lines[1], validate=True)
        except (IndexError, binascii.Error):
            content = b""
        if lines[0] != LINE or len(content) != 2 * ID_SIZE + 4 * KEY_SIZE or any(lines[2:]):
            raise WrongKey(
                f"{where} is a damaged key file of a write-only host",
                hint="Bring a copy of it back.",
            )
        parts = []
        for size in (ID_SIZE, KEY_SIZE, ID_SIZE, KEY_SIZE, KEY_SIZE, KEY_SIZE):
            parts.append(content[:size])
            content = content[size:]
        return cls(*parts)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the secret, by which this key is shown and listed."""
        return fingerprint(self.secret)

    def slot(self) -> dict[str, Any]:
        """Return the slot for it in the store's config."""
        return {"type": WRITER, "id": self.id.hex(), "fingerprint": self.fingerprint}


def enrol(master: bytes, store_id: str) -> WriterKey:
    """Return a new writer key for the store."""
    return writer_key(master, store_id, secrets.token_bytes(ID_SIZE))


def writer_key(master: bytes, store_id: str, writer: bytes) -> WriterKey:
    """Return the key of the writer with this id, which follows from the master key."""
    return WriterKey(
        bytes.fromhex(store_id),
        _pair(master).public_key().public_bytes_raw(),
        writer,
        _secret(master, writer),
        derive(master, NAMES),
        lists_key(master),
    )


def lists_key(master: bytes) -> bytes:
    """Return the key that seals lists of packs in a store that has writers."""
    return derive(master, _LISTS)


def domain_of(name: str) -> bytes | None:
    """Return the id of the domain whose object is called `name`; None if it is not such a name."""
    text = name.removeprefix(PREFIX)
    try:
        domain = bytes.fromhex(text)
    except ValueError:
        return None
    return domain if len(domain) == ID_SIZE and domain.hex() == text and name != text else None


def wrap(key: WriterKey, domain: bytes, master: bytes) -> bytes:
    """Return the object with which the store's key opens the domain of this id and master key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    ephemeral = X25519PrivateKey.generate()
    shown = ephemeral.public_key().public_bytes_raw()
    shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(key.public))
    header = WRAPPED.pack(MAGIC, VERSION, 0, 0, key.id, shown, b"")[:-_SEALED]
    using = _wrapping(shared, shown, key.public, key.secret, key.store, key.id, domain)
    return header + AESGCM(using).encrypt(bytes(12), master, header)


def unwrap(master: bytes, store_id: str, name: str, data: bytes) -> bytes:
    """Return the master key of the domain whose object `name` holds `data`; raise `Damaged` when no
    enrolled writer has made it.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    domain = domain_of(name)
    if domain is None or len(data) < 12 or data[:8] != MAGIC:
        raise _broken(name)
    version = int.from_bytes(data[8:10], "little")
    if version != VERSION:
        raise UnsupportedFormat(
            f"{name} has format {version}; this criuctl reads {VERSION}",
            hint="Use the criuctl that wrote it, or a newer one.",
            object=name,
        )
    if len(data) != WRAPPED.size:
        raise _broken(name)
    writer, shown, sealed = WRAPPED.unpack(data)[4:]
    pair = _pair(master)
    try:
        shared = pair.exchange(X25519PublicKey.from_public_bytes(shown))
        public = pair.public_key().public_bytes_raw()
        using = _wrapping(
            shared, shown, public, _secret(master, writer), bytes.fromhex(store_id), writer, domain
        )
        return AESGCM(using).decrypt(bytes(12), sealed, data[:-_SEALED])
    except (ValueError, InvalidTag):
        raise _broken(name) from None


def author(data: bytes) -> bytes:
    """Return the id of the writer that made the object of a domain, which was unwrapped before."""
    writer: bytes = WRAPPED.unpack(data)[4]
    return writer


def _pair(master: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(derive(master, _PAIR))


def _secret(master: bytes, writer: bytes) -> bytes:
    return keyed_hash(derive(master, _SECRETS), writer)


def _wrapping(*parts: bytes) -> bytes:
    return derive(b"".join(parts), _DOMAIN)  # unambiguous: every part has a fixed size


def lost(name: str) -> Damaged:
    """Return the error for a domain's object that does not exist."""
    return Damaged(
        f"{name} is missing, which opens what a write-only host has stored",
        hint=_AGAIN,
        object=name,
    )


def _broken(name: str) -> Damaged:
    return Damaged(
        f"{name} is damaged, or no host that was enrolled has written it", hint=_AGAIN, object=name
    )
