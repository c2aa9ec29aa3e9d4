"""The sessions of a store that live nowhere, for a host that takes the place of another one.

A machine that was taken away has dumped and ended its sessions, which released their leases
(`criuctl.host.fencing`): any host may restore them. `homeless` finds, among the sessions with
certain labels, those whose lease is released; those without any lease were dumped once and ended
by that, since a dump that leaves a tree running claims one. Left alone are sessions that a host
holds, which runs them or has died with them (that is for a person to decide, or for a supervisor's
standby), and those that are over, because they were killed or ended.

Labels are those of a session's newest checkpoint, and those that the session itself had. Several
hosts may ask at the same time: the lease decides which one restores a session, and the others leave
it (`criuctl.ops.recovery`).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ..checkpoint import leases
from ..checkpoint.repository import Repository
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..errors import CriuctlError, DataError, StoreCannot
from ..host.identity import host_id
from ..host.registry import Registry
from ..proc.threads import in_parallel
from ..report import Reporter
from ..store import open_store

_READERS = 8


class Homeless(Struct, frozen=True):
    """A session that no host holds, by its newest checkpoint."""

    name: str
    checkpoint: str
    labels: dict[str, str]


def homeless(config: Config, labels: Mapping[str, str], reporter: Reporter) -> list[Homeless]:
    """Return the sessions with all of `labels` in the configured store that live nowhere, by name.

    What cannot be read is a warning. `StoreCannot` on a store without leases, where two hosts could
    restore the same one.
    """
    with open_store(config.store, config) as store, Repository.open(store, config) as repository:
        if not repository.capabilities.conditional_create:
            raise StoreCannot(
                "the store has no conditional writes, so two hosts could restore the same session",
                hint="Restore each by its name: `criuctl restore NAME`.",
            )
        unreadable: list[DataError] = []
        newest = {
            summary.session: summary for summary in repository.list(unreadable=unreadable)
        }  # by session and number
        for error in unreadable:
            reporter.warning(f"a checkpoint is left out: {error.message}", error.hint)
        here = {record.name for record in Registry(config).all() if record.alive()}
        wanted = [summary for name, summary in sorted(newest.items()) if name not in here]
        found = in_parallel(
            lambda summary: _looked(repository, summary, labels),
            wanted,
            _READERS,
            "criuctl-homeless",
        )
    made = []
    for one in found:
        if isinstance(one, CriuctlError):
            reporter.warning(f"a session is left out: {one.message}", one.hint)
        elif one is not None:
            made.append(one)
    return made


def taken(config: Config, name: str, store: str) -> bool:
    """Return whether another host holds the session's lease in this store now."""
    config = config.with_options(store=store)
    try:
        with open_store(store, config) as opened, Repository.open(opened, config) as repository:
            head = leases.read_head(repository, name)
    except CriuctlError:
        return False
    return head is not None and head.state == "held" and head.host != host_id(config)


def _looked(
    repository: Repository, summary: CheckpointSummary, labels: Mapping[str, str]
) -> Homeless | CriuctlError | None:
    try:
        known = dict(summary.labels)
        if not _fits(known, labels):
            holder = repository.manifest(summary.id).holder
            known = {**(holder.labels if holder is not None else {}), **known}
            if not _fits(known, labels):
                return None
        head = leases.read_head(repository, summary.session)
        if head is not None and (
            head.session.id != summary.session_id  # another one has its name now
            or head.state != "released"
            or head.ended
        ):
            return None
        return Homeless(summary.session, summary.id, known)
    except CriuctlError as error:
        return error


def _fits(known: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(known.get(key) == value for key, value in labels.items())
