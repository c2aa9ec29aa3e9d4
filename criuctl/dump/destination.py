"""Where a checkpoint goes: the store of this host with its lease, or the store of another host."""

from __future__ import annotations

from contextlib import ExitStack

from msgspec import Struct

from ..checkpoint.repository import Repository
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..errors import NoSuchBucket, StoreNotInitialised
from ..host.fencing import Home
from ..host.preload import DUMP, preload
from ..host.registry import Registry, SessionRecord
from ..proc.threads import side_by_side
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..store import Store, open_store
from .delivery import Delivery
from .job import DumpJob
from .subject import Subject


class Destination(Struct):
    """An opened store, and the session as its lease has it."""

    repository: Repository
    writer: CheckpointWriter
    session: SessionRecord
    home: Home | None = None  # None: the session moves, and the two hosts settle whose it is
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
) -> Destination:
    """Open the store and try a write; claim the lease where the tree lives on."""
    home: Home | None = None
    session = subject.session
    if delivery is None:
        job.reporter.step("connect", store=job.config.store)
        store = open_store(job.config.store, job.config)
        stack.callback(store.close)
        preload(DUMP, enough=store.ready)
        repository = _repository(store, job.config, registry, session, subject.root)
        repository.warn_unpinned(job.reporter)
        stack.callback(repository.close)
        lives_on = job.wishes.leave_running
        home = Home(
            job.config, repository, registry, session, subject.root, job.reporter, lives_on=lives_on
        )
        side_by_side("criuctl-preflight", repository.preflight_write, home.look)
        session = stack.enter_context(home).session
    else:
        repository = delivery.open(session)
        stack.callback(repository.close)
        repository.preflight_write()
    # A dump whose tree waits in the freeze for the store may be patient with it.
    patient = not job.wishes.leave_running and not (job.wishes.precopy and delivery is not None)
    writer = stack.enter_context(repository.writer(job.reporter, patient=patient))
    return Destination(repository, writer, session, home, delivery)


def _repository(
    store: Store,
    config: Config,
    registry: Registry,
    session: SessionRecord,
    root: ProcessIdentity,
) -> Repository:
    """Open the repository; an absent or empty folder becomes a store.

    Not where one is gone that this tree has checkpoints in, or an encrypted one of any session: a
    disk is not mounted, and what is put below its mount point is not found again, and not
    encrypted.
    """
    try:
        return Repository.open(store, config)
    except (NoSuchBucket, StoreNotInitialised) as error:
        claims = [*session.leases.values()] if session.identity == root else []
        claims += [
            c for record in registry.all() for c in record.leases.values() if c.get("encrypted")
        ]
        if all(claim.get("url") != store.url for claim in claims):
            return Repository.open(store, config, create_local=True)
        raise type(error)(
            f"the store in {store.url} is gone, which this host has checkpoints in",
            hint=(
                f"Mount what holds it. `criuctl store init --store {quoted(store.url)}` makes a "
                "new one."
            ),
        ) from error
