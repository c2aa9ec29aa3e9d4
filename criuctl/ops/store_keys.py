"""The keys of a store: listing, adding, removing and replacing them; and its write-only hosts.

Only the set of secrets that open the store changes (`criuctl.checkpoint.key_generations`); the
master key, and so every pack, stays the same.

RULE: a change of keys never locks its caller out. A new key is made, durable and checked to open
the store before it is published. A change is refused if no key would be left that was seen to open
the store in this very call: the key that opened it, another one that was shown, or a new one that
is already saved. A new recovery key does not count: it is not written down yet.

`rotate` of this host's own key file takes three steps: the new key is added, the file is replaced,
then the old key is removed. If it is interrupted anywhere, the key in the file opens the store, and
another run, or `tidy`, continues with the key that was made: the old slot names its replacement.
The old file stays next to the new one, since checkpoints that were exported for it still need it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoint import key_files, key_slots, keys, recovery
from ..checkpoint.key_generations import Slots, described
from ..config import Config
from ..errors import Conflict, KeyMissing, UsageError, WrongKey
from ..host.journal import events, operation_facts
from .storing.keyring import (
    REPLACED,
    KeyChange,
    KeyFacts,
    Keyring,
    NewKey,
    Slot,
    checked_label,
    named,
    refuse_known,
)


def key_list(config: Config) -> tuple[list[KeyFacts], list[str]]:
    """Return the keys that open the store, and their facts."""
    with Keyring.of(config) as the:
        current = the.changer.current()
        notes = []
        if not the.changer.settled():
            notes.append(
                "older slots are still in the store: an earlier change was cut off, and `criuctl "
                "key tidy` finishes it"
            )
        if the.replaced(current.slots):
            notes.append(
                "an earlier rotation was cut off: `criuctl key tidy` removes the key that it has "
                "replaced"
            )
        return the.facts(current.slots), notes


@events.recorded("key-add", operation_facts.nothing_more)
def key_add(config: Config, new: NewKey) -> KeyChange:
    """Add one more key to the store."""
    with Keyring.of(config) as the:
        slot, path, made = the.make(new)

        def change(slots: Slots) -> Slots:
            the.see_not_removed(slots)
            if slot in slots:
                return slots
            refuse_known(slots, slot)
            return [*slots, slot]

        try:
            current = the.changer.change(change)
        except (Conflict, WrongKey):
            if made and path is not None:
                the.discard(path, slot)
            raise
        return the.done(current, added=[slot], file=path, made=made)


@events.recorded("key-remove", operation_facts.nothing_more)
def key_remove(
    config: Config,
    ref: str,
    *,
    other_key_file: Path | None = None,
    other_passphrase: bytes | None = None,
) -> KeyChange:
    """Remove a key from the store; `ref` is its label or the beginning of its fingerprint.

    The one that opens the store is removed only if another one is shown.
    """
    with Keyring.of(config) as the:
        if other_key_file is not None:
            the.show(keys.open_by_file(the.slots, the.id, other_key_file))
        elif other_passphrase is not None:
            the.show(
                keys.open_by_passphrase(the.slots, the.id, other_passphrase, "the other passphrase")
            )
        gone: list[Slot] = []

        def change(slots: Slots) -> Slots:
            if not gone:
                gone.append(named(slots, ref))
            return the.without(slots, gone)

        return the.done(the.changer.change(change), removed=gone)


@events.recorded("key-rotate", operation_facts.nothing_more)
def key_rotate(config: Config, new: NewKey) -> KeyChange:
    """Replace the key that opens the store here by a new one."""
    with Keyring.of(config) as the:
        old = the.replaceable()
        if new.file is None and new.passphrase is None:
            return _rotate_own_file(the, config, old, new.label)
        slot, path, made = the.make(new)

        def change(slots: Slots) -> Slots:
            if slot in slots:
                return the.without(slots, [old])
            refuse_known(slots, slot)
            the.see_not_removed(slots)
            return [
                slot if key_slots.slot_fingerprint(one) == key_slots.slot_fingerprint(old) else one
                for one in slots
            ]

        try:
            current = the.changer.change(change)
        except (Conflict, WrongKey):
            if made and path is not None:
                the.discard(path, slot)
            raise
        return the.done(current, added=[slot], removed=[old], file=path)


@events.recorded("key-recovery", operation_facts.nothing_more)
def key_recovery(config: Config, *, label: str = "", replace: bool = False) -> KeyChange:
    """Make a recovery key, which only the answer contains; with `replace` it becomes the
    only one.
    """
    with Keyring.of(config) as the:
        secret = recovery.new_secret()
        key = key_files.KeyText(secret, recovery=True)
        slot = described(key_slots.file_slot(the.master, key, the.id), checked_label(label))
        gone: list[Slot] = []

        def change(slots: Slots) -> Slots:
            the.see_not_removed(slots)
            if replace:
                gone[:] = [one for one in slots if one.get("type") == "recovery" and one != slot]
            return [*the.without([one for one in slots if one != slot], gone), slot]

        done = the.done(the.changer.change(change), added=[slot], removed=gone)
        done.recovery_key = recovery.to_text(secret)
        return done


@events.recorded("key-tidy", operation_facts.nothing_more)
def key_tidy(config: Config) -> KeyChange:
    """Finish an interrupted change."""
    with Keyring.of(config) as the:
        gone: list[Slot] = []

        def change(slots: Slots) -> Slots:
            gone[:] = the.replaced(slots)
            return the.without(slots, gone)

        return the.done(the.changer.change(change), removed=gone)


def _rotate_own_file(the: Keyring, config: Config, old: Slot, label: str) -> KeyChange:
    """Rotate this host's key file in three steps; after each of them the file opens the store."""
    path = keys.key_path(config, the.id)
    if the.opened.slot != "file" or the.opened.file != path or path.is_symlink():
        raise UsageError(
            f"the store is opened by {the.opened.source}, which is not this host's own key file "
            f"{path}",
            hint=("Name the replacement: --key-file PATH, --passphrase or --passphrase-file PATH."),
        )
    with _alone_with(path, the.opened.key):
        return _replace_own_file(the, path, old, label)


def _replace_own_file(the: Keyring, path: Path, old: Slot, label: str) -> KeyChange:
    fresh = path.with_suffix(".new")
    key = _fresh_key(fresh)
    slot = described(
        key_slots.file_slot(the.master, key, the.id), checked_label(label) or old.get("label", "")
    )

    name, new = key_slots.slot_fingerprint(old), key_slots.slot_fingerprint(slot)
    gone: list[Slot] = []

    def add(slots: Slots) -> Slots:
        the.see_not_removed(slots)
        marked = [
            {**one, REPLACED: new} if key_slots.slot_fingerprint(one) == name else one
            for one in slots
        ]
        return marked if new in map(key_slots.slot_fingerprint, slots) else [*marked, slot]

    def remove(slots: Slots) -> Slots:
        gone[:] = [
            one for one in slots if name in (key_slots.slot_fingerprint(one), one.get(REPLACED))
        ]
        return the.without(_with_shown(slots, the.shown), gone)

    added = the.changer.change(add)
    the.show(keys.open_by_key(added.slots, the.id, key, str(fresh), fresh))
    kept = path.with_name(f"{the.id}.{name}.key")
    with suppress(FileExistsError):
        key_files.write_secret(kept, the.opened.key.text())
    try:
        os.replace(fresh, path)
        _sync(path.parent)
    except OSError as error:
        raise KeyMissing(
            f"the key file {path} cannot be replaced: {error.strerror}",
            hint=f"The old key and the new one in {fresh} open the store.",
        ) from error
    current = the.changer.change(remove)
    return the.done(current, added=[slot], removed=gone or [old], file=path, previous=kept)


@contextmanager
def _alone_with(path: Path, key: key_files.KeyText) -> Iterator[None]:
    """Hold the lock on the key file `path`, which holds `key`, against other processes on this
    host; raise `Conflict`.
    """
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # on a file system without locks on folders there is no protection
            free = not isinstance(error, BlockingIOError)
        if not free or key_files.KeyText.parse(key_files.read_secret(path), str(path)) != key:
            raise Conflict(
                f"the key file {path} is being replaced by another process, or was just now",
                hint="Try again.",
            )
        yield
    finally:
        os.close(fd)


def _fresh_key(path: Path) -> key_files.KeyText:
    """Return a new key in the file `path`, or the one that an interrupted run has made there."""
    try:
        return key_files.new_key_file(path)[0]
    # a run was ended while it wrote: a key is durable before any store has it
    except WrongKey:
        path.unlink()
        return key_files.new_key_file(path)[0]


def _with_shown(slots: Slots, shown: Sequence[Slot]) -> Slots:
    """Return the slots with the newest of the shown keys, whatever happened meanwhile: its file is
    in place already.
    """
    return slots if shown[-1] in slots else [*slots, shown[-1]]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


__all__ = [
    "KeyChange",
    "KeyFacts",
    "NewKey",
    "key_add",
    "key_list",
    "key_recovery",
    "key_remove",
    "key_rotate",
    "key_tidy",
]
