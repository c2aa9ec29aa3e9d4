"""Finding the key that opens a store.

A store has one random master key, which never changes. Each *slot* in the store's config holds it
sealed by a secret that a person keeps (`key_slots`): a key file (`key_files`), a passphrase or a
recovery key (`recovery`). Opening one slot gives the master key, which is then checked against the
whole config. `key_generations` adds and removes slots.

Keys are looked for in this order, and the first that exists is used:

1. the variable ``CRIUCTL_RECOVERY_KEY`` (for a store that has recovery keys)
2. `Config.key_file` (``CRIUCTL_KEY_FILE``; ``-`` asks, or reads a line of standard input)
3. the file ``<store id>.key`` in `Config.key_dir`
4. `Config.passphrase_file`, then `Config.passphrase_command`
5. the variable ``CRIUCTL_PASSPHRASE``

A file in `Config.key_dir` that does not open the store is skipped where there is a passphrase. A
file may also hold a recovery key, or the key of a write-only host (`writer_keys`), which opens no
slot: such a host has no master key.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import CommandFailed, Conflict, KeyMissing, PlatformError, TimedOut, WrongKey
from . import recovery
from .codec import fingerprint
from .key_files import MAX_SECRET_FILE, WRITER_LINE, KeyText, read_secret
from .key_slots import fingerprints, has_recovery, open_slot
from .records import Confidential
from .writer_keys import WriterKey

PASSPHRASE_VARIABLE = "CRIUCTL_PASSPHRASE"
RECOVERY_VARIABLE = "CRIUCTL_RECOVERY_KEY"
ASKED = "-"  # as the name of a key file: the key is typed


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


def described(opened: Opened | None, slots: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe how a store was opened, by which of its slots, and the path of the key file, without
    revealing a key; None is a store that is not encrypted.
    """
    by = (opened.by or {}).get("fingerprint") if opened else None
    return {
        "kind": opened.slot if opened else "none",
        "file": str(opened.file) if opened and opened.file else None,
        "source": opened.source if opened else None,
        "fingerprint": fingerprint(opened.key.key) if opened and opened.slot == "file" else by,
        "slots": [{"type": s.get("type"), "fingerprint": s.get("fingerprint")} for s in slots],
    }


# arguments: slots, id of the store, configuration
Finder = Callable[[list[dict[str, Any]], str, Config], Opened]


def key_path(config: Config, store_id: str) -> Path:
    """Return the default path of a store's key file."""
    return Path(config.key_dir) / f"{store_id}.key"


def find_master(slots: list[dict[str, Any]], store_id: str, config: Config) -> Opened:
    """Open a slot with the key that the configuration gives; raise `KeyMissing` or `WrongKey`."""
    if (typed := os.environ.get(RECOVERY_VARIABLE)) and has_recovery(slots):
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
                if has_recovery(slots)
                else ""
            )
            + " `criuctl help key-lost` explains more.",
        )
    return open_by_passphrase(slots, store_id, phrase, source)


def open_by_file(slots: list[dict[str, Any]], store_id: str, path: Path) -> Opened:
    """Open a slot with the key file, exported master key or recovery key in `path`; ``-`` asks for
    a recovery key.
    """
    if str(path) == ASKED:
        return open_by_key(slots, store_id, typed_key(), "standard input")
    text = read_secret(path)
    if text.startswith(WRITER_LINE.encode()):
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
    if (found := open_slot(slots, store_id, key.slot, key.key)) is not None:
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
    if (found := open_slot(slots, store_id, "passphrase", phrase)) is not None:
        return Opened(found[0], source, KeyText(found[0], master=True), "passphrase", by=found[1])
    raise WrongKey(f"the passphrase from {source} does not open store {store_id[:12]}")


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
    from getpass import getpass

    if sys.stdin is not None and sys.stdin.isatty():
        typed = getpass("Recovery key of the store: ")
    else:
        typed = sys.stdin.readline(MAX_SECRET_FILE) if sys.stdin is not None else ""
    if not typed.strip():
        raise KeyMissing(
            "no key was given on standard input",
            hint="Type the recovery key of the store, on one line.",
        )
    return KeyText(recovery.from_text(typed, "standard input"), recovery=True)


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
