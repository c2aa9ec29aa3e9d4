"""Group checkpoints: which checkpoints of several sessions were made at one moment.

A group manifest is a sealed object (`objects.GROUP`) named
``groups/<token>/<20-digit number>-<id>``; the token stands for the group's name. It names the
checkpoint of each member, and is put last, by one atomic put, when all of these are stored.

RULE: a group checkpoint is listed if and only if its manifest exists and the manifest of every
member does. So it is whole or not there, whatever was killed between two puts, and whatever has
removed a member behind its back. Removing one begins with the group's manifest.

`Groups.members` names the checkpoints that may not be removed by themselves.
"""

from __future__ import annotations

import json
import re

from msgspec import field

from ..errors import (
    AmbiguousRef,
    Conflict,
    DataError,
    NoSuchCheckpoint,
    ObjectMissing,
)
from ..store import Store
from . import objects
from .catalog import Catalog, load_json
from .codec import Sealer
from .manifest_objects import put_once
from .records import ID, SESSION_NAME, Record, check_pattern, damaged

_NAME = re.compile(r"groups/([0-9a-f]{32})/([0-9]{20})-([0-9a-f]{32})")
_COUNTED = 10**18  # numbers from here on were put to block a group
_MOST = 1024  # members


class GroupMemberRecord(Record, frozen=True):
    """The checkpoint of one member."""

    session: str
    checkpoint: str
    number: int = 0
    object: str = ""  # name of its manifest

    def check(self, where: str) -> None:
        check_pattern(SESSION_NAME, self.session, f"{where}.session")
        check_pattern(ID, self.checkpoint, f"{where}.checkpoint")


class GroupCheckpoint(Record, frozen=True):
    """One checkpoint of a group of sessions."""

    id: str
    group: str
    created: str
    host: str
    frozen_ms: float  # of the member that stood still for the longest time
    members: tuple[GroupMemberRecord, ...]
    number: int = 0
    labels: dict[str, str] = field(default_factory=dict)

    def check(self, where: str) -> None:
        check_pattern(ID, self.id, f"{where}.id")
        check_pattern(SESSION_NAME, self.group, f"{where}.group")
        names = [member.session for member in self.members]
        if not names or len(set(names)) != len(names) or len(names) > _MOST:
            raise damaged(f"{where}.members", "does not name each member once")

    @property
    def ref(self) -> str:
        """How a user names it."""
        return f"{self.group}@{self.number}"


class Groups:
    """The group checkpoints of one store."""

    def __init__(
        self, store: Store, sealer: Sealer, catalog: Catalog, *, conditional: bool
    ) -> None:
        """`conditional`: whether the store can create an object only if it is absent."""
        self._store, self._sealer, self._catalog = store, sealer, catalog
        self._conditional = conditional
        self._held: dict[str, str] | None = None

    def put(self, made: GroupCheckpoint) -> GroupCheckpoint:
        """Store it under the group's next number; return it with that: the commit point.

        Raise `Conflict` if a member's checkpoint has been removed meanwhile: then it is not there.
        """
        folder = self._folder(made.group)
        used = [int(name[len(folder) :][:20]) for name in self._names(folder)]
        numbered = made.with_use(number=max((n for n in used if n < _COUNTED), default=0) + 1)
        name = self._name(numbered)
        body = json.dumps(numbered.to_dict(), separators=(",", ":"), allow_nan=False)
        self._sealer.prepare()
        data = objects.encode(objects.GROUP, name, b"", body.encode("ascii"), self._sealer)
        put_once(self._store, name, data, conditional=self._conditional)
        self._held = None
        if not self._whole(numbered):
            self._store.delete(name)
            raise Conflict("a member's checkpoint was removed while the group was stored")
        return numbered

    def resolve(self, ref: str) -> GroupCheckpoint:
        """Return what ``GROUP`` (its newest) or ``GROUP@N`` names, a negative N counts from the
        end; raise `NoSuchCheckpoint`.
        """
        group, at, number = ref.partition("@")
        if at and re.fullmatch(r"-?[0-9]{1,18}", number) is None:
            raise NoSuchCheckpoint(f"{ref!r} names no group checkpoint", hint="Write GROUP@N.")
        unreadable: list[DataError] = []
        found = self.list(group, unreadable)
        wanted = int(number) if at else -1
        if wanted < 0:
            found = found[wanted : wanted + 1 or None] if -wanted <= len(found) else []
        else:
            found = [one for one in found if one.number == wanted]
        if len(found) > 1:
            raise AmbiguousRef(f"{ref} was stored by two hosts at once")
        if not found:
            if unreadable:
                raise unreadable[0]
            raise NoSuchCheckpoint(
                f"the store {self._store.url} has no checkpoint of a group {ref!r}"
            )
        return found[0]

    def remove(self, one: GroupCheckpoint) -> None:
        """Remove the group's manifest; its members are ordinary checkpoints from then on."""
        self._store.delete(self._name(one))
        self._held = None

    def members(self) -> dict[str, str]:
        """Return checkpoint id -> the group checkpoint that needs it, as a user names that."""
        if self._held is None:
            self._held = {m.checkpoint: one.ref for one in self.list() for m in one.members}
        return self._held

    def broken(self, before: float) -> list[str]:
        """Return the objects of group checkpoints that lack a member, and are older than `before`
        (Unix seconds of the store's clock): they are not listed any more.
        """
        old = {i.name for i in self._store.list("groups/") if i.modified < before}
        if not old:
            return []
        whole = {self._name(one) for one in self.list()}
        found = []
        for name in sorted(old - whole):
            try:
                one = self._read(name)
            except (DataError, ObjectMissing):
                continue  # what cannot be read stays, and is reported by a list
            found.append(self._name(one))
        return found

    def _whole(self, one: GroupCheckpoint) -> bool:
        present = self._catalog.names()
        return all(member.object in present for member in one.members)

    def _name(self, one: GroupCheckpoint) -> str:
        return f"{self._folder(one.group)}{one.number:020d}-{one.id}"

    def _folder(self, group: str) -> str:
        return f"groups/{self._sealer.token(group)}/"

    def _names(self, prefix: str) -> list[str]:
        return sorted(i.name for i in self._store.list(prefix) if _NAME.fullmatch(i.name))

    def _read(self, name: str) -> GroupCheckpoint:
        data = self._store.get(name, objects.GROUP.limit)
        outline = objects.layout(objects.GROUP, name, data, len(data))
        body = load_json(objects.open_body(name, outline, data, self._sealer), name, len(data))
        one = GroupCheckpoint.from_dict(body)
        if name != self._name(one):
            raise damaged(name, "holds another group checkpoint")
        return one

    def list(
        self, group: str | None = None, unreadable: list[DataError] | None = None
    ) -> list[GroupCheckpoint]:
        """Return the group checkpoints (of one group) by group and number; only whole ones.

        The errors of those that cannot be read are appended to `unreadable`.
        """
        found = []
        for name in self._names("groups/" if group is None else self._folder(group)):
            try:
                one = self._read(name)
            except ObjectMissing:
                continue  # removed meanwhile
            except DataError as error:
                if unreadable is not None:
                    unreadable.append(error)
                continue
            found.append(one)
        present = self._catalog.names() if found else {}
        whole = [one for one in found if all(m.object in present for m in one.members)]
        return sorted(whole, key=lambda one: (one.group, one.number))
