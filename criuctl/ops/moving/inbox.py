"""The inbox: a store of this host for sessions that arrive from other hosts.

It is encrypted by a key that stays on this host. A sending host is one of its write-only hosts
(`checkpoint.writer_keys`): it seals what it stores by its own keys, and can open nothing of other
hosts; see also `inbox_part`. It keeps the key that it got, to prove later that it is the same host:
then content that it sent before is not sent again. The newest checkpoint of each session is kept:
its content need not be sent again when the session comes back, and if this host dies in the middle,
the session can be restored from it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...checkpoint import gc, writer_keys
from ...checkpoint.codec import keyed_hash
from ...checkpoint.configobject import WRITER
from ...checkpoint.key_generations import described
from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import Conflict, NoSuchBucket, StoreNotInitialised
from ...host import retention
from ...report import Reporter
from ...store import open_store
from .inbox_part import OwnPart

_LABEL = "hosts that send sessions"
_PROOF = b"criuctl 2026-11 sends again"
_GRACE = "1h"  # longer than any transfer


def configured(config: Config) -> Config:
    """Return the configuration with the inbox as its store."""
    return replace(
        config,
        store=str(Path(config.state_dir) / "inbox"),
        key_file="",
        passphrase_file="",
        passphrase_command="",
    )


def opened(config: Config) -> Repository:
    """Open this host's inbox, made if there is none; the caller closes it, and its store."""
    config = configured(config)
    store = open_store(config.store, config)
    try:
        try:
            repository = Repository.open(store, config)
        except (StoreNotInitialised, NoSuchBucket):
            try:
                repository = Repository.init(store, encryption=True, config=config)
            except Conflict:  # another criuctl was faster
                repository = Repository.open(store, config)
        # a later opener must know that other hosts have written to it
        if not repository.sealer.divided:
            _divide(repository)
            repository.close()
            repository = Repository.open(store, config)
        return repository
    except BaseException:
        store.close()
        raise


def _divide(repository: Repository) -> None:
    """Record in the config that there are write-only hosts. No host gets the key of this slot."""
    opened = repository.opened
    assert opened is not None  # it is encrypted
    slot = described(writer_keys.enrol(opened.master, repository.id).slot(), _LABEL)

    def add(slots: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return slots if any(one.get("type") == WRITER for one in slots) else [*slots, slot]

    repository.key_changer().change(add)


def key_for(repository: Repository, move: str, earlier: object) -> writer_keys.WriterKey:
    """Return the key of the sending host: the one that it proves to have (`proof`), or a
    new one.
    """
    opened = repository.opened
    assert opened is not None
    if isinstance(earlier, dict):
        with suppress(TypeError, ValueError):
            key = key_of(repository, str(earlier.get("id")))
            if same_proof(earlier, proof(key, move)):
                return key
    return writer_keys.enrol(opened.master, repository.id)


def key_of(repository: Repository, writer: str) -> writer_keys.WriterKey:
    """Return the key of the sending host with the id `writer`; raise `ValueError` for no id."""
    opened = repository.opened
    assert opened is not None
    return writer_keys.writer_key(opened.master, repository.id, bytes.fromhex(writer))


def same_proof(claim: object, expected: Mapping[str, str]) -> bool:
    """Return whether `claim`, which a peer sent, is the `expected` proof; an empty one proves
    nothing.
    """
    if not isinstance(claim, dict) or not expected.get("proof"):
        return False
    return all(
        secrets.compare_digest(str(claim.get(name)).encode(), str(expected.get(name)).encode())
        for name in ("id", "proof")
    )


def proof(key: writer_keys.WriterKey, move: str) -> dict[str, str]:
    """Return the proof, for the move `move`, of having the key; it reveals nothing of the key
    itself.
    """
    return {"id": key.id.hex(), "proof": keyed_hash(key.secret, _PROOF, move.encode()).hex()}


def tidy(
    repository: Repository, part: OwnPart, session: str, keep: Collection[str], reporter: Reporter
) -> None:
    """Remove the checkpoints of that name that the source of `part` has sent, except those to
    `keep`, and collect garbage.
    """
    for summary in repository.list(session):
        if summary.id not in keep and not summary.pinned and part.is_own(summary.object):
            repository.remove(summary)
    gc.Collection(repository, reporter, grace=retention.seconds(_GRACE)).run()
