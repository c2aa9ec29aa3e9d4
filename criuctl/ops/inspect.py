"""Looking at the contents of a store and removing checkpoints: list, show, verify, remove.

Each operation opens the store, does one thing over `Repository` and closes it. None of them needs
CRIU or a process tree. An error of one checkpoint among several (damage, a missing object, an
unknown name) is recorded as the outcome of that one, and the others are still processed. An error
of the store as a whole (unreachable, denied, wrong key) ends the operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.repository import Repository
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..errors import (
    AmbiguousRef,
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    Forbidden,
    InvalidName,
    NoSuchCheckpoint,
    ObjectMissing,
    PlatformError,
    UnsupportedFormat,
)
from ..files import predicates
from ..host import latest_checkpoints, rights
from ..host.journal import events, operation_facts
from ..host.registry import Registry, exclusive_session
from ..host.rights import Roles, roles_of
from ..proc import netfilter
from ..report import Reporter
from ..session.sessions import state_of
from ..store import open_store
from .shown import Shown, page_maps

_NAMED = 10  # checkpoints named in one message


@contextmanager
def opened(config: Config) -> Iterator[tuple[str, Repository]]:
    """Open the configured store for one operation; yield its URL and its repository."""
    store = open_store(config.store, config)
    try:
        repository = Repository.open(store, config)
        try:
            yield store.url, repository
        finally:
            repository.close()
    finally:
        store.close()


class Listing(Struct, frozen=True):
    """The checkpoints of a store, and the errors of manifests that cannot be read."""

    checkpoints: list[CheckpointSummary]
    unreadable: list[DataError]
    hidden: int = 0  # checkpoints of other hosts that this write-only host cannot read


def list_checkpoints(config: Config, session: str | None = None) -> Listing:
    """Return the checkpoints of the store, by session and number; raise `NoSuchCheckpoint` if
    `session` has none.
    """
    unreadable: list[DataError] = []
    hidden: list[DataError] = []
    with opened(config) as (_, repository):
        found = repository.list(session, unreadable=unreadable, hidden=hidden)
    if session is not None and not found and not unreadable and not hidden:
        raise NoSuchCheckpoint(f"the store holds no checkpoint of a session named {session!r}")
    return Listing(found, unreadable, len(hidden))


def show(
    config: Config,
    ref: str,
    *,
    maps: bool = False,
    env: bool = False,
    values: bool = False,
    files: bool = False,
    reporter: Reporter | None = None,
) -> Shown:
    """Return the manifest of `ref`; with `maps` also the stored addresses of each address space,
    with `env` the environments, with `files` the files of the workspace.

    The `values` of environment variables can be secrets, so they are shown only on request.

    With a slash in it, `ref` is a path outside any store: see `foreign`.
    """
    found = _look(config, ref, maps, env, files, reporter or Reporter())
    return replace(
        found,
        values=values,
        predicates=tuple(predicates.verdicts(config, found.manifest, run=False)),
    )


def _look(
    config: Config, ref: str, maps: bool, env: bool, files: bool, reporter: Reporter
) -> Shown:
    if "/" in ref:
        from .foreign import look

        return look(config, Path(ref), maps=maps, env=env, reporter=reporter)
    with opened(config) as (url, repository):
        manifest = repository.manifest(ref)
        found = page_maps(manifest, repository.reader(reporter)) if maps else {}
        writer = repository.stored_by(manifest.id)
        entries = None
        if files and manifest.workspace is not None:
            from ..files import workspace_index

            entries = tuple(workspace_index.unpack(manifest.workspace, repository.reader(reporter)))
        if not env:
            return Shown(manifest, url, found, writer=writer, workspace=entries)
        from .storing.contents import environments

        return Shown(
            manifest,
            url,
            found,
            environments(manifest, repository.reader(reporter)),
            writer=writer,
            workspace=entries,
        )


class Verified(Struct, frozen=True):
    """The result of `verify` for one checkpoint; without a summary if even that cannot be read."""

    summary: CheckpointSummary | None
    bytes: int = 0  # plain bytes that were checked
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok`` and, if it is false, ``error``."""
        return {
            "id": self.summary.id if self.summary else None,
            "session": self.summary.session if self.summary else None,
            "number": self.summary.number if self.summary else None,
            "ok": self.error is None,
            "bytes": self.bytes,
            "error": None if self.error is None else self.error.to_dict(),
        }


def verify(config: Config, ref: str | None, *, reporter: Reporter) -> list[Verified]:
    """Read and check everything that a restore of `ref` would need; of every checkpoint if `ref` is
    None.

    In the latter case a checkpoint that a concurrent prune removes is not damage and is left out.
    """
    with opened(config) as (_, repository):
        unreadable: list[DataError] = []
        wanted = (
            repository.list(unreadable=unreadable) if ref is None else [repository.resolve(ref)]
        )
        verdicts = []
        for summary in wanted:
            verdict = _verdict(repository, summary, reporter)
            if ref is not None or verdict.error is None or not _removed(repository, summary):
                verdicts.append(verdict)
    return verdicts + [Verified(None, error=error) for error in unreadable]


def _verdict(repository: Repository, summary: CheckpointSummary, reporter: Reporter) -> Verified:
    reporter.step(f"verify {summary.session}@{summary.number}", checkpoint=summary.id)
    try:
        return Verified(summary, repository.verify(repository.manifest(summary), reporter))
    except (DataError, ObjectMissing, NoSuchCheckpoint) as error:
        return Verified(summary, error=error)


def _removed(repository: Repository, summary: CheckpointSummary) -> bool:
    try:
        repository.manifest(summary)
    except NoSuchCheckpoint:
        return True
    except (DataError, ObjectMissing):
        return False
    return False


class Removal(Struct, frozen=True):
    """The outcome for one REF given to `remove`."""

    ref: str
    summary: CheckpointSummary | None = None
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok``, and the removed checkpoint or ``error``."""
        return {
            "ref": self.ref,
            "ok": self.error is None,
            "id": self.summary.id if self.summary else None,
            "session": (self.summary.session or None) if self.summary else None,
            "number": self.summary.number if self.summary else None,
            "error": None if self.error is None else self.error.to_dict(),
        }


@events.recorded("rm", operation_facts.removed)
def remove(config: Config, refs: Sequence[str], *, reporter: Reporter) -> list[Removal]:
    """Remove checkpoints. All REFs are resolved before the first removal, so that they mean what
    was listed.

    A checkpoint that two of the REFs name is removed, and reported, once. A checkpoint whose
    manifest is damaged is removed as well: while it exists, it is unknown what it needs, and
    nothing can be freed.
    """
    with opened(config) as (_, repository):
        looked_up: list[Removal] = []
        seen: set[str] = set()
        for ref in refs:
            try:
                try:
                    summary = repository.resolve(ref)
                except Damaged:
                    summary = repository.resolve_damaged(ref)
            except (NoSuchCheckpoint, AmbiguousRef, InvalidName, UnsupportedFormat) as error:
                looked_up.append(Removal(ref, error=error))
                continue
            if summary.id in seen:
                continue
            seen.add(summary.id)
            looked_up.append(Removal(ref, summary))
        done: list[Removal] = []
        gone: list[CheckpointSummary] = []
        registry = Registry(config)
        with reporting_removed(gone):
            for removal in looked_up:
                one = remove_one(repository, removal, registry, reporter)
                done.append(one)
                if one.summary is not None and one.error is None:
                    gone.append(one.summary)
            forget_gone(config, repository, gone, reporter)
        return done


def check_right(repository: Repository, operation: str, summary: CheckpointSummary) -> None:
    """Raise `Forbidden` if the operator that asks may not do `operation` to this checkpoint."""

    def stored() -> Roles:
        try:
            return roles_of(repository.manifest_at(summary.object))
        except (DataError, NoSuchCheckpoint):
            return ()  # damaged: it can only be removed

    if summary.session:
        rights.check(repository.config, operation, summary.session, stored)


@contextmanager
def reporting_removed(gone: Sequence[CheckpointSummary]) -> Iterator[None]:
    """Add the checkpoints that are already removed to an error that ends a removal of several."""
    try:
        yield
    except CriuctlError as error:
        if gone:
            names = [
                f"{summary.session}@{summary.number}" if summary.session else summary.id[:12]
                for summary in gone
            ]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            error.message += f"; removed before that: {', '.join(names[:_NAMED])}{more}"
            error.details["removed"] = [summary.id for summary in gone]
        raise


def remove_one(
    repository: Repository,
    removal: Removal,
    registry: Registry,
    reporter: Reporter,
    *,
    newer_stays: bool = False,
) -> Removal:
    """Remove the checkpoint in `removal`, and what this host keeps for it; a pinned one is an error
    in the result. `newer_stays`: as for `Repository.remove`.
    """
    summary = removal.summary
    if summary is None:
        return removal
    name = f"{summary.session}@{summary.number}" if summary.session else summary.id[:12]
    reporter.step(f"remove {name}", checkpoint=summary.id)
    try:
        check_right(repository, "rm", summary)
        repository.remove(summary, newer_stays=newer_stays)
    except (Conflict, Forbidden) as error:  # pinned, or of a session that the operator only sees
        return Removal(removal.ref, summary, error)
    known = registry.get(summary.session) if summary.session else None
    if known is not None and known.checkpoint == summary.id and known.lock_table:
        # The connections that were to be kept can no longer be restored.
        netfilter.delete_table(known.lock_table)
        registry.put(replace(known, lock_table=""))
    return removal


def forget_gone(
    config: Config, repository: Repository, gone: Sequence[CheckpointSummary], reporter: Reporter
) -> None:
    """Forget the sessions without any trace: no process, no record of a holder, and no
    checkpoint.

    Otherwise every tree that was ever dumped would be listed as lost. For the other sessions the
    newest checkpoint is recorded.
    """
    from .kill import forget  # seldom needed

    latest_checkpoints.removed(config, repository, gone, reporter)
    registry = Registry(config)
    for name in sorted({summary.session for summary in gone if summary.session}):
        if registry.get(name) is None:
            continue  # and a plain user may not have the lock
        try:
            with exclusive_session(config, name):
                known = registry.get(name)
                if known is None or known.alive() or known.moved_to or state_of(config, name):
                    continue
                if known.store not in (config.store, repository.store.url):
                    continue
                unreadable: list[DataError] = []
                if not repository.list(name, unreadable=unreadable) and not unreadable:
                    forget(config, name, stored=False)
        except (Conflict, PlatformError):
            continue  # a checkpoint of it is being made; or a lock cannot be created
