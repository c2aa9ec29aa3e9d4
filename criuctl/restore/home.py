"""Make this host the home of a session that is restored: its incarnation, its lease, its record."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint import leases
from ..config import Config
from ..host import inside_report
from ..host.fencing import with_lease
from ..host.identity import host_id, host_name
from ..host.registry import RESTORING, Registry, SessionRecord, boot_id
from ..namespaces.restore_lock import table_of
from ..proc.tree import ProcessIdentity
from ..report import Reporter
from .request import RestoreRequest
from .source import Source, Unpacked


class NewHome(Struct):
    """A claimed lease, and the record of the session while it comes back."""

    config: Config
    registry: Registry
    session: SessionRecord  # with its new incarnation
    claim: leases.Claim
    before: SessionRecord | None  # the host's previous record of the name
    record: SessionRecord

    def register(self, root: int, connections: list[dict[str, Any]], reporter: Reporter) -> None:
        """Record the tree before it runs: if criuctl is killed from here on, a session is left, not
        a stray tree.
        """
        self.claim.check()
        start_time = ProcessIdentity.of(root).start_time
        self.record = replace(self.record, state="running", pid=root, start_time=start_time)
        self.registry.put(self.record)
        names = {
            "session": self.record.name,
            "incarnation": self.session.incarnation,
            "checkpoint": self.record.checkpoint,
        }
        inside_report.publish(self.config, root, names, connections, reporter)

    def give_up(self) -> None:
        """Put back the previous record: nothing was restored."""
        with suppress(OSError):
            inside_report.sweep(self.config)
        if self.before is None:
            self.registry.forget(self.record.name)
        else:
            self.registry.put(self.before)

    def keep(self, *, unlocked: bool) -> None:
        """Keep the lease: the tree runs.  `unlocked`: the lock on its connections is down."""
        self.claim.keep()
        if unlocked and self.record.lock_table:
            with suppress(OSError):  # a full disk: the next command looks for the lock once more
                self.registry.put(replace(self.record, lock_table=""))


def claim_home(
    config: Config,
    request: RestoreRequest,
    source: Source,
    session: SessionRecord,
    seen: leases.Head | None,
    reporter: Reporter,
    stack: ExitStack,
) -> leases.Claim:
    """Claim the session's lease; it is released with `stack` unless it is kept."""
    reporter.step("claim", session=source.name)
    claim = leases.claim(
        source.repository,
        session.name,
        session.id,
        session.incarnation,
        host=host_id(config),
        host_name=host_name(config),
        take_over=request.take_over,
        instead_of=request.instead_of,
        ttl=request.ttl,
        copy=request.copy,
        seen=seen,
    )
    stack.callback(claim.release_unless_kept)
    if claim.warning:
        reporter.step("unleased", why=claim.warning)
    if claim.refused:
        reporter.warning(claim.refused)
    return claim


def note_coming(
    config: Config,
    source: Source,
    unpacked: Unpacked,
    registry: Registry,
    session: SessionRecord,
    claim: leases.Claim,
    *,
    copy: bool,
) -> NewHome:
    """Note the firewall lock that CRIU is about to find or make: the next command removes it if
    this one is killed.

    Until it runs, a session is checkpointed; a `copy` has no checkpoint and is no session yet.
    """
    before = registry.get(source.name)
    record = replace(
        session,
        state=RESTORING if copy else "checkpointed",
        boot_id=boot_id(),
        store=config.store,
        checkpoint=source.manifest.id,
        lock_table=table_of(unpacked.images),
        lock_kept=False,
    )
    if claim.leased:
        record = with_lease(record, source.repository, claim.head.epoch)
    if record.lock_table and not (before and before.lock_kept):
        registry.put(record)
    return NewHome(config, registry, session, claim, before, record)
