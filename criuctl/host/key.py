"""The key of this host: with it criuctl recognises what this very host noted in a checkpoint.

It never leaves the state folder, so neither a writer of a store nor an owner of its key can forge
what is sealed with it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..config import Config
from ..errors import PreflightRefused
from ..proc.folders import make_private
from ..proc.ownership import check_own

_KEY = "predicates.key"  # in the state folder
_LENGTH = 32  # bytes


def seal(config: Config, text: str) -> str:
    """Return a MAC of `text`, hex; the key is made if there is none."""
    return _mac(_key(config, make=True), text)


def is_sealed(config: Config, text: str, mac: str) -> bool:
    """Return whether this host has sealed `text` with this MAC."""
    import hmac  # loads OpenSSL

    key = _key(config, make=False)
    return bool(key) and hmac.compare_digest(_mac(key, text), mac)


def _mac(key: bytes, text: str) -> str:
    from blake3 import blake3

    return blake3(text.encode("utf-8", "surrogateescape"), key=key).hexdigest()


def _key(config: Config, *, make: bool) -> bytes:
    """Return the key; empty if there is none, and none is to be made."""
    path = Path(config.state_dir) / _KEY
    check_own(path.parent)  # a user who could write the key could have criuctl run commands
    with suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == _LENGTH:
            return key
    if not make:
        return b""
    make_private(path.parent)
    temporary = path.with_name(f".{_KEY}.{os.getpid()}")
    try:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(os.urandom(_LENGTH))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)  # the first process that made it
    finally:
        temporary.unlink(missing_ok=True)
    key = path.read_bytes()
    if len(key) != _LENGTH:
        raise PreflightRefused(
            f"{path} is damaged",
            hint="Remove it; what was noted under it is then no longer this host's.",
        )
    return key
