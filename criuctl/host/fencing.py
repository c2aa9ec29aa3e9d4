"""Check that this host is still the home of a session that runs on it: the rule of one home.

The lease is in the store (`criuctl.checkpoint.leases`).  A home remembers, in its
`SessionRecord.leases`, by which epoch it claimed the lease, for this life of the session only: for
the very processes that the record names.

    a restore          claims the lease of a session that no host holds; --take-over also from
                       another holder
    a dump that leaves the tree running
                       claims it too, if this home has not: from its first snapshot on a running
                       session has a home that other hosts see, and a plain restore of it on another
                       host is a conflict (exit 9).  A copy (--as) is another session and stays free
    a dump that ends the tree
                       gives it back: the session lives nowhere and the first host may restore it;
                       a kill does so, too, because nothing waits for the session: its newest
                       checkpoint may be pruned as well

RULE: a home that finds a higher epoch than its own is *fenced*: another host has taken the session
over.  It writes nothing more for the session, and its copy is stopped (`lost_homes`).  The lease is
checked by every dump and snapshot before anything is touched and again just before the manifest is
published, and by ``criuctl fence``.  Nothing else fences: not a store that does not answer, not a
lease that is missing or cannot be read, not the lease of another session of that name, and not a
session that has never been claimed.  In those cases a dump refuses, and stops nothing.

criuctl may be killed between asking for the lease and recording the epoch.  So the record first
says that the lease is asked for (epoch 0): then any other host's claim of this session fences, and
one of this host does not.

A store without conditional writes gives no leases: nothing is claimed there, no host is fenced, and
that is reported.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint import leases
from ..checkpoint.leases import Head
from ..checkpoint.manifest import SessionRef
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import Conflict, CriuctlError, HomeLost
from ..proc.tree import ProcessIdentity
from ..report import Reporter
from ..store import open_store
from .identity import host_id, host_name
from .registry import Registry, SessionRecord, boot_id

_PATIENCE = 5.0  # seconds for a store that is informed of an end
_ASKED = 0  # the epoch of a claim whose outcome is not recorded yet


class Fenced(Struct, frozen=True):
    """A home that has lost its session: what it had, and who has it now."""

    session: str
    store: str
    epoch: int  # this home's
    head: Head

    @property
    def text(self) -> str:
        """Return which host took it, and when, in a sentence."""
        taker = self.head.host_name or self.head.host
        has = "which holds it since" if self.head.state == "held" else "which had it until"
        return f"session {self.session!r} was taken over by host {taker}, {has} {self.head.time}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object: this home's epoch, and the present lease."""
        return {
            "session": self.session,
            "store": self.store,
            "epoch": self.epoch,
            "lease": lease_dict(self.head),
        }

    def error(self) -> HomeLost:
        """Return the error that explains why nothing is written."""
        hint = (
            "Its copy here is stale. `criuctl fence` stops such copies; to bring the session "
            "here, end it there first."
        )
        return HomeLost(self.text, hint=hint, **self.to_dict())


def lease_dict(head: Head | None) -> dict[str, Any] | None:
    """Return the JSON object of a lease."""
    if head is None:
        return None
    return {
        "epoch": head.epoch,
        "host": head.host_name or head.host,
        "host_id": head.host,
        "state": head.state,
        "since": head.time,
        "incarnation": head.incarnation,
    }


def with_lease(record: SessionRecord, repository: Repository, epoch: int) -> SessionRecord:
    """Return the record of a home that has claimed the session in this store by `epoch`."""
    claim: dict[str, Any] = {"url": repository.store.url, "epoch": epoch}
    if repository.encrypted:
        # no other store is to take its place unseen: see `criuctl.dump.destination`
        claim["encrypted"] = True
    return replace(record, leases=record.leases | {repository.id: claim})


def epoch_of(record: SessionRecord, repository: Repository) -> int | None:
    """Return by which epoch this home has claimed the session in this store (0: it has asked), None
    if it has not.
    """
    try:
        return int(record.leases[repository.id]["epoch"])
    except (KeyError, TypeError, ValueError):
        return None


def check(config: Config, repository: Repository, record: SessionRecord) -> Fenced | None:
    """Return whether another host has taken over what this home holds in this store; store errors
    are raised, never judged.
    """
    if not repository.capabilities.conditional_create or epoch_of(record, repository) is None:
        return None
    return judge(config, repository, record, leases.read_head(repository, record.name))


def judge(
    config: Config, repository: Repository, record: SessionRecord, head: Head | None
) -> Fenced | None:
    """Apply the rule of the module's docstring."""
    claimed_epoch = epoch_of(record, repository)
    if claimed_epoch is None or head is None or head.session.id != record.id:
        return None
    higher = head.epoch > claimed_epoch if claimed_epoch != _ASKED else head.host != host_id(config)
    return Fenced(record.name, repository.store.url, claimed_epoch, head) if higher else None


def give_back(config: Config, record: SessionRecord) -> list[str]:
    """Give the lease back: the session has ended here, and any host may restore it.

    Return the stores that could not be informed.
    """
    left = []
    ref, host = SessionRef(record.name, record.id), host_id(config)
    claims = dict(record.leases)
    # a dump that ends a tree claims nothing
    if not claims and record.state == "checkpointed" and not record.moved_to:
        claims[""] = {"url": record.store}
    # This is not waited for long: without it, the next home takes the session over by force.
    config = config.with_options(s3_retries=1, s3_timeout=min(config.s3_timeout, _PATIENCE))
    for store_id, claimed in claims.items():
        url = str(claimed.get("url", ""))
        try:
            with open_store(url, config) as store, Repository.open(store, config) as repository:
                if (
                    repository.id != (store_id or repository.id)
                    or check(config, repository, record) is not None
                ):
                    continue
                leases.end(
                    repository, ref, record.incarnation, host=host, host_name=host_name(config)
                )
        except CriuctlError:
            left += [url] if store_id else []
    return left


class Home:
    """The lease of a session during its dump: checked, claimed if the session lives on here,
    checked again.

    A context: what was claimed for a tree that criuctl did not know is given back unless the dump
    succeeded (`keep`).
    """

    def __init__(
        self,
        config: Config,
        repository: Repository,
        registry: Registry,
        session: SessionRecord,
        root: ProcessIdentity,
        reporter: Reporter,
        *,
        lives_on: bool,
    ) -> None:
        """`session`: what `root` is dumped as; a record of that name may be of processes that ended
        long ago.
        """
        same = session.identity == root and session.boot_id == boot_id()
        self.session = session if same else replace(session, leases={}, reason="")
        self._config, self._repository, self._registry, self._reporter = (
            config,
            repository,
            registry,
            reporter,
        )
        self._known = same and session.alive()
        self._lives_on = lives_on
        self._host = host_id(config)
        self._claim: leases.Claim | None = None
        self.seen: Head | None = None  # the lease at the last `look`

    def __enter__(self) -> Self:
        """Make this host the home if the tree lives on; `look` was called before.  `Conflict` when
        another host is faster.
        """
        if not self._repository.capabilities.conditional_create:
            if self._lives_on:
                self._reporter.step("unleased", why=leases.UNLEASED)
            return self
        head = self.seen
        claimed_epoch = epoch_of(self.session, self._repository)
        is_held = head is not None and (head.state, head.host, head.epoch) == (
            "held",
            self._host,
            claimed_epoch,
        )
        if self._lives_on and not is_held:
            self._take(claimed_epoch or 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._claim is not None:
            self._claim.release_unless_kept()

    def keep(self) -> None:
        """Note that the dump has succeeded: its session is known from now on."""
        if self._claim is not None:
            self._claim.keep()
            self._claim.clear()

    def look(self) -> None:
        """Check the lease at first, and again just before something is written for the session.

        `HomeLost` when this home is fenced, `Conflict` when the name's lease is held elsewhere.
        """
        if not self._repository.capabilities.conditional_create:
            return
        self.seen = head = leases.read_head(self._repository, self.session.name, self.seen)
        fenced = judge(self._config, self._repository, self.session, head)
        if fenced is not None:
            raise fenced.error()
        if head is not None and head.state == "held" and head.host != self._host:
            holder = head.host_name or head.host
            raise Conflict(
                f"session {self.session.name!r} is held by host {holder} since {head.time}",
                hint=(
                    "A session lives on one host. If this is another session, choose another name "
                    "with --name."
                ),
                host=holder,
            )

    def _take(self, above: int) -> None:
        session, repository = self.session, self._repository
        self._reporter.step("claim", session=session.name)
        if self._known:
            self._registry.put(with_lease(session, repository, _ASKED))
        try:
            claim = leases.claim(
                repository,
                session.name,
                session.id,
                session.incarnation,
                host=self._host,
                host_name=host_name(self._config),
                above=above,
                seen=self.seen,
            )
        except Conflict:  # another host was faster: this home has never had it
            if self._known:
                self._registry.put(session)
            raise
        self.session = with_lease(session, repository, claim.head.epoch)
        if self._known:
            self._registry.put(self.session)
            claim.keep()
        self._claim = claim
