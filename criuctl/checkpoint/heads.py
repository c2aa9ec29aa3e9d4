"""The records of a session's head in the store; `criuctl.checkpoint.leases` explains them.

A damaged record blocks its session for all hosts. A person's decision can go past it: the new
record follows its number, which its name contains, and has an epoch that its home cannot have. No
number raises the epoch by more than one, but after a loss numbers start again while a home's epoch
goes on, so each number counts for many epochs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from ..errors import (
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    Foreign,
    ObjectExists,
    ObjectMissing,
    StoreUnreachable,
)
from ..proc.threads import in_parallel
from . import objects
from .catalog import load_json
from .manifest import SessionRef
from .records import Record, check_range

if TYPE_CHECKING:
    from .repository import Repository

ATTEMPTS = 8  # races lost in a row before giving up
_DAMAGED = (
    "It records the host that a session lives on. Bring the object back. If the session runs "
    "nowhere any more, restore --take-over goes past it; if it runs, remove the object, and its "
    "home claims the session again. A copy (restore --as NAME) needs none of that."
)
_LAST = (
    "Bring back the object that was there, or remove it. A copy (restore --as NAME) needs none of "
    "that."
)
_STRIDE = 20  # bits: the epochs that a number may stand for
_KEPT = 4  # records of a session that are kept at least; older ones are removed


class Head(Record, frozen=True):
    """One record of a session's head."""

    session: SessionRef
    host: str  # id of the home; "" when released for good
    host_name: str
    incarnation: int
    epoch: int  # one higher with each claim; a home whose epoch is older may write nothing
    state: Literal["held", "released"]
    nonce: str
    time: str  # RFC 3339
    sequence: int = 0
    beat: int = 0  # how often the claim has been renewed
    beaten: str = ""  # RFC 3339; when it was last renewed, by the clock of its home
    # milliseconds without another beat after which any host may take over; 0: only a person
    ttl: int = 0
    ended: bool = False  # released for good: it is not to be restored from a checkpoint

    def is_beat_of(self, other: Head) -> bool:
        """Return whether this is the same claim and beat as `other`, under any number."""
        own = (self.session, self.host, self.state, self.epoch, self.beat, self.ttl)
        return own == (other.session, other.host, other.state, other.epoch, other.beat, other.ttl)

    def check(self, where: str) -> None:
        check_range(self.epoch, 0, 1 << 62, f"{where}.epoch")
        check_range(self.incarnation, 0, 1 << 62, f"{where}.incarnation")
        check_range(self.sequence, 0, 10**19, f"{where}.sequence")
        check_range(self.beat, 0, 1 << 62, f"{where}.beat")
        check_range(self.ttl, 0, 1 << 40, f"{where}.ttl")


def read_head(repository: Repository, session: str, seen: Head | None = None) -> Head | None:
    """Return the newest record of the session called `session`, None when there is none; raise
    `Damaged` or errors of the store.

    Records never change: if it is the one that was `seen` before, it is not read again.
    """
    for _attempt in range(ATTEMPTS):
        names = _records(repository, session)
        if not names:
            return None
        if seen is not None and names[-1] == record_name(repository, seen):
            return seen
        try:
            return read_record(repository, names[-1])
        except ObjectMissing:
            continue  # a newer record was written, and this one was removed
    raise Conflict(f"the lease of {session!r} changes faster than it can be read")


def put_record(repository: Repository, head: Head) -> bool:
    """Publish `head` as number ``head.sequence``; return False when another host has that
    number.

    An unknown outcome is resolved by asking the store; raise `StoreUnreachable` when it does not
    answer that either.
    """
    name = record_name(repository, head)
    try:
        head.check(name)  # a record that cannot be read back must not be written
    except Damaged:
        before = record_name(repository, head.with_use(sequence=head.sequence - 1))
        raise Damaged(
            f"{before} is no lease: nothing can follow its number or epoch",
            hint=_LAST,
            object=before,
        ) from None
    repository.sealer.prepare()
    body = json.dumps(head.to_dict()).encode("ascii")
    data = objects.encode(objects.LEASE, name, b"", body, repository.sealer)
    try:
        repository.store.put(name, data, if_absent=True)
    except (ObjectExists, StoreUnreachable) as error:
        try:
            return read_record(repository, name).nonce == head.nonce
        except ObjectMissing:
            raise error from None
    return True


def standing(repository: Repository, session: SessionRef, *, over_damage: bool) -> Head | None:
    """Return the newest record; with `over_damage`, a damaged one is replaced by a record held by
    an unknown host.
    """
    try:
        return read_head(repository, session.name)
    except Damaged as error:
        names = _records(repository, session.name)
        if not over_damage or not names or error.details.get("object") != names[-1]:
            raise
    epoch = 0
    for name in names[:-1]:
        with suppress(DataError, ObjectMissing, Conflict):
            epoch = max(epoch, read_record(repository, name).epoch)
    number = int(names[-1][-20:])
    return Head(session, "", "", 0, epoch + (number << _STRIDE), "held", "", "", number)


def record_name(repository: Repository, head: Head) -> str:
    """Return the name of the object for `head`."""
    return f"{_folder(repository, head.session.name)}{head.sequence:020d}"


def _folder(repository: Repository, session: str) -> str:
    return f"sessions/{repository.sealer.token(session)}/"


def _records(repository: Repository, session: str) -> list[str]:
    """Return the names of a session's records, the newest last."""
    folder = _folder(repository, session)
    names = (info.name for info in repository.store.list(folder))
    return [name for name in names if len(name) == len(folder) + 20 and name[-20:].isdigit()]


def read_record(repository: Repository, name: str) -> Head:
    """Return the record that is the object `name`; raise `ObjectMissing`, `Damaged`, or `Conflict`
    where this host has no key for it.
    """
    try:
        data = repository.store.get(name, objects.LEASE.limit)
        outline = objects.layout(objects.LEASE, name, data, len(data))
        head = Head.from_dict(
            load_json(objects.open_body(name, outline, data, repository.sealer), name, len(data)),
            name,
        )
    except Foreign:
        raise Conflict(
            "another host holds the session, or had it last, and this write-only host cannot "
            f"see which: {name}",
            hint=(
                "Use another name here; or go on with the session on a host that has the store's "
                "key."
            ),
            object=name,
        ) from None
    except Damaged as error:
        # otherwise the object that opens it is damaged
        if error.details.setdefault("object", name) == name:
            error.hint = _DAMAGED
        raise
    if record_name(repository, head) != name:
        raise Damaged(f"{name} holds the lease of another session", hint=_DAMAGED, object=name)
    return head


def clear(repository: Repository, head: Head) -> None:
    """Remove records that are long superseded, every `_KEPT` records; errors are ignored, because
    these only cost space.
    """
    if head.sequence % _KEPT:
        return
    with suppress(CriuctlError):
        old = [
            name
            for name in _records(repository, head.session.name)
            if int(name[-20:]) <= head.sequence - _KEPT
        ]
        in_parallel(repository.store.delete, old, _KEPT, "criuctl-clear")


__all__ = [
    "ATTEMPTS",
    "Head",
    "clear",
    "put_record",
    "read_head",
    "read_record",
    "record_name",
    "standing",
]
