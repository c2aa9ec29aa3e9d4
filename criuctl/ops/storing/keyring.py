"""The keys of an open store: adding a key, checking that it opens the store, removing a key.

The operations are in `criuctl.ops.store_keys`; this module has the steps that they share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...checkpoint import key_files, key_slots, keys, writer_keys
from ...checkpoint.configobject import WRITER
from ...checkpoint.key_generations import Changer, Current, Slots, described
from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import AmbiguousRef, Conflict, CriuctlError, NotFound, UsageError, WrongKey
from ...quoting import quoted
from ...store import open_store

Slot = dict[str, Any]
REPLACED = "replaced_by"  # the field of a slot that names the slot which is about to replace it
_PREFIX = 4  # digits of a fingerprint that name a key
_MAX_LABEL = 100


class KeyFacts(Struct, frozen=True):
    """The facts about a key of a store that may be shown."""

    fingerprint: str
    # file | passphrase | recovery | writer: a write-only host's, which does not open the store
    kind: str
    label: str
    created: str
    used: bool  # it opened the store just now

    def to_dict(self) -> dict[str, Any]:
        """Return one entry of the list."""
        return {
            name: getattr(self, name)
            for name in ("fingerprint", "kind", "label", "created", "used")
        }


@dataclass(slots=True)
class KeyChange:
    """The result of a change of the keys."""

    store: str
    id: str
    keys: list[KeyFacts] = field(default_factory=list)  # all, afterwards
    generation: int = 0
    added: list[str] = field(default_factory=list)  # fingerprints
    removed: list[str] = field(default_factory=list)
    file: str | None = None  # the path of the new key
    made: bool = False  # the file did not exist before
    previous: str | None = None  # the path to which the old key file was moved
    removed_writer: bool = False  # the removed key is a write-only host's
    recovery_key: str | None = field(default=None, repr=False)
    warnings: list[str] = field(default_factory=list)

    @property
    def degraded(self) -> bool:
        """Return whether the change was made but some optional part of it failed."""
        return bool(self.warnings)

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object; ``recovery_key`` only where there is a new one."""
        body = {
            name: getattr(self, name)
            for name in ("store", "id", "generation", "added", "removed", "file", "previous")
        }
        body |= {"keys": [one.to_dict() for one in self.keys], "warnings": self.warnings}
        return body | ({"recovery_key": self.recovery_key} if self.recovery_key else {})


@dataclass(frozen=True, slots=True)
class NewKey:
    """The key to add: a key file (made if it does not exist; None: this host's own), or a
    passphrase.

    With `write_only` it is a writer key in `file`, with which a host can only add to the store.
    """

    file: Path | None = None
    passphrase: bytes | None = field(default=None, repr=False)
    label: str = ""
    write_only: bool = False


class Keyring:
    """The keys of an open store; made by `of`."""

    def __init__(self, repository: Repository) -> None:
        self.changer: Changer = repository.key_changer()
        opened = repository.opened
        assert opened is not None  # `key_changer` has checked it
        self.opened, self.master, self.id = opened, opened.master, repository.id
        self.slots: Slots = list(repository.about.slots)
        self.shown: list[Slot] = [opened.by] if opened.by is not None else []
        self._repository = repository

    @classmethod
    @contextmanager
    def of(cls, config: Config) -> Iterator[Keyring]:
        """Yield the keys of the configured store."""
        store = open_store(config.store, config)
        try:
            with Repository.open(store, config) as repository:
                yield cls(repository)
        finally:
            store.close()

    def show(self, opened: keys.Opened) -> None:
        """Record another key that opens the store."""
        if opened.by is None:
            raise UsageError(
                f"what is in {opened.source} is the exported master key, which is none of the "
                "store's keys"
            )
        if opened.master != self.master:
            raise WrongKey(f"the key in {opened.source} does not open store {self.id[:12]}")
        self.shown.append(opened.by)

    def make(self, new: NewKey) -> tuple[Slot, Path | None, bool]:
        """Return a slot for a new key, which was checked to open the store; the key's file, and
        whether the file was made.
        """
        label = checked_label(new.label)
        if new.write_only and new.file is not None:
            return self._make_writer(new.file, label)
        if new.passphrase is not None:
            if not new.passphrase:
                raise WrongKey(
                    "the passphrase is empty", hint="Give a passphrase of several words."
                )
            slot = described(key_slots.passphrase_slot(self.master, new.passphrase, self.id), label)
            self.show(
                keys.open_by_passphrase([slot], self.id, new.passphrase, "the new passphrase")
            )
            return slot, None, False
        if str(new.file) == keys.ASKED:
            raise UsageError(
                "a new key cannot be typed",
                hint="`criuctl key recovery` makes one that can be written down.",
            )
        path = new.file or keys.key_path(self._repository.config, self.id)
        if new.file is None and os.path.lexists(path):
            # The file may hold a key that was removed from the store on purpose.
            raise Conflict(
                f"this host has a key file already: {path}",
                hint="`criuctl key rotate` replaces the key that is in use;"
                f" --key-file {quoted(path)} adds what is in that file.",
            )
        key, made = key_files.new_key_file(path)
        if key.master:
            raise WrongKey(
                f"{path} holds the exported master key of a store",
                hint="Name a new file, or a key file.",
            )
        slot = described(key_slots.file_slot(self.master, key, self.id), label)
        self.show(keys.open_by_key([slot], self.id, key, str(path), path))
        return slot, path, made

    def _make_writer(self, path: Path, label: str) -> tuple[Slot, Path, bool]:
        """Do the same for a write-only host; a key that an interrupted run left in the file is
        used.
        """
        key = writer_keys.enrol(self.master, self.id)
        try:
            key_files.write_secret(path, key.text())
            made = True
        except FileExistsError:
            made = False
            try:
                key = writer_keys.WriterKey.parse(key_files.read_secret(path), str(path))
                ours = key == writer_keys.writer_key(self.master, self.id, key.id)
            except WrongKey:
                ours = False
            if not ours:
                raise Conflict(
                    f"{path} exists, and is not the key of a write-only host of this store",
                    hint="Name a new file.",
                ) from None
        return described(key.slot(), label), path, made

    def discard(self, path: Path, slot: Slot) -> None:
        """Remove the file of a new key that was not added; keep it where that is not certain."""
        with suppress(CriuctlError):
            if slot not in self.changer.current().slots:
                path.unlink(missing_ok=True)

    def replaceable(self) -> Slot:
        """Return the slot that opened the store, if another one may replace it."""
        slot = self.opened.by
        if slot is None:
            raise UsageError(
                f"the store was opened by its exported master key in {self.opened.source}, which "
                "no change of keys concerns",
                hint=(
                    "`criuctl key add` adds a key; or open the store by the key that is to be "
                    "replaced."
                ),
            )
        if slot.get("type") == "recovery":
            raise UsageError(
                "the store was opened by its recovery key, which is not replaced by another kind "
                "of key",
                hint=(
                    "`criuctl key add` makes a key file for this host, `criuctl key recovery "
                    "--replace` a new recovery key."
                ),
            )
        return slot

    def replaced(self, slots: Slots) -> Slots:
        """Return the keys that this host's own key file has replaced, in a rotation that was
        interrupted before it removed them.
        """
        by = self.opened.by
        if by is None or self.opened.file != keys.key_path(self._repository.config, self.id):
            return []
        return [slot for slot in slots if slot.get(REPLACED) == key_slots.slot_fingerprint(by)]

    def see_not_removed(self, slots: Slots) -> None:
        """Raise `WrongKey` if the key that opened the store was removed meanwhile."""
        if self.opened.by is not None and key_slots.slot_fingerprint(self.opened.by) not in map(
            key_slots.slot_fingerprint, slots
        ):
            raise WrongKey(
                f"the key from {self.opened.source} was removed from the store meanwhile"
            )

    def without(self, slots: Slots, gone: Sequence[Slot]) -> Slots:
        """Return the remaining slots.

        Raise `Conflict` if none of them was seen to open the store.
        """
        names = set(map(key_slots.slot_fingerprint, gone))
        left = [slot for slot in slots if key_slots.slot_fingerprint(slot) not in names]
        if len(left) == len(slots):
            return slots
        if not left:
            raise Conflict(
                "this is the last key of the store",
                hint="Add another one first: `criuctl key add`.",
            )
        if not any(slot in left for slot in self.shown):
            raise Conflict(
                "no other key was seen to open the store, so it could be lost",
                hint="Open the store by one that stays (CRIUCTL_KEY_FILE=PATH, say), or show one "
                "to `criuctl key remove` by --other-key-file PATH (- asks for a recovery key) or "
                "--other-passphrase-file PATH.",
            )
        return left

    def facts(self, slots: Slots) -> list[KeyFacts]:
        """Return the facts about these keys that may be shown."""
        about = self._repository.about
        return [
            KeyFacts(
                key_slots.slot_fingerprint(slot),
                str(slot.get("type")),
                str(slot.get("label", "")),
                str(slot.get("created", about.created)),
                slot == self.opened.by,
            )
            for slot in slots
        ]

    def done(
        self,
        current: Current,
        *,
        added: Sequence[Slot] = (),
        removed: Sequence[Slot] = (),
        file: Path | None = None,
        made: bool = False,
        previous: Path | None = None,
    ) -> KeyChange:
        """Return the result of the change."""
        return KeyChange(
            self._repository.store.url,
            self.id,
            self.facts(current.slots),
            current.generation,
            [key_slots.slot_fingerprint(slot) for slot in added],
            [key_slots.slot_fingerprint(slot) for slot in removed],
            str(file) if file is not None else None,
            made,
            str(previous) if previous is not None else None,
            any(slot.get("type") == WRITER for slot in removed),
            warnings=list(self.changer.warnings),
        )


def named(slots: Slots, ref: str) -> Slot:
    """Return the slot with this label, or whose fingerprint begins so."""
    found = [slot for slot in slots if slot.get("label") == ref]
    if not found and len(ref) >= _PREFIX:
        found = [slot for slot in slots if key_slots.slot_fingerprint(slot).startswith(ref.lower())]
    if not found:
        raise NotFound(
            f"no key of the store is called {ref!r}",
            hint="`criuctl key list` shows labels and fingerprints.",
        )
    if len(found) > 1:
        raise AmbiguousRef(
            f"{len(found)} keys of the store are called {ref!r}",
            hint="Give more of the fingerprint.",
        )
    return found[0]


def checked_label(text: str) -> str:
    """Return `text` if it can be a label; raise `UsageError`."""
    if len(text) > _MAX_LABEL or not text.isprintable():
        raise UsageError(f"a label has at most {_MAX_LABEL} characters, all of them printable")
    return text


def refuse_known(slots: Slots, slot: Slot) -> None:
    """Raise `Conflict` if one of the slots is for the same key."""
    if slot["type"] == WRITER and slot["fingerprint"] in map(key_slots.slot_fingerprint, slots):
        raise Conflict(
            f"the write-only host with fingerprint {slot['fingerprint']} has been added already"
        )
    if slot["type"] != "passphrase" and slot["fingerprint"] in map(
        key_slots.slot_fingerprint, slots
    ):
        raise Conflict(
            f"the key with fingerprint {slot['fingerprint']} opens the store already",
            hint=(
                "`criuctl key rotate` replaces this host's key by a new one; --key-file names "
                "another file."
            ),
        )
