"""The keys that open a store: key files, passphrases, recovery keys, and their slots.

A store has one random master key, which never changes. Each *slot* in the store's config holds the
master key sealed by a secret that a person keeps: a key file (32 random bytes), a passphrase
(scrypt) or a recovery key (`recovery`). Opening one slot gives the master key, which is then
checked against the whole config. `generations` adds and removes slots.

Keys are looked for in this order, and the first that exists is used:

1. the variable ``CRIUCTL_RECOVERY_KEY`` (for a store that has recovery keys)
2. `Config.key_file` (``CRIUCTL_KEY_FILE``; ``-`` asks, or reads a line of standard input)
3. the file ``<store id>.key`` in `Config.key_dir`
4. `Config.passphrase_file`, then `Config.passphrase_command`
5. the variable ``CRIUCTL_PASSPHRASE``

A file in `Config.key_dir` that does not open the store is skipped where there is a passphrase. A
file may also hold a recovery key. A file with a secret that other users can read or write is
refused.

A file may also hold the key of a write-only host (`writer_keys`), which opens no slot: such a host
has no master key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import (
    CommandFailed,
    Conflict,
    Damaged,
    KeyMissing,
    PlatformError,
    TimedOut,
    UnsupportedFormat,
    WrongKey,
)
from ..proc.folders import make_private
from ..quoting import quoted
from . import recovery
from .codec import KEY_SIZE, derive, fingerprint
from .records import Confidential
from .writer_keys import WriterKey

PASSPHRASE_VARIABLE = "CRIUCTL_PASSPHRASE"
RECOVERY_VARIABLE = "CRIUCTL_RECOVERY_KEY"
ASKED = "-"  # as the name of a key file: the key is typed

_KEY_LINE = "criuctl key 1"
_WRITER_LINE = "criuctl writer key "
_MASTER_LINE = "criuctl master key 1"
_SLOT = "criuctl 2026-11 key slot"
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1}  # 32 MiB, about 0.1 s
_SCRYPT_LIMIT = 1 << 30  # bytes; a slot whose scrypt parameters need more memory is refused
_MAX_SECRET_FILE = 4096


class KeyText(Confidential, frozen=True):
    """The content of a key file: the secret that opens a slot, or an exported master key."""

    key: bytes
    master: bool = False
    recovery: bool = False

    @property
    def slot(self) -> str:
        """The kind of slot that the key opens: file or recovery; "master" for a master key, which
        needs none.
        """
        return "master" if self.master else "recovery" if self.recovery else "file"

    def text(self) -> str:
        """Return the file's content."""
        if self.recovery:
            return recovery.to_text(self.key) + "\n"
        line = _MASTER_LINE if self.master else _KEY_LINE
        return f"{line}\n{base64.b64encode(self.key).decode()}\n"

    @classmethod
    def parse(cls, text: bytes, where: str) -> KeyText:
        """Parse a key file's content; raise `WrongKey` if it is not one."""
        lines = text.decode("ascii", "replace").split("\n")
        if lines[0].startswith(_WRITER_LINE):
            raise WrongKey(
                f"{where} is the key of a write-only host, which cannot read what is stored",
                hint="Name another key file: this needs one that opens the store.",
            )
        if lines[0] not in (_KEY_LINE, _MASTER_LINE):
            if lines[0].startswith(("criuctl key ", "criuctl master key ")):
                raise UnsupportedFormat(f"{where} is a key file of a newer criuctl: {lines[0]}")
            if recovery.looks_like(typed := text.decode("utf-8", "replace")):
                return cls(recovery.from_text(typed, where), recovery=True)
            raise WrongKey(
                f"{where} is no key file of criuctl", hint=f"Its first line must be {_KEY_LINE!r}."
            )
        try:
            key = base64.b64decode(lines[1], validate=True)
        except (IndexError, binascii.Error):
            key = b""
        if len(key) != KEY_SIZE or any(lines[2:]):
            raise WrongKey(f"{where} is a damaged key file", hint="Bring a copy of it back.")
        return cls(key, lines[0] == _MASTER_LINE)


def new_key_file(path: Path) -> KeyText:
    """Make a key file, 0600 in a 0700 folder, durable; an existing one is read and used as
    it is.
    """
    key = KeyText(secrets.token_bytes(KEY_SIZE))
    try:
        write_secret(path, key.text())
    except FileExistsError:
        return KeyText.parse(read_secret(path), str(path))
    return key


def write_secret(path: Path, text: str) -> None:
    """Write a new file that only its owner can read; raise `FileExistsError`."""
    try:
        if not path.parent.exists():  # otherwise the operator chose this folder: leave its mode
            make_private(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise KeyMissing(
            f"the key file {path} cannot be written: {error.strerror}",
            hint="Give another --key-file.",
        ) from error
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise KeyMissing(
            f"the key file {path} cannot be written: {error.strerror}",
            hint="Give another --key-file.",
        ) from error


def read_secret(path: Path) -> bytes:
    """Return the content of a small file that only this user can read; raise `KeyMissing`, which
    says what is wrong.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise KeyMissing(f"{path} is no regular file", hint="Name the key file itself.")
        with os.fdopen(fd, "rb") as file:
            if found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
                raise KeyMissing(
                    f"{path} is not used: others than its owner may read or change it",
                    hint=f"`chmod 600 {quoted(path)}`, and find out which users have read it.",
                )
            return file.read(_MAX_SECRET_FILE)
    except OSError as error:
        raise KeyMissing(
            f"{path} cannot be read: {error.strerror}",
            hint="Bring the file back, or name another one.",
        ) from error


# -- slots
# --------------------------------------------------------------------------------------------


def file_slot(master: bytes, key: KeyText, store_id: str) -> dict[str, Any]:
    """Return the slot that the key file or recovery key `key` opens."""
    kind = key.slot
    return {
        "type": kind,
        "fingerprint": fingerprint(key.key),
        "wrapped": _wrap(key.key, master, f"{kind} {store_id}"),
    }


def passphrase_slot(master: bytes, passphrase: bytes, store_id: str) -> dict[str, Any]:
    """Return the slot that `passphrase` opens."""
    slot: dict[str, Any] = {
        "type": "passphrase",
        "kdf": "scrypt",
        **_SCRYPT,
        "salt": secrets.token_hex(16),
    }
    return {**slot, "wrapped": _wrap(_stretch(slot, passphrase), master, f"passphrase {store_id}")}


def slot_fingerprint(slot: dict[str, Any]) -> str:
    """Return the name of a slot: its key's fingerprint, or for a passphrase slot a hash of the
    slot.
    """
    recorded = slot.get("fingerprint")
    return recorded if isinstance(recorded, str) else fingerprint(str(slot.get("wrapped")).encode())


def _stretch(slot: dict[str, Any], passphrase: bytes) -> bytes:
    try:
        n, r, p = (int(slot[key]) for key in ("n", "r", "p"))
        salt = bytes.fromhex(slot["salt"])
        if (
            slot["kdf"] != "scrypt"
            or 128 * n * r > _SCRYPT_LIMIT
            or not 1 <= p <= 16
            or n < 2
            or r < 1
        ):
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
            "a passphrase slot in the store's config is not valid", object="config"
        ) from None


def _wrap(key: bytes, master: bytes, associated: str) -> str:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(12)
    sealed = AESGCM(derive(key, _SLOT)).encrypt(nonce, master, associated.encode())
    return base64.b64encode(nonce + sealed).decode()


def _unwrap(key: bytes, slot: dict[str, Any], associated: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        sealed = base64.b64decode(slot["wrapped"], validate=True)
        return AESGCM(derive(key, _SLOT)).decrypt(sealed[:12], sealed[12:], associated.encode())
    except (KeyError, TypeError, ValueError, InvalidTag):
        return None


# -- looking for the key
# --------------------------------------------------------------------------------


class Opened(Confidential, frozen=True):
    """A master key and how it was obtained; or, without a master key, the key of a
    write-only host.
    """

    master: bytes
    source: str  # for messages: a path, or the name of a setting
    key: KeyText  # the key to export: it opens the store as well
    slot: str = ""  # file | passphrase | recovery | master | writer
    file: Path | None = None
    by: dict[str, Any] | None = None  # the slot, if a slot was opened
    writer: WriterKey | None = None


# arguments: slots, id of the store, configuration
Finder = Callable[[list[dict[str, Any]], str, Config], Opened]


def key_path(config: Config, store_id: str) -> Path:
    """Return the default path of a store's key file."""
    return Path(config.key_dir) / f"{store_id}.key"


def find_master(slots: list[dict[str, Any]], store_id: str, config: Config) -> Opened:
    """Open a slot with the key that the configuration gives; raise `KeyMissing` or `WrongKey`."""
    if (typed := os.environ.get(RECOVERY_VARIABLE)) and _has_recovery(slots):
        key = KeyText(recovery.from_text(typed, RECOVERY_VARIABLE), recovery=True)
        return open_by_key(slots, store_id, key, RECOVERY_VARIABLE)
    if config.key_file == ASKED:
        return open_by_file(slots, store_id, Path(ASKED))
    default = key_path(config, store_id)
    phrase_slots = [slot for slot in slots if slot.get("type") == "passphrase"]
    passed: WrongKey | None = None
    if config.key_file or os.path.lexists(default):
        try:
            return open_by_file(
                slots, store_id, Path(config.key_file) if config.key_file else default
            )
        except WrongKey as error:
            if config.key_file or not phrase_slots:
                raise
            passed = error
    phrase, source = find_passphrase(config)
    if phrase is None or not phrase_slots:
        if passed is not None:
            raise passed
        raise KeyMissing(
            f"store {store_id[:12]} is encrypted, and its key was not found",
            hint=f"Bring its key file to {default}, or name it by key_file or CRIUCTL_KEY_FILE"
            + (
                ", or give passphrase_file, passphrase_command or CRIUCTL_PASSPHRASE."
                if phrase_slots
                else "."
            )
            + (
                f" Its recovery key opens it, too: {RECOVERY_VARIABLE}, or CRIUCTL_KEY_FILE=-."
                if _has_recovery(slots)
                else ""
            ),
        )
    return open_by_passphrase(slots, store_id, phrase, source)


def open_by_file(slots: list[dict[str, Any]], store_id: str, path: Path) -> Opened:
    """Open a slot with the key file, exported master key or recovery key in `path`; ``-`` asks for
    a recovery key.
    """
    if str(path) == ASKED:
        return open_by_key(slots, store_id, typed_key(), "standard input")
    text = read_secret(path)
    if text.startswith(_WRITER_LINE.encode()):
        return _open_by_writer(slots, store_id, text, path)
    return open_by_key(slots, store_id, KeyText.parse(text, str(path)), str(path), path)


def _open_by_writer(slots: list[dict[str, Any]], store_id: str, text: bytes, path: Path) -> Opened:
    key = WriterKey.parse(text, str(path))
    if key.store.hex() != store_id:
        raise WrongKey(
            f"the key in {path} is that of a write-only host of another store than {store_id[:12]}"
        )
    for slot in slots:
        if (slot.get("type"), slot.get("id")) == ("writer", key.id.hex()):
            return Opened(b"", str(path), KeyText(b""), "writer", path, slot, key)
    raise WrongKey(
        f"the key in {path} (fingerprint {key.fingerprint}) was removed from store "
        f"{store_id[:12]}: this host may write no more",
        hint="`criuctl key list` shows the store's keys, on a host that has the store's key.",
    )


def open_by_key(
    slots: list[dict[str, Any]], store_id: str, key: KeyText, source: str, path: Path | None = None
) -> Opened:
    """Open a slot with a key that was read from `source`."""
    if key.master:
        return Opened(key.key, source, key, "master", path)
    if (found := _opening(slots, store_id, key.slot, key.key)) is not None:
        # A recovery key is kept on paper and never written to a file: the master key is exported
        # instead.
        keep = KeyText(found[0], master=True) if key.recovery else key
        return Opened(found[0], source, keep, key.slot, path, found[1])
    what = "the recovery key" if key.recovery else "the key"
    expected = fingerprints(slots, key.slot)
    raise WrongKey(
        f"{what} in {source} (fingerprint {fingerprint(key.key)}) does not open store "
        f"{store_id[:12]}",
        hint=f"The store wants {what} with fingerprint {', '.join(expected)}."
        if expected
        else _other_kinds(slots, key.slot),
    )


def open_by_passphrase(
    slots: list[dict[str, Any]], store_id: str, phrase: bytes, source: str
) -> Opened:
    """Open a slot with a passphrase."""
    for slot in slots:
        if (found := _opening([slot], store_id, "passphrase", phrase)) is not None:
            return Opened(found[0], source, KeyText(found[0], master=True), "passphrase", by=slot)
    raise WrongKey(f"the passphrase from {source} does not open store {store_id[:12]}")


def _opening(
    slots: Sequence[dict[str, Any]], store_id: str, kind: str, secret: bytes
) -> tuple[bytes, dict[str, Any]] | None:
    """Return the master key and the first slot of the kind that `secret` opens."""
    for slot in slots:
        if slot.get("type") == kind:
            key = _stretch(slot, secret) if kind == "passphrase" else secret
            if (master := _unwrap(key, slot, f"{kind} {store_id}")) is not None:
                return master, slot
    return None


def _has_recovery(slots: Sequence[dict[str, Any]]) -> bool:
    return any(slot.get("type") == "recovery" for slot in slots)


def _other_kinds(slots: Sequence[dict[str, Any]], kind: str) -> str:
    names = {"file": "a key file", "passphrase": "a passphrase", "recovery": "its recovery key"}
    wanted = [
        name
        for other, name in names.items()
        if other != kind and any(slot.get("type") == other for slot in slots)
    ]
    return f"The store wants {' or '.join(wanted) or 'a key that this criuctl does not know'}."


@cache
def typed_key() -> KeyText:
    """Return the typed key, asked once per process; without a terminal, a line of standard
    input.
    """
    import sys
    from getpass import getpass

    if sys.stdin is not None and sys.stdin.isatty():
        typed = getpass("Recovery key of the store: ")
    else:
        typed = sys.stdin.readline(_MAX_SECRET_FILE) if sys.stdin is not None else ""
    if not typed.strip():
        raise KeyMissing(
            "no key was given on standard input",
            hint="Type the recovery key of the store, on one line.",
        )
    return KeyText(recovery.from_text(typed, "standard input"), recovery=True)


def fingerprints(slots: Sequence[dict[str, Any]], kind: str = "file") -> list[str]:
    """Return the fingerprints of the keys that open these slots: key files, or another kind."""
    return [str(slot.get("fingerprint")) for slot in slots if slot.get("type") == kind]


def opened_by_key(slots: list[dict[str, Any]], store_id: str, key: bytes) -> bytes | None:
    """Return the master key if the key of a key file opens one of the slots."""
    found = _opening(slots, store_id, "file", key)
    return found and found[0]


def opened_by_passphrase(
    slots: list[dict[str, Any]], store_id: str, passphrase: bytes
) -> bytes | None:
    """Return the master key if the passphrase opens one of the slots."""
    found = _opening(slots, store_id, "passphrase", passphrase)
    return found and found[0]


def find_passphrase(config: Config) -> tuple[bytes | None, str]:
    """Return the passphrase that the configuration gives, if any, and its source."""
    if config.passphrase_file:
        return read_secret(Path(config.passphrase_file)).rstrip(b"\r\n"), config.passphrase_file
    if config.passphrase_command:
        return _of_command(config.passphrase_command), "passphrase_command"
    if PASSPHRASE_VARIABLE in os.environ:
        return os.environb[PASSPHRASE_VARIABLE.encode()], PASSPHRASE_VARIABLE
    return None, ""


def _of_command(line: str) -> bytes:
    """Return the output of the passphrase command. Both the command line and its output may hold
    secrets, so no error repeats them.
    """
    from ..proc.command import run

    why = ""
    try:
        done = run(shlex.split(line), timeout=60, check=False)
        if not done.returncode:
            return done.stdout.rstrip(b"\r\n")
        why = f"it ended with {done.returncode}"
    except ValueError:
        why = "a quote is missing in it"
    except TimedOut:
        why = "it was not done in 60 s"
    except (CommandFailed, PlatformError):
        why = "it cannot be run"
    raise KeyMissing(
        f"passphrase_command gave no passphrase: {why}",
        hint="It must print the passphrase and exit with 0. Run it by hand to see its output.",
    )


def passphrase_source(config: Config) -> str:
    """Return the source that `find_passphrase` would use, without reading it; "" for none."""
    if config.passphrase_file or config.passphrase_command:
        return config.passphrase_file or "passphrase_command"
    return PASSPHRASE_VARIABLE if PASSPHRASE_VARIABLE in os.environ else ""


def refuse_downgrade(store_id: str, config: Config) -> None:
    """Refuse a store that says it is not encrypted while this host has a key for it: it may have
    been tampered with.
    """
    known = config.key_file or (
        str(key_path(config, store_id)) if key_path(config, store_id).exists() else ""
    )
    if known:
        raise Conflict(
            f"store {store_id[:12]} says that it is not encrypted, but there is a key for it: "
            f"{known}",
            hint=(
                "The store's config object may have been replaced. If the store is meant to be "
                "plain, take the key away."
            ),
        )
