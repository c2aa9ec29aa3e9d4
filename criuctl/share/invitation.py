"""The line that lets a guest in: ``share://RELAY:PORT/ID#HOSTKEY.SECRET``.

HOSTKEY is the public key by which the guest recognises the keeper, so that the relay cannot stand
in for it. SECRET is the seed of the one-time key. It never travels: the guest proves that it has
it, by a signature that is valid in that one connection only. Both are Ed25519, 32 bytes in base64.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from msgspec import Struct

from ..errors import UsageError

if TYPE_CHECKING:
    import asyncssh

SCHEME = "share://"
_ALGORITHM = b"ssh-ed25519"
_KEY = "[A-Za-z0-9_-]{43}"
_LINE = re.compile(
    r"share://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}):(?P<port>[0-9]{1,5})"
    rf"/(?P<id>[0-9a-f]{{8}})#(?P<key>{_KEY})\.(?P<secret>{_KEY})"
)


class Invitation(Struct, frozen=True):
    """An invitation; `host` is without brackets."""

    host: str
    port: int
    id: str
    host_key: bytes
    secret: bytes

    @property
    def name(self) -> str:
        """The name under which a guest's page lists it."""
        return f"share-{self.id}"

    @classmethod
    def parse(cls, line: str) -> Invitation:
        """Parse a line; `UsageError`, which does not repeat it."""
        found = _LINE.fullmatch(line.strip())
        if found is None or not 0 < int(found["port"]) < 65536:
            raise UsageError(
                "this is no invitation of `criuctl share`",
                hint="Paste the whole line, in quotes: share://HOST:PORT/ID#KEY.SECRET.",
            )
        return cls(
            found["host"].strip("[]"),
            int(found["port"]),
            found["id"],
            decode(found["key"]),
            decode(found["secret"]),
        )

    def line(self) -> str:
        """Return the line to paste."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        keys = f"{encode(self.host_key)}.{encode(self.secret)}"
        return f"{SCHEME}{host}:{self.port}/{self.id}#{keys}"


def encode(raw: bytes) -> str:
    """Return 32 bytes as text for a line or a user's name."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode(text: str) -> bytes:
    """Return the bytes of a text of `encode`; `ValueError`."""
    if re.fullmatch(_KEY, text) is None:
        raise ValueError("not 32 bytes in base64")
    return base64.urlsafe_b64decode(text + "=")


def private_key(seed: bytes) -> asyncssh.SSHKey:
    """Return the private key of this seed."""
    import asyncssh
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed)
    return asyncssh.import_private_key(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )


def public_key(raw: bytes) -> asyncssh.SSHKey:
    """Return the public key of these 32 bytes."""
    import asyncssh

    wire = b"".join(len(part).to_bytes(4, "big") + part for part in (_ALGORITHM, raw))
    return asyncssh.import_public_key(_ALGORITHM + b" " + base64.b64encode(wire))


def raw_key(key: asyncssh.SSHKey) -> bytes:
    """Return the 32 bytes of an Ed25519 key; b"" for a key of another kind."""
    wire = key.public_data
    head = len(_ALGORITHM).to_bytes(4, "big") + _ALGORITHM + (32).to_bytes(4, "big")
    return wire[len(head) :] if wire.startswith(head) else b""
