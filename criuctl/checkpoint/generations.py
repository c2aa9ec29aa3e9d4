"""How the keys of a store change: generations of its config.

A store is made with the object ``config``, generation 0.  Each change of its key slots publishes
the whole config anew, one generation higher, with the complete list of slots and a checksum under
the master key, as the immutable object

    keys/<20-digit generation>              where the store has conditional writes: put if absent,
    exactly one wins keys/<20-digit generation>-<32 hex>     elsewhere: no name is used twice, and
    several may bear one number

*The newest generation whose checksum fits counts*, wherever it stands.  Several of the same number
count together: the slots of all of them open the store.  What does not fit was written by nobody
who has the key, and counts for nothing.

    1  publish   put keys/N+1, N being the generation that was read; somebody else was faster: look
    again, judge again 2  look      list keys/: if there is a newer generation, or another one of
    the same number, begin again with what counts
                 without ours.  (A slow writer may have won a number that had been used, superseded
                 and removed.)
    3  settle    write the same text to ``config``, where the store replaces objects atomically, so
    that what was removed is
                 gone from there, and that older versions of criuctl find the current slots; then
                 remove older generations

RULE: the store can be opened at every instant.  Until 1 is done the old generation counts, from
then on the new one; settling changes no slot that counts.  ``config`` is only replaced while the
same text stands, durable and read back, under a name of its own, and is itself dispensable: where
it is absent or damaged the generations are asked.  Cut off anywhere, the next change, or `tidy`,
settles.  Nothing is ever removed but what is older than a text that has been read back: not even
one's own that was overtaken, since somebody may have settled on it.

No master key is changed, so no pack is rewritten; and whoever has once opened the store, or has a
removed key and an old copy of the config, can read what is stored in it, also what will be.
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
# seconds, times the number of the attempt, at random: so that two do not overtake each other for
# ever
_PAUSE = 0.05

Slots = list[dict[str, Any]]


class Candidate(Confidential, frozen=True):
    """A text that may be the store's config."""

    name: str
    data: bytes
    body: dict[str, Any]

    @property
    def generation(self) -> int:
        """Its number."""
        number: int = self.body.get("generation", 0)
        return number

    @classmethod
    def read(cls, store: Store, name: str) -> Candidate | None:
        """The object `name`; None if it is not there; `Damaged`, `UnsupportedFormat`."""
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
    """The generation that counts: what its texts say."""

    generation: int
    body: dict[str, Any]
    slots: Slots
    texts: tuple[Candidate, ...]

    @classmethod
    def among(cls, candidates: Iterable[Candidate], sealer: Sealer) -> Current | None:
        """The newest whose checksum fits."""
        valid = [candidate for candidate in candidates if text.fits(candidate.body, sealer)]
        if not valid:
            return None
        newest = max(candidate.generation for candidate in valid)
        texts = tuple(candidate for candidate in valid if candidate.generation == newest)
        return cls(newest, texts[0].body, union(texts), texts)

    def without(self, overtaken: Collection[bytes]) -> Current:
        """What counts beside these texts, if anything does."""
        texts = (
            tuple(candidate for candidate in self.texts if candidate.data not in overtaken)
            or self.texts
        )
        return Current(self.generation, texts[0].body, union(texts), texts)


def number(name: str) -> int | None:
    """The generation that stands under `name`, if it is the name of one."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and 0 < int(match[1]) < text.MAX_GENERATION else None


def names(store: Store) -> dict[str, int]:
    """The names of all generations, with their numbers."""
    found = ((info.name, number(info.name)) for info in store.list(PREFIX))
    return {name: generation for name, generation in found if generation is not None}


def union(candidates: Iterable[Candidate]) -> Slots:
    """The slots of all of them, each once."""
    slots: Slots = []
    for candidate in candidates:
        slots += [slot for slot in candidate.body.get("slots", []) if slot not in slots]
    return slots


def read(store: Store, wanted: Iterable[str]) -> tuple[list[Candidate], bool]:
    """Those of the generations that can be read, and whether one has been removed meanwhile.

    A text that is no config at all was written by nobody who has the key; one of a newer format is
    `UnsupportedFormat`.
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
        """The generation that counts now."""
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
        """Publish what `change` makes of the slots; it is asked again whenever somebody else was
        faster.

        It may raise; and if it changes nothing, nothing is published.  In the end the store is
        settled.  Store errors: when one says *unreachable*, the change may have happened.
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
            "the keys of the store are being changed by somebody else at the same time",
            hint="Try again.",
        )

    def tidy(self) -> Current:
        """Finish what an interrupted change has left."""
        return self.change(lambda slots: slots)

    def settled(self) -> bool:
        """Whether nothing older than what counts is left in the store, as far as it can be removed
        there.
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
        """Steps 1 and 2; whether nobody else was faster."""
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
            body[text.WRITERS] = True  # and stays: what they wrote stays
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
        """Whether `data` is the object `name` now; after a lost answer the store tells."""
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
        """Step 3; what the store refuses is told, and tried again by the next change."""
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
                f"({error.message}): "
                "`criuctl key tidy` removes them"
            )

    def _replace_config(self) -> None:
        """Until what stands there is the newest: somebody slow may write an older one over it."""
        for _attempt in range(_ATTEMPTS):
            newest = self.current()
            if self._in_config(newest) or not self._single(newest):
                return
            self._store.put(text.NAME, newest.texts[0].data)

    def _see_config(self, current: Current) -> None:
        """On a server that may replace an object by removing it first, ``config`` stays what it
        is.
        """
        found, _gone = read(self._store, [text.NAME])
        if any(slot not in current.slots for slot in union(found)):
            self.warnings.append(
                "the store has no conditional writes, so nothing in it is replaced, and the "
                "object `config` goes on holding the "
                "slots that it was made with: whoever has a removed key of those and reads it can "
                "open it, if not by criuctl"
            )


def _foreign(data: bytes | None, sealer: Sealer) -> bool:
    """Whether somebody without the key has written it."""
    if data is None:
        return False
    try:
        return not text.fits(text.parse(data), sealer)
    except DataError:
        return True


def described(slot: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A new slot with what people are told of it."""
    return {**slot, "created": now(), **({"label": label} if label else {})}
