"""Check that the checkpoint found under a session's name is the one that this host expects; only if
a name alone was given.

One refusal is for a checkpoint of another session than the one that this host knows by the name: it
may be forged, or two hosts have given one name to two sessions.  The other is for an older state
(`criuctl.host.latest_checkpoints`).  An explicit reference (NAME@N, an id) is never refused: then
the result says what is newer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import AnotherSession, NoSuchCheckpoint, OlderCheckpoint
from ..host import latest_checkpoints
from ..host.latest_checkpoints import Latest
from ..host.registry import Registry
from ..quoting import quoted
from ..session.names import valid_name


class Found(Struct, frozen=True):
    """The checkpoint that is restored, and a newer one of its session, if there is one."""

    checkpoint: Latest
    newer: dict[str, Any] | None = None  # id, number, store

    def to_dict(self) -> dict[str, Any]:
        """Return its keys of ``restore --json``."""
        made = latest_checkpoints.moment(self.checkpoint.created)
        return {
            "number": self.checkpoint.number,
            "age_s": round(time.time() - made, 3) if made is not None else None,
            "store": self.checkpoint.store,
            "newer": self.newer,
        }


def named_alone(ref: str, name: str) -> bool:
    """Return whether `ref` names a session without a checkpoint: the newest one is meant."""
    return ref in (name, f"{name}@-1")


def look(
    config: Config, repository: Repository, ref: str, manifest: Manifest, *, older: bool
) -> Found:
    """Return what was found by `ref`; `AnotherSession`, and `OlderCheckpoint` unless it may be
    `older`.
    """
    name, url = manifest.session.name, repository.store.url
    found, known = Latest.of(manifest, url), latest_checkpoints.known(config, name)
    last = known if known is not None and known.session == found.session else None
    if named_alone(ref, name):
        _check_session(config, found, known)
        if last is not None and last.newer_than(found) and not older:
            raise _older(last, found)
    if last is not None and last.newer_than(found):
        return Found(found, {"id": last.checkpoint, "number": last.number, "store": last.store})
    return Found(found, None if named_alone(ref, name) else _newer_there(repository, found))


def _check_session(config: Config, found: Latest, known: Latest | None) -> None:
    record = Registry(config).get(found.name)
    ids = {one for one in (record and record.id, known and known.session) if one}
    if not ids or found.session in ids:
        return
    here = record.id if record is not None else known.session if known is not None else ""
    raise AnotherSession(
        f"the newest checkpoint named {found.name!r} in {found.store} is of another session "
        f"({found.session[:12]}) than the one that this host knows by that name ({here[:12]})",
        hint=(
            "Another host uses the same name, or the checkpoint is forged. If it is the right "
            f"one, name it: `criuctl restore {quoted(found.ref)}`."
        ),
        checkpoint=found.checkpoint,
        session=found.session,
        known=here,
    )


def _older(last: Latest, found: Latest) -> OlderCheckpoint:
    hint = "It was removed, perhaps by another host."
    if last.store != found.store:
        hint = (
            f"`criuctl restore {quoted(last.name)} --store {quoted(last.store)}` restores that one."
        )
    return OlderCheckpoint(
        f"the newest checkpoint found is {found.label}, but the last that this host knows of is "
        f"{last.label}",
        hint=f"{hint} To go back to the older one: `criuctl restore {quoted(found.name)} --older`,"
        f" or `criuctl restore {quoted(found.ref)}`.",
        found={"id": found.checkpoint, "number": found.number, "store": found.store},
        newer={"id": last.checkpoint, "number": last.number, "store": last.store},
    )


def _newer_there(repository: Repository, found: Latest) -> dict[str, Any] | None:
    newest = repository.newest_of(found.name)
    if newest is None or newest[0] <= found.number:
        return None
    return {"id": newest[1], "number": newest[0], "store": found.store}


@contextmanager
def offering_elsewhere(config: Config, repository: Repository, ref: str) -> Iterator[None]:
    """Add a hint to the error of a name that is not found: where this host knows a checkpoint of
    it.
    """
    try:
        yield
    except NoSuchCheckpoint as error:
        known = latest_checkpoints.known(config, ref) if valid_name(ref) else None
        if known is not None and known.store != repository.store.url:
            error.hint = (
                f"This host knows of {known.label}: `criuctl restore {quoted(ref)} --store "
                f"{quoted(known.store)}`."
            )
        raise
