"""Looking at what a store holds and keeping it in order: list, show, verify, remove.

Short stories over `Repository`, each opening the store, doing one thing and closing it.  None of
them needs CRIU or a process tree.  What concerns one checkpoint of several (damage, a missing
object, an unknown name) is recorded as the outcome of that one and the others are looked at all the
same; what concerns the store as a whole (unreachable, denied, wrong key) ends the operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.manifest import CheckpointSummary
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import (
    AmbiguousRef,
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    InvalidName,
    NoSuchCheckpoint,
    ObjectMissing,
    PlatformError,
    UnsupportedFormat,
)
from ..host import latest_checkpoints
from ..host.journal import events
from ..host.registry import Registry, exclusive_session
from ..proc import netfilter
from ..report import Reporter
from ..session.sessions import state_of
from ..store import open_store
from .shown import Shown, page_maps

_NAMED = 10  # checkpoints in one message


@contextmanager
def opened(config: Config) -> Iterator[tuple[str, Repository]]:
    """The configured store, for one operation: its URL, and what is in it."""
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
    hidden: int = 0  # other hosts' ones, which this write-only host must not read


def list_checkpoints(config: Config, session: str | None = None) -> Listing:
    """The checkpoints of the store, by session and number; `NoSuchCheckpoint` if `session` has
    none.
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
    reporter: Reporter | None = None,
) -> Shown:
    """The manifest of `ref`; with `maps` also which addresses of each address space are stored,
    with `env` the environments.

    Of those the `values`, among which secrets are, are told only if asked for.

    With a slash in it, `ref` is the path of something that is in no store: see `foreign`.
    """
    from ..files import predicates

    found = _look(config, ref, maps, env, reporter or Reporter())
    return replace(
        found,
        values=values,
        predicates=tuple(predicates.verdicts(config, found.manifest, run=False)),
    )


def _look(config: Config, ref: str, maps: bool, env: bool, reporter: Reporter) -> Shown:
    if "/" in ref:
        from .foreign import look

        return look(config, Path(ref), maps=maps, env=env, reporter=reporter)
    with opened(config) as (url, repository):
        manifest = repository.manifest(ref)
        found = page_maps(manifest, repository.reader(reporter)) if maps else {}
        writer = repository.stored_by(manifest.id)
        if not env:
            return Shown(manifest, url, found, writer=writer)
        from .storing.contents import environments

        return Shown(
            manifest, url, found, environments(manifest, repository.reader(reporter)), writer=writer
        )


class Verified(Struct, frozen=True):
    """What `verify` found about one checkpoint; no summary if not even that can be read."""

    summary: CheckpointSummary | None
    bytes: int = 0  # plain bytes that were checked
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """``ok`` and, if it is not, ``error``."""
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

    Of all, who is removed meanwhile, by a prune beside us, was no damage and is left out.
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
    """What became of one REF given to `remove`."""

    ref: str
    summary: CheckpointSummary | None = None
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """``ok`` and what was removed, or ``error``."""
        return {
            "ref": self.ref,
            "ok": self.error is None,
            "id": self.summary.id if self.summary else None,
            "session": (self.summary.session or None) if self.summary else None,
            "number": self.summary.number if self.summary else None,
            "error": None if self.error is None else self.error.to_dict(),
        }


@events.recorded("rm", events.removed)
def remove(config: Config, refs: Sequence[str], *, reporter: Reporter) -> list[Removal]:
    """Remove checkpoints; all REFs are resolved before the first is removed, so that they mean what
    was listed.

    A checkpoint that two of the REFs name is removed, and told, once.  So is one whose manifest is
    damaged: while it is there, nobody knows what it needs, and nothing can be freed.
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
        with telling_removed(gone):
            for removal in looked_up:
                one = remove_one(repository, removal, registry, reporter)
                done.append(one)
                if one.summary is not None and one.error is None:
                    gone.append(one.summary)
            forget_gone(config, repository, gone, reporter)
        return done


@contextmanager
def telling_removed(gone: Sequence[CheckpointSummary]) -> Iterator[None]:
    """Have the error that ends a removal of several tell which are gone already."""
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
    repository: Repository, removal: Removal, registry: Registry, reporter: Reporter
) -> Removal:
    """Remove what `removal` found, with what this host keeps for its sake; a pinned one is an error
    in the result.
    """
    summary = removal.summary
    if summary is None:
        return removal
    name = f"{summary.session}@{summary.number}" if summary.session else summary.id[:12]
    reporter.step(f"remove {name}", checkpoint=summary.id)
    try:
        repository.remove(summary)
    except Conflict as error:  # pinned
        return Removal(removal.ref, summary, error)
    known = registry.get(summary.session) if summary.session else None
    if known is not None and known.checkpoint == summary.id and known.lock_table:
        # Connections that were to be kept have lost what would have taken them up again.
        netfilter.delete_table(known.lock_table)
        registry.put(replace(known, lock_table=""))
    return removal


def forget_gone(
    config: Config, repository: Repository, gone: Sequence[CheckpointSummary], reporter: Reporter
) -> None:
    """This host forgets the sessions of which nothing is left: no process, no holder's word, and no
    checkpoint any more.

    Else each tree that was ever dumped would be listed as lost for ever.  Of the others it notes
    what is the newest now.
    """
    from .kill import forget  # seldom needed

    latest_checkpoints.removed(config, repository, gone, reporter)
    registry = Registry(config)
    for name in sorted({summary.session for summary in gone if summary.session}):
        if registry.get(name) is None:
            continue  # nor need the lock be had, which a plain user may not
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
            continue  # somebody is just making a checkpoint of it; or there is no place for a lock
