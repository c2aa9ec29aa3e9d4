"""The home that a session leaves: whether it is the home, and the clean-up when the session runs
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ...checkpoint import leases
from ...checkpoint.manifest import SessionRef
from ...checkpoint.repository import Repository
from ...config import Config
from ...dump.after_commit import AfterCommit
from ...errors import Conflict, CriuctlError, StoreError
from ...host import fencing
from ...host.identity import host_id
from ...host.moves import Incoming, Moves, Outgoing
from ...host.registry import Registry, SessionRecord, boot_id
from ...proc import netfilter
from ...quoting import quoted
from ...report import Reporter
from ...session import sessions
from ...session.client.session import Session
from ...store import open_store
from . import inbox


def check_home(config: Config, record: SessionRecord | None, reporter: Reporter) -> tuple[str, ...]:
    """Refuse the move if another host has taken the session over: the copy here is stale. Return
    the proofs that this host has the keys of the stores with the session's lease.
    """
    proofs: list[str] = []
    for repository in _leased(config, record, reporter):
        assert record is not None
        fenced = fencing.check(config, repository, record)
        if fenced is not None:
            raise fenced.error()
        proofs.append(lease_proof(repository, record.id))
    return tuple(proofs)


def lease_proof(repository: Repository, session_id: str) -> str:
    """Return what only a host with the store's key can know: it may say who holds the lease of the
    session there.
    """
    return repository.sealer.token(f"home of {session_id} in {repository.id}")


def settle_returned(config: Config, move: Incoming, arrived: object) -> None:
    """Forget that the session left here, if the host that sends it back proves (`arrived`) that it
    has run there; raise `Conflict` while another host is still to be informed.
    """
    leaving = Moves(config, Outgoing)
    for left in list(leaving.all()):
        if move.session_id != left.session_id and move.session != left.session:
            continue
        if (
            isinstance(arrived, dict)
            and arrived.get("move") == left.id
            and inbox.same_proof(arrived, left.proof)
        ):
            leaving.forget(left.id)
        elif left.state != "sending":
            raise Conflict(
                f"a session {left.session!r} has left there for {left.host or left.to}, which has "
                "not been informed yet that it may run it",
                hint=f"`criuctl migrate --resolve {quoted(left.session)}` there informs it.",
            )


def moved_away(
    config: Config,
    move: Outgoing,
    host: str,
    answer: Mapping[str, Any],
    reporter: Reporter,
    after: AfterCommit,
) -> None:
    """Record everywhere on this host that the session runs on the host of the id `host`, as far as
    possible.
    """
    record = None
    with after.optional(f"the new home of {move.session!r} could not be recorded"):
        record = Registry(config).get(move.session)
        _record_moved(config, move, answer.get("incarnation", 0))
        Moves(config, Outgoing).forget(move.id)
    with after.optional(f"attached clients could not be redirected to {move.session!r}"):
        _redirect_operators(config, move, answer)
    if record is not None:
        _pass_leases(config, record, move, host, answer, reporter)


def _record_moved(config: Config, move: Outgoing, incarnation: int) -> None:
    registry = Registry(config)
    record = registry.get(move.session) or SessionRecord(move.session, move.session_id)
    if record.alive():
        return  # it has come back meanwhile
    # its connections have left with it: there is nothing to protect here any more
    if record.lock_table and record.boot_id == boot_id():
        netfilter.delete_table(record.lock_table)
    newest = max(record.incarnation, incarnation)
    record = replace(
        record,
        state="checkpointed",
        incarnation=newest,
        checkpoint=move.checkpoint,
        moved_to=move.url,
        home=move.host,
    )
    registry.put(replace(record, lock_table="", lock_kept=False))


def _redirect_operators(config: Config, move: Outgoing, answer: Mapping[str, Any]) -> None:
    """Make the waiting holder redirect attached operators to the new host."""
    state = sessions.state_of(config, move.session)
    if state is None or not state["holder_alive"] or state["id"] != move.session_id:
        return
    with Session.connect(
        move.session, config=config, kind="service", operator="criuctl-migrate", role="admin"
    ) as holder:
        holder.request(
            "moved", to=move.url, host=move.host, incarnation=answer.get("incarnation", 0)
        )


def _pass_leases(
    config: Config,
    record: SessionRecord,
    move: Outgoing,
    host: str,
    answer: Mapping[str, Any],
    reporter: Reporter,
) -> None:
    """Pass on the leases, so that hosts which share a store see the session's new home."""
    for repository in _leased(config, record, reporter):
        try:
            leases.pass_on(
                repository,
                SessionRef(record.name, record.id),
                from_host=host_id(config),
                to_host=host,
                to_name=move.host,
                incarnation=int(answer.get("incarnation", 0)),
            )
        except CriuctlError as error:
            reporter.warning(
                f"the lease of {record.name!r} could not be passed on: {error.message}", error.hint
            )


def _leased(
    config: Config, record: SessionRecord | None, reporter: Reporter
) -> Iterator[Repository]:
    """Return the stores in which this home holds the session's lease; one that does not answer is
    reported and left out.
    """
    for lease in () if record is None else record.leases.values():
        url = str(lease["url"])
        try:
            with open_store(url, config) as store, Repository.open(store, config) as repository:
                yield repository
        except StoreError as error:
            reporter.warning(
                f"{url}, which has the lease of the session, cannot be read: {error.message}",
                error.hint,
            )
