"""The store's replica of a session's steps, written by the supervisor of its home.

Objects ``steps/<token of the session's id>/<20 digits>`` hold steps as the holder's journal has
them. They are put once and never changed, and what they say of a step is joined by
`criuctl.steps.states.merge`: so neither their order nor a repeated one matters. Now and then one
that has all steps takes the place of the others.

A home that another host has taken the session from must not confirm a step that the new home does
not know. So `put` reads the session's lease after its object is stored: while the epoch is still
its own, a later take-over, which raises the epoch before it reads, finds the object. Otherwise it
raises `Conflict`, and the step is not confirmed. In a store that gives no leases, nothing is
checked.

A session that has neither a checkpoint nor a home can not come back: a garbage collection removes
its steps (`abandoned`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import (
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    ObjectExists,
    ObjectMissing,
)
from ..proc.threads import in_parallel
from ..steps.states import Step, merge
from . import objects
from .catalog import load_json
from .heads import read_head, read_record
from .manifest import SessionRef

if TYPE_CHECKING:
    from ..store.base import ObjectInfo
    from .repository import Repository

_MANY = 32  # objects above which one takes the place of all
_PARALLEL = 8
_ATTEMPTS = 100  # numbers that another supervisor had


class Replica:
    """What the home of one session stores of its steps."""

    def __init__(self, repository: Repository, session: SessionRef, host: str) -> None:
        """Find out this home's epoch; `Conflict` if the session lives on another host."""
        self._repository, self._session, self._host = repository, session, host
        self._known: dict[str, Step] = {}
        self._names: list[str] = []
        self._epoch: int | None = None
        self._epoch = self._check()
        for name in _names(repository, session.id):
            self._join(_read(repository, session.id, name))
            self._names.append(name)

    def put(self, steps: Iterable[dict[str, Any]]) -> None:
        """Store steps; when this returns, every later home knows them."""
        given = [Step.from_dict(step) for step in steps]
        self._join(given)
        many = len(self._names) >= _MANY
        name = self._put(list(self._known.values()) if many else given)
        self._check()
        if many:
            old, self._names = self._names, []
            with suppress(CriuctlError):  # they only cost space
                in_parallel(self._repository.store.delete, old, _PARALLEL, "criuctl-steps")
        self._names.append(name)

    def _join(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._known[step.id] = merge(self._known.get(step.id), step)

    def _put(self, steps: list[Step]) -> str:
        number = int(self._names[-1][-20:]) + 1 if self._names else 1
        body = {"session": self._session.id, "steps": [step.to_dict() for step in steps]}
        data = json.dumps(body, separators=(",", ":")).encode("ascii")
        sealer = self._repository.sealer
        sealer.prepare()
        for _attempt in range(_ATTEMPTS):
            name = f"{_folder(self._repository, self._session.id)}{number:020d}"
            sealed = objects.encode(objects.STEPS, name, b"", data, sealer)
            try:
                self._repository.store.put(name, sealed, if_absent=True)
            except ObjectExists:
                number += 1
                continue
            return name
        raise Conflict(f"the steps of session {self._session.name!r} are stored by many at once")

    def _check(self) -> int | None:
        """Return the epoch of this home; `Conflict` if it is not the home (any more)."""
        if not self._repository.capabilities.conditional_create:
            return None
        head = read_head(self._repository, self._session.name)
        mine = (
            head is not None
            and (head.session.id, head.host, head.state) == (self._session.id, self._host, "held")
            and self._epoch in (None, head.epoch)
        )
        if head is None or not mine:
            raise Conflict(f"session {self._session.name!r} does not live on this host any more")
        return head.epoch


def read(repository: Repository, session_id: str) -> list[dict[str, Any]]:
    """Return the steps that are stored of the session; `Damaged`, and errors of the store."""
    for _attempt in range(_ATTEMPTS):
        known: dict[str, Step] = {}
        try:
            for name in _names(repository, session_id):
                for step in _read(repository, session_id, name):
                    known[step.id] = merge(known.get(step.id), step)
        except ObjectMissing:
            continue  # another object has taken the place of all that were listed
        return [step.to_dict() for step in known.values()]
    raise Conflict("the steps of the session change faster than they can be read")


def abandoned(repository: Repository, before: float) -> list[str]:
    """Return the objects of sessions that have no checkpoint and no home, and wrote none since
    `before` (Unix seconds of the store's clock).

    As long as a manifest or a lease cannot be read, no session is known to have none.
    """
    folders: dict[str, list[ObjectInfo]] = {}
    for info in repository.store.list("steps/"):
        folders.setdefault(info.name.rpartition("/")[0] + "/", []).append(info)
    unreadable: list[DataError] = []
    stored = repository.list(unreadable=unreadable, hidden=unreadable)
    living = {_folder(repository, summary.session_id) for summary in stored}
    found = {
        folder: objects
        for folder, objects in folders.items()
        if folder not in living and all(info.modified < before for info in objects)
    }
    if not found or unreadable:
        return []
    heads = {}  # the newest record of each session: names are listed in order
    for info in repository.store.list("sessions/"):
        heads[info.name.rpartition("/")[0]] = info.name
    for name in heads.values():
        try:
            head = read_record(repository, name)
        except (Conflict, DataError, ObjectMissing):
            return []
        if head.state == "held":
            found.pop(_folder(repository, head.session.id), None)
    return [info.name for objects in found.values() for info in objects]


def _folder(repository: Repository, session_id: str) -> str:
    return f"steps/{repository.sealer.token(session_id)}/"


def _names(repository: Repository, session_id: str) -> list[str]:
    """Return the names of the objects, the newest last."""
    folder = _folder(repository, session_id)
    names = (info.name for info in repository.store.list(folder))
    return sorted(n for n in names if len(n) == len(folder) + 20 and n[-20:].isdigit())


def _read(repository: Repository, session_id: str, name: str) -> list[Step]:
    data = repository.store.get(name, objects.STEPS.limit)
    outline = objects.layout(objects.STEPS, name, data, len(data))
    content = objects.open_body(name, outline, data, repository.sealer)
    body = load_json(content, name, len(data))
    try:
        if body["session"] != session_id:
            raise ValueError("it is of another session")
        return [Step.from_dict(step) for step in body["steps"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(
            f"{name} holds no steps: {error}",
            hint="It records which steps of a session are done. Bring the object back.",
            object=name,
        ) from None
