"""Where a checkpoint is stored: in this host's store, with its lease, or in the store of another
host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec import Struct

from ..checkpoint.repository import Repository
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..errors import NoSuchBucket, StoreNotInitialised
from ..host.fencing import Home
from ..host.registry import Registry, SessionRecord
from ..proc.credentials import credentials_of
from ..proc.threads import side_by_side
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..report import Reporter
from ..store import Store, open_store
from .delivery import Delivery
from .job import DumpJob
from .subject import Subject


class Destination(Struct):
    """An opened store, and the session as its lease records it."""

    repository: Repository
    writer: CheckpointWriter
    session: SessionRecord
    # None: the session moves, and the two hosts settle which of them owns it
    home: Home | None = None
    delivery: Delivery | None = None

    def where(self, config: Config) -> str:
        """Return the store as this host's next command would name it."""
        return config.store if self.delivery is None else self.url

    @property
    def url(self) -> str:
        """The URL of the store that has the checkpoint."""
        return self.repository.store.url


def open_destination(
    job: DumpJob,
    registry: Registry,
    subject: Subject,
    delivery: Delivery | None,
    stack: ExitStack,
    expected: int,
) -> Destination:
    """Open the store and try a write; claim the lease if the tree runs on here.

    `expected`: the bytes of memory to be stored, about.
    """
    home: Home | None = None
    session = subject.session
    if delivery is None:
        job.reporter.step("connect", store=job.config.store)
        store = open_store(job.config.store, job.config)
        stack.callback(store.close)
        repository = _repository(store, job, registry, session, subject.root)
        repository.warn_unpinned(job.reporter)
        stack.callback(repository.close)
        lives_on = job.request.leave_running
        home = Home(
            job.config, repository, registry, session, subject.root, job.reporter, lives_on=lives_on
        )
        side_by_side("criuctl-preflight", repository.preflight_write, home.look)
        session = stack.enter_context(home).session
    else:
        repository = delivery.open(session)
        stack.callback(repository.close)
        repository.preflight_write()
    # A dump whose tree waits for the store while frozen may be patient with it.
    patient = not job.request.leave_running and not (job.request.precopy and delivery is not None)
    writer = stack.enter_context(_writer(repository, job, subject, patient))
    writer.expect(expected)
    return Destination(repository, writer, session, home, delivery)


def _writer(
    repository: Repository, job: DumpJob, subject: Subject, patient: bool
) -> CheckpointWriter:
    # Users that share a store must not find out by storing a guess what another one's memory holds.
    uid = credentials_of(subject.root.pid).uid
    return repository.writer(job.reporter, patient=patient, uid=uid)


def _repository(
    store: Store,
    job: DumpJob,
    registry: Registry,
    session: SessionRecord,
    root: ProcessIdentity,
) -> Repository:
    own = [*session.leases.values()] if session.identity == root else []
    return opened_or_made(store, job.config, job.reporter, registry, own)


def opened_or_made(
    store: Store,
    config: Config,
    reporter: Reporter,
    registry: Registry,
    own: Sequence[Mapping[str, Any]] = (),
) -> Repository:
    """Open the repository; an absent or empty folder becomes a store, encrypted, if it is the
    configured one: a name given by --store may be mistyped.

    An exception is a folder whose store is gone: one that has checkpoints of this tree (`own` are
    its leases), or an encrypted one of any session.  Then a disk is not mounted, and a store below
    its mount point would be hidden later, and would not be encrypted.
    """
    try:
        found = Repository.open(store, config)
        found.check_plain_wanted()
        return found
    except (NoSuchBucket, StoreNotInitialised) as error:
        if config.store_named:
            raise
        claims = [*own]
        claims += [
            c for record in registry.all() for c in record.leases.values() if c.get("encrypted")
        ]
        if all(claim.get("url") != store.url for claim in claims):
            return Repository.open_or_make(store, config, reporter)
        raise type(error)(
            f"the store in {store.url} is gone, and this host has checkpoints in it",
            hint=(
                "Mount the file system that holds it. `criuctl store init --store "
                f"{quoted(store.url)}` makes a new one."
            ),
        ) from error
