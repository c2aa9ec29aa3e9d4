"""How the keys of a store change: generations of its config.

A store is made with the object ``config``, generation 0. Each change of its key slots publishes the
whole config as a new generation, with a number one higher, the complete list of slots and a
checksum under the master key. It is the immutable object

    keys/<20-digit generation>            where the store has conditional writes: put if absent,
                                          exactly one writer wins
    keys/<20-digit generation>-<32 hex>   elsewhere: no name is used twice, and several objects may
                                          have one number

*The newest generation whose checksum is correct is in force*, wherever it is stored. Several of the
same number are in force together: the slots of all of them open the store. A text whose checksum is
wrong was not written with the key and is ignored.

    1  publish   put keys/N+1, where N is the generation that was read.  If another writer was
                 faster: read again, decide again.
    2  look      list keys/.  If there is a newer generation, or another one of the same number,
                 begin again with what is in force without this one.  (A slow writer may have won a
                 number that had been used, superseded and removed.)
    3  settle    write the same text to ``config``, where the store replaces objects atomically, so
                 that removed slots are gone from there and older versions of criuctl find the
                 current slots; then remove older generations.

RULE: the store can be opened at every instant. Until step 1 is done the old generation is in force,
from then on the new one; settling changes no slot in force. ``config`` is replaced only while the
same text exists, durable and read back, under its own name in ``keys/``. It is dispensable: where
it is absent or damaged the generations are read. If a change is interrupted, the next change, or
`tidy`, settles. Only texts older than one that has been read back are removed. An overtaken text of
this process stays too, since another process may have settled on it.

The master key never changes, so no pack is rewritten. A person who once opened the store, or who
has a removed key and an old copy of the config, can still read all that is and will be stored in
it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..errors import Conflict, Damaged, DataError, ObjectExists, StoreError, StoreUnreachable
from ..store import Store
from . import configobject as text
from .codec import Sealer
from .manifest import now
from .records import Confidential

PREFIX = "keys/"
_NAME = re.compile(r"keys/([0-9]{20})(?:-[0-9a-f]{32})?")
_ATTEMPTS = 8  # races lost in a row before giving up
# seconds, times the number of the attempt, times a random factor: so that two processes do not
# overtake each other endlessly
_PAUSE = 0.05

Slots = list[dict[str, Any]]


class Candidate(Confidential, frozen=True):
    """A text that may be the store's config."""

    name: str
    data: bytes
    body: dict[str, Any]

    @property
    def generation(self) -> int:
        """The generation's number."""
        number: int = self.body.get("generation", 0)
        return number

    @classmethod
    def read(cls, store: Store, name: str) -> Candidate | None:
        """Read the object `name`; return None if it does not exist; raise `Damaged` or
        `UnsupportedFormat`.
        """
        data = text.fetch(store, name)
        if data is None:
            return None
        if name != text.NAME and not text.recognised(data):
            raise text.damaged(f"{name} is none")
        made = cls(name, data, text.parse(data))
        if name != text.NAME and made.generation != number(name):
            raise text.damaged(f"{name} says that it is generation {made.generation}")
        return made


class Current(Confidential, frozen=True):
    """The generation in force: the combined content of its texts."""

    generation: int
    body: dict[str, Any]
    slots: Slots
    texts: tuple[Candidate, ...]

    @classmethod
    def among(cls, candidates: Iterable[Candidate], sealer: Sealer) -> Current | None:
        """Return the newest of the candidates whose checksum is correct."""
        valid = [candidate for candidate in candidates if text.fits(candidate.body, sealer)]
        if not valid:
            return None
        newest = max(candidate.generation for candidate in valid)
        texts = tuple(candidate for candidate in valid if candidate.generation == newest)
        return cls(newest, texts[0].body, union(texts), texts)

    def without(self, overtaken: Collection[bytes]) -> Current:
        """Return the generation in force without these texts; None if there is none."""
        texts = (
            tuple(candidate for candidate in self.texts if candidate.data not in overtaken)
            or self.texts
        )
        return Current(self.generation, texts[0].body, union(texts), texts)


def number(name: str) -> int | None:
    """Return the generation number in `name`; None if it is not the name of a generation."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and 0 < int(match[1]) < text.MAX_GENERATION else None


def names(store: Store) -> dict[str, int]:
    """Return the names of all generations, with their numbers."""
    found = ((info.name, number(info.name)) for info in store.list(PREFIX))
    return {name: generation for name, generation in found if generation is not None}


def union(candidates: Iterable[Candidate]) -> Slots:
    """Return the slots of all candidates, each once."""
    slots: Slots = []
    for candidate in candidates:
        slots += [slot for slot in candidate.body.get("slots", []) if slot not in slots]
    return slots


def read(store: Store, wanted: Iterable[str]) -> tuple[list[Candidate], bool]:
    """Return the readable ones of these generations, and whether one has been removed meanwhile.

    A text that is not a config at all was not written with the key and is left out. One of a newer
    format raises `UnsupportedFormat`.
    """
    found, gone = [], False
    for name in wanted:
        try:
            candidate = Candidate.read(store, name)
        except Damaged:
            continue
        gone |= candidate is None
        if candidate is not None:
            found.append(candidate)
    return found, gone


# -- changing
# -----------------------------------------------------------------------------------------


class Changer:
    """Changes the slots of one store whose master key is known."""

    def __init__(self, store: Store, sealer: Sealer, store_id: str, *, conditional: bool) -> None:
        self._store, self._sealer, self._id = store, sealer, store_id
        self._conditional = conditional
        self.warnings: list[str] = []

    def current(self) -> Current:
        """Return the generation that is in force now."""
        current = None
        for _attempt in range(_ATTEMPTS):
            found, gone = read(self._store, [text.NAME, *names(self._store)])
            current = Current.among((c for c in found if c.body["id"] == self._id), self._sealer)
            if not gone or (
                current is not None
                and current.generation >= max(names(self._store).values(), default=0)
            ):
                break
        if current is None:
            raise text.damaged("no generation of it has a checksum that fits")
        return current

    def change(self, change: Callable[[Slots], Slots]) -> Current:
        """Publish the slots that `change` returns. It is called again whenever another writer was
        faster.

        It may raise. If it changes nothing, nothing is published. In the end the store is settled.
        Raise errors of the store; after `StoreUnreachable` the change may have happened.
        """
        overtaken: list[bytes] = []
        for attempt in range(_ATTEMPTS):
            there = self.current()
            current = there.without(overtaken)
            slots = change([dict(slot) for slot in current.slots])
            if slots == current.slots and self._single(there):
                self._settle(there)
                return there
            published, alone = self._publish(current, slots)
            if alone:
                self._settle(published)
                return published
            overtaken.append(published.texts[0].data)
            time.sleep(_PAUSE * secrets.randbelow(100 * (attempt + 1)) / 100)
        raise Conflict(
            "the keys of the store are being changed by another process at the same time",
            hint="Try again.",
        )

    def tidy(self) -> Current:
        """Finish an interrupted change."""
        return self.change(lambda slots: slots)

    def settled(self) -> bool:
        """Return whether the store holds nothing older than the generation in force, as far as it
        can be removed there.
        """
        current = self.current()
        return not self._leftover(current) and (not self._conditional or self._in_config(current))

    @staticmethod
    def _single(current: Current) -> bool:
        return len({candidate.data for candidate in current.texts}) == 1

    def _leftover(self, current: Current) -> list[str]:
        return [
            name
            for name, generation in names(self._store).items()
            if generation < current.generation
        ]

    def _in_config(self, current: Current) -> bool:
        return any(candidate.name == text.NAME for candidate in current.texts)

    def _publish(self, current: Current, slots: Slots) -> tuple[Current, bool]:
        """Do steps 1 and 2; return whether no other writer was faster."""
        if len(slots) > text.MAX_SLOTS:
            raise Conflict(
                f"a store has {text.MAX_SLOTS} keys at most",
                hint="Remove one: `criuctl key list` shows them.",
            )
        nonce = secrets.token_hex(16)
        generation = current.generation + 1
        body = {key: value for key, value in current.body.items() if key != "mac"}
        body |= {"slots": slots, "generation": generation, "changed": now(), "nonce": nonce}
        if any(slot.get("type") == text.WRITER for slot in slots):
            body[text.WRITERS] = True  # never cleared: what the writers wrote stays
        data = text.text(body, self._sealer)
        name = f"{PREFIX}{generation:020d}" + ("" if self._conditional else f"-{nonce}")
        made = Current(generation, body, slots, (Candidate(name, data, text.parse(data)),))
        if not self._put(name, data):
            return made, False
        found, _gone = read(
            self._store, [other for other, its in names(self._store).items() if its >= generation]
        )
        others = [
            c
            for c in found
            if c.data != data and c.body["id"] == self._id and text.fits(c.body, self._sealer)
        ]
        return made, not others and any(candidate.data == data for candidate in found)

    def _put(self, name: str, data: bytes) -> bool:
        """Put `data` as the object `name`; return whether it is there now. After a lost answer the
        store is asked.
        """
        try:
            self._store.put(name, data, if_absent=True)
        except (ObjectExists, StoreUnreachable) as error:
            there = text.fetch(self._store, name)
            if there is None and isinstance(error, StoreUnreachable):
                raise
            if there != data and _foreign(there, self._sealer):
                raise Damaged(
                    f"{name} is in the way: it was not written with the store's key",
                    hint="Remove this object.",
                    object=name,
                ) from None
            return there == data
        return True

    def _settle(self, current: Current) -> None:
        """Do step 3. A refusal by the store is reported, and the next change tries again."""
        try:
            if self._conditional:
                self._replace_config()
            else:
                self._see_config(current)
            for name in self._leftover(current):
                self._store.delete(name)
        except StoreError as error:
            self.warnings.append(
                "the keys are as they should be, but older slots are still in the store "
                f"({error.message}): `criuctl key tidy` removes them"
            )

    def _replace_config(self) -> None:
        """Write ``config`` until it holds the newest text: a slow process may write an older one
        over it.
        """
        for _attempt in range(_ATTEMPTS):
            newest = self.current()
            if self._in_config(newest) or not self._single(newest):
                return
            self._store.put(text.NAME, newest.texts[0].data)

    def _see_config(self, current: Current) -> None:
        """Warn if ``config`` has slots that are not current: it stays as it is on a server that may
        replace an object by removing it first.
        """
        found, _gone = read(self._store, [text.NAME])
        if any(slot not in current.slots for slot in union(found)):
            self.warnings.append(
                "the store has no conditional writes, so nothing in it is replaced, and the "
                "object `config` goes on holding the slots that it was made with: a person who "
                "has a removed key of those and reads it can open it, if not by criuctl"
            )


def _foreign(data: bytes | None, sealer: Sealer) -> bool:
    """Return whether the text was written without the key."""
    if data is None:
        return False
    try:
        return not text.fits(text.parse(data), sealer)
    except DataError:
        return True


def described(slot: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return a new slot with the facts that ``key list`` shows."""
    return {**slot, "created": now(), **({"label": label} if label else {})}
