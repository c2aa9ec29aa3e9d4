"""The keys of a store: which there are, new ones, fewer, others; and its write-only hosts.

What is changed is which secrets open the store (`criuctl.checkpoint.generations` tells how); the
master key, and so every pack, stays what it is.

RULE: whoever changes the keys is never shut out.  A new key is made, durable and seen to open the
store before it is published.  A change after which no key is left that was seen to open the store
in this very call is refused: that is the one which opened it, another one that was shown, or a new
one that is kept somewhere already.  A new recovery key is not: nobody has written it down yet.

`rotate` of this host's own key file goes by way of both: the new key is added, the file is
replaced, then the old key is removed.  Wherever it is cut off, what lies in the file opens the
store, and another run, or `tidy`, goes on with the key that was made: the old one says which one
takes its place.  The old file stays beside it, since checkpoints that were exported for it still
need it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoint import keys, recovery
from ..checkpoint.generations import Slots, described
from ..config import Config
from ..errors import Conflict, KeyMissing, UsageError, WrongKey
from ..host.journal import events
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
    """The keys that open the store, and what is to be known of them."""
    with Keyring.of(config) as the:
        current = the.changer.current()
        notes = []
        if not the.changer.settled():
            notes.append(
                "older slots are still in the store: an earlier change was cut off, and "
                "`criuctl "
                "key tidy` finishes it"
            )
        if the.replaced(current.slots):
            notes.append(
                "an earlier rotation was cut off: `criuctl key tidy` removes the key that it "
                "has "
                "replaced"
            )
        return the.facts(current.slots), notes


@events.recorded("key-add", events.nothing_more)
def key_add(config: Config, new: NewKey) -> KeyChange:
    """Let one more key open the store."""
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
        return the.done(current, added=[slot], file=path)


@events.recorded("key-remove", events.nothing_more)
def key_remove(
    config: Config,
    ref: str,
    *,
    other_key_file: Path | None = None,
    other_passphrase: bytes | None = None,
) -> KeyChange:
    """Let a key open the store no more; `ref` is its label or the beginning of its fingerprint.

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


@events.recorded("key-rotate", events.nothing_more)
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
                slot if keys.slot_fingerprint(one) == keys.slot_fingerprint(old) else one
                for one in slots
            ]

        try:
            current = the.changer.change(change)
        except (Conflict, WrongKey):
            if made and path is not None:
                the.discard(path, slot)
            raise
        return the.done(current, added=[slot], removed=[old], file=path)


@events.recorded("key-recovery", events.nothing_more)
def key_recovery(config: Config, *, label: str = "", replace: bool = False) -> KeyChange:
    """Make a recovery key, which the answer holds and nothing else does; with `replace` it is the
    only one.
    """
    with Keyring.of(config) as the:
        secret = recovery.new_secret()
        key = keys.KeyText(secret, recovery=True)
        slot = described(keys.file_slot(the.master, key, the.id), checked_label(label))
        gone: list[Slot] = []

        def change(slots: Slots) -> Slots:
            the.see_not_removed(slots)
            if replace:
                gone[:] = [one for one in slots if one.get("type") == "recovery" and one != slot]
            return [*the.without([one for one in slots if one != slot], gone), slot]

        done = the.done(the.changer.change(change), added=[slot], removed=gone)
        done.recovery_key = recovery.to_text(secret)
        return done


@events.recorded("key-tidy", events.nothing_more)
def key_tidy(config: Config) -> KeyChange:
    """Finish what an interrupted change has left."""
    with Keyring.of(config) as the:
        gone: list[Slot] = []

        def change(slots: Slots) -> Slots:
            gone[:] = the.replaced(slots)
            return the.without(slots, gone)

        return the.done(the.changer.change(change), removed=gone)


def _rotate_own_file(the: Keyring, config: Config, old: Slot, label: str) -> KeyChange:
    """Three steps, and at each of them the file opens the store."""
    path = keys.key_path(config, the.id)
    if the.opened.slot != "file" or the.opened.file != path or path.is_symlink():
        raise UsageError(
            f"the store is opened by {the.opened.source}, which is not this host's own key file "
            f"{path}",
            hint=(
                "Say what shall take its place: --key-file PATH, --passphrase or "
                "--passphrase-file PATH."
            ),
        )
    with _alone_with(path, the.opened.key):
        return _replace_own_file(the, path, old, label)


def _replace_own_file(the: Keyring, path: Path, old: Slot, label: str) -> KeyChange:
    fresh = path.with_suffix(".new")
    key = _fresh_key(fresh)
    slot = described(
        keys.file_slot(the.master, key, the.id), checked_label(label) or old.get("label", "")
    )

    name, new = keys.slot_fingerprint(old), keys.slot_fingerprint(slot)
    gone: list[Slot] = []

    def add(slots: Slots) -> Slots:
        the.see_not_removed(slots)
        marked = [
            {**one, REPLACED: new} if keys.slot_fingerprint(one) == name else one for one in slots
        ]
        return marked if new in map(keys.slot_fingerprint, slots) else [*marked, slot]

    def remove(slots: Slots) -> Slots:
        gone[:] = [one for one in slots if name in (keys.slot_fingerprint(one), one.get(REPLACED))]
        return the.without(_with_shown(slots, the.shown), gone)

    added = the.changer.change(add)
    the.show(keys.open_by_key(added.slots, the.id, key, str(fresh), fresh))
    kept = path.with_name(f"{the.id}.{name}.key")
    with suppress(FileExistsError):
        keys.write_secret(kept, the.opened.key.text())
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
def _alone_with(path: Path, key: keys.KeyText) -> Iterator[None]:
    """While nobody else on this host replaces the key file `path`, which holds `key`; else
    `Conflict`.
    """
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system that locks no folders keeps nobody apart
            free = not isinstance(error, BlockingIOError)
        if not free or keys.KeyText.parse(keys.read_secret(path), str(path)) != key:
            raise Conflict(
                f"the key file {path} is being replaced by somebody else, or was just now",
                hint="Try again.",
            )
        yield
    finally:
        os.close(fd)


def _fresh_key(path: Path) -> keys.KeyText:
    """A new key in the file `path`, or the one that an interrupted run has made there."""
    try:
        return keys.new_key_file(path)
    # a run that was ended while it wrote: a key is durable before any store knows it
    except WrongKey:
        path.unlink()
        return keys.new_key_file(path)


def _with_shown(slots: Slots, shown: Sequence[Slot]) -> Slots:
    """With the newest of the keys that were shown, whatever happened meanwhile: its file is in
    place already.
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
