"""A store with checkpoints in it: making it, opening it, finding checkpoints.

    config                            what the store is: format, id, key slots, capabilities
    keys/<20 digits>                  the same, newer: since keys were changed (`key_generations`)
    packs/<2 hex>/<32 hex>            sealed chunks (`packs`)
    index/<32 hex>                    which chunk is in which pack (`index`)
    checkpoints/<token>/<20 digits>-<id>
                                      manifests; the token stands for the session's name
    groups/<token>/<20 digits>-<id>   group checkpoints; the token stands for the group's name
                                      (`groups`)
    pins/<32 hex>                     pinned checkpoints, by id: a manifest itself never changes
    writing/, gc/                     lists by which writers and garbage collections coordinate
                                      (`gclists`)
    numbers/<token>/<20 digits>       numbers of removed newest checkpoints, so that none is used
                                      twice
    sessions/<token>/<20 digits>      leases (`leases`)
    steps/<token>/<20 digits>         steps of supervised sessions (`step_replica`); the token is of
                                      the session's id
    writers/<32 hex>                  sealed domain keys of write-only hosts (`domains`)

RULE: a checkpoint exists if and only if its manifest does (`manifest_objects`).

Opening reads one object and one list, finds the key and proves it. `list` reads only the heads of
manifests, each once per host. Everything read from a store is checked before it is used.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from ..config import Config
from ..errors import Conflict, DataError, Foreign, StoreFull
from ..proc.threads import side_by_side
from ..quoting import quoted
from ..report import Reporter
from ..store import Capabilities, Store
from . import key_files, keys, manifest_objects, objects
from .cache import Cache
from .cache_path import cache_path
from .catalog import Catalog, parse_name
from .chunks import LAYERS
from .groups import Groups
from .key_generations import Changer
from .manifest import Manifest
from .storeconfig import StoreConfig, create, load
from .summary import CheckpointSummary

if TYPE_CHECKING:
    from .codec import Sealer
    from .index import Index
    from .reader import CheckpointReader
    from .writer import CheckpointWriter

_FRESH = 60.0  # seconds; another writer may reuse what was learned of the store within them
_PATIENT_MIB = 32  # of buffers for a patient producer


class Repository:
    """The checkpoints of one store; made by `init` or `open`.  Safe to use from several threads."""

    def __init__(
        self, store: Store, config: Config, about: StoreConfig, opened: keys.Opened | None
    ) -> None:
        self.store = store
        self.config = config
        self.about = about
        self._opened = opened
        # only features of manifests: every reader of a store's config knows these
        self.features = objects.MANIFEST.features
        self.hangs = False  # a store request was abandoned because the store does not answer
        # monotonic time at which a writer's prerequisites were last read
        self._learned = float("-inf")

    # -- making and opening
    # ----------------------------------------------------------------------------

    @classmethod
    def init(
        cls,
        store: Store,
        *,
        encryption: bool,
        key_file: Path | None = None,
        passphrase: bytes | None = None,
        recovery: bytes | None = None,
        config: Config,
    ) -> Repository:
        """Make a store and return its repository; raise `Conflict` if there is one already.

        The key is made, and is durable, before the store is.

        With `passphrase` the master key is sealed by it. Otherwise it is sealed by `key_file`,
        which is made if it does not exist (by default in ``config.key_dir``). `recovery` is the
        secret of a recovery key that opens the store as well.
        """
        about, opened = create(
            store,
            encryption=encryption,
            key_file=key_file,
            passphrase=passphrase,
            recovery=recovery,
            config=config,
        )
        return cls(store, config, about, opened)

    @classmethod
    def open(cls, store: Store, config: Config, *, create_local: bool = False) -> Repository:
        """Open an existing store.

        Raise `StoreNotInitialised`, `KeyMissing`, `WrongKey`, `UnsupportedFormat`, `Damaged` or an
        error of the store.

        With `create_local` an absent or empty folder becomes a new store, encrypted unless
        ``config.plain_store``. A store that differs from the one this host has pinned raises
        `StoreChanged`. A plain store in S3 that was never pinned raises `StoreNotTrusted`
        (`storepins`).
        """
        about, opened = load(store, config, create_local=create_local)
        return cls(store, config, about, opened)

    @classmethod
    def open_or_make(cls, store: Store, config: Config, reporter: Reporter) -> Repository:
        """Open the store, or make it if its folder is absent or empty; report a new store and its
        key. Raise `Conflict` if ``config.plain_store`` and it is encrypted.
        """
        found = cls.open(store, config, create_local=True)
        found.check_plain_wanted()
        if found.about.made:
            found._report_made(reporter)
        return found

    def check_plain_wanted(self) -> None:
        """Raise `Conflict` if a store without encryption is wanted and this one is encrypted."""
        if self.config.plain_store and self.encrypted:
            raise Conflict(
                f"--no-encrypt: the store in {self.store.url} exists and is encrypted",
                hint="Leave --no-encrypt out; or make another store, without encryption: "
                "`criuctl store init --no-encrypt --store URL`.",
            )

    def _report_made(self, reporter: Reporter) -> None:
        if self._opened is None:
            reporter.notice(f"made the store in {self.store.url}, not encrypted")
            return
        reporter.notice(
            f"made the store in {self.store.url}, encrypted by the key in {self._opened.source}",
            "Keep a copy of the key elsewhere (`criuctl store key --export FILE`): without it "
            "nothing in the store can be restored.",
        )

    @property
    def id(self) -> str:
        """The store's own id, 32 hex digits."""
        return self.about.id

    @property
    def encrypted(self) -> bool:
        """Whether the key is needed to read what is stored."""
        return self.about.encrypted

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store, as found when it was made."""
        return self.about.capabilities

    @property
    def sealer(self) -> Sealer:
        """The sealer that holds the store's keys."""
        return self.about.sealer

    @cached_property
    def cache(self) -> Cache:
        """This host's cache of the store's index and heads."""
        return Cache(self._cache_path(), self.id)

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog of checkpoints."""
        return Catalog(self.store, self.sealer, self.cache)

    @cached_property
    def groups(self) -> Groups:
        """The group checkpoints."""
        conditional = self.capabilities.conditional_create
        return Groups(self.store, self.sealer, self.catalog, conditional=conditional)

    @cached_property
    def index(self) -> Index:
        """The index: which chunk is in which pack."""
        from .index import Index

        return Index(self.store, self.sealer, self.cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the local cache. The caller that opened the store closes the store."""
        # the cache may lie in the store's own folder
        if "cache" in self.__dict__ and not self.hangs:
            self.cache.close()

    def key_info(self) -> dict[str, Any]:
        """Describe the key without revealing it: how the store is opened, by which slot, and the
        path of the key file.
        """
        return keys.described(self._opened, self.about.slots)

    @property
    def write_only(self) -> bool:
        """Whether this host can add to the store but not read what others have stored."""
        return self._opened is not None and self._opened.writer is not None

    def need_key(self, what: str) -> None:
        """Raise `Conflict` on a write-only host, which cannot do `what`."""
        if self.write_only:
            raise Conflict(
                f"this host is write-only, so it cannot {what}",
                hint="Do it on a host that has the store's key.",
            )

    @property
    def opened(self) -> keys.Opened | None:
        """The result of opening a key slot; None for a store that is not encrypted."""
        return self._opened

    def key_changer(self) -> Changer:
        """Return the object that adds and removes keys; raise `Conflict` if the store has none."""
        if self._opened is None:
            raise Conflict("the store is not encrypted, so it has no keys")
        self.need_key("change or list keys")
        return Changer(
            self.store, self.sealer, self.id, conditional=self.capabilities.conditional_create
        )

    def key_text(self) -> str:
        """Return the content of a key file that opens this store; raise `Conflict` if it has no
        key.
        """
        if self._opened is None:
            raise Conflict("the store is not encrypted, so it has no key to export")
        self.need_key("export the store's key, which it does not have")
        return self._opened.key.text()

    def export_key(self, path: Path) -> None:
        """Write a key file that opens this store to the new file `path`, mode 0600; raise
        `Conflict` if it exists.
        """
        try:
            key_files.write_secret(path, self.key_text())
        except FileExistsError:
            raise Conflict(f"{path} exists", hint="Name a new file.") from None

    # -- working with it
    # -------------------------------------------------------------------------------

    def warn_unpinned(self, reporter: Reporter) -> None:
        """Warn if this host cannot record which store it expects here."""
        if self.about.unpinned:
            reporter.warning(
                f"the store in {self.store.url} could not be pinned ({self.about.unpinned}): "
                "criuctl would not notice a different store in its place",
                "Name a state_dir that may be written.",
            )

    def preflight_write(self) -> None:
        """Check that a dump can be written: the store takes objects, and this host has its
        index.
        """
        side_by_side("criuctl-preflight", self._learn, self.store.check_writable)

    def writer(
        self, reporter: Reporter, *, patient: bool = False, uid: int = 0
    ) -> CheckpointWriter:
        """Return a writer of one checkpoint of this user's; use it as a context manager.

        A `patient` producer has nothing to do until everything is durable, so it may wait for the
        store. It gets few buffers, because touching new memory for the first time is slow.
        """
        from .pipeline import Pipeline
        from .writer import CheckpointWriter

        if time.monotonic() - self._learned > _FRESH:
            self._learn()
        buffers = min(self.config.buffers_mib, _PATIENT_MIB) if patient else self.config.buffers_mib
        config = replace(self.config, buffers_mib=buffers)
        pipeline = Pipeline(self.store, self.sealer, self.index, config, reporter, uid)
        return CheckpointWriter(self, pipeline, reporter, layers=LAYERS in self.features)

    def reader(self, reporter: Reporter) -> CheckpointReader:
        """Return a reader of checkpoints' contents."""
        from .reader import CheckpointReader

        return CheckpointReader(self.store, self.sealer, self.index, self.config, reporter)

    def verify(self, manifest: Manifest, reporter: Reporter) -> int:
        """Read and check everything that a restore of the checkpoint would read; return the plain
        bytes.

        Raise `Damaged` or `ObjectMissing` naming the object.
        """
        return self.reader(reporter).verify(manifest.streams())

    # -- finding checkpoints
    # ---------------------------------------------------------------------------

    def resolve(self, ref: str) -> CheckpointSummary:
        """Resolve ``NAME`` (the newest checkpoint), ``NAME@N``, or the first 4 or more digits of an
        id.

        A negative N counts from the end. Raise `NoSuchCheckpoint`, `AmbiguousRef`, and `Damaged` or
        `UnsupportedFormat` when the checkpoint exists but cannot be read.
        """
        return self.catalog.resolve(ref)

    def resolve_damaged(self, ref: str) -> CheckpointSummary:
        """Summarise an unreadable checkpoint from the name of its manifest; the session is empty if
        `ref` does not name it.
        """
        (name,) = self.catalog.locate(ref)
        token, number, checkpoint = parse_name(name)
        session = ref.rpartition("@")[0] or ref
        session = session if self.sealer.token(session) == token else ""
        return CheckpointSummary(checkpoint, session, "", number, 0, "", "", object=name)

    def stored_by(self, checkpoint: str) -> dict[str, str] | None:
        """Return fingerprint and label of the write-only host that stored the checkpoint, which was
        resolved or listed before.

        Return None if a host with the store's key stored it. Unlike the host name in the manifest,
        this is proved cryptographically.
        """
        domain = self.catalog.domains.get(checkpoint)
        if domain is None:
            return None
        author = self.sealer.author(domain)
        labels = [
            str(s.get("label", "")) for s in self.about.slots if s.get("fingerprint") == author
        ]
        return {"fingerprint": author, "label": next(iter(labels), "")}

    def manifest(self, ref: str | CheckpointSummary) -> Manifest:
        """Return the whole manifest; raise `AmbiguousRef`, `Damaged`, `UnsupportedFormat` or
        `NoSuchCheckpoint`.
        """
        if isinstance(ref, str):
            (name,) = self.catalog.locate(ref)
            made: Manifest
            made, pinned = side_by_side(
                "criuctl-manifest",
                lambda: self.manifest_at(name),
                lambda: self.catalog.is_pinned(parse_name(name)[2]),
            )
        else:
            made, pinned = self.manifest_at(ref.object), ref.pinned
        return made.with_use(pinned=True) if pinned and not made.pinned else made

    def manifest_at(self, name: str) -> Manifest:
        """Return the manifest that is the object `name`; errors as `manifest`."""
        manifest, domain = manifest_objects.read(self.store, self.sealer, name)
        if domain:
            self.catalog.domains[manifest.id] = domain
        return manifest

    def newest_of(self, session: str) -> tuple[int, str] | None:
        """Return number and id of the session's newest checkpoint, from the names of manifests
        alone; None if it has none.
        """
        names = self.catalog.names(session)
        return parse_name(next(reversed(names)))[1:] if names else None

    def next_number(self, manifest: Manifest) -> int:
        """Return the number of the next checkpoint of the manifest's session."""
        return self.catalog.next_number(self.sealer.token(manifest.session.name))

    def publish(self, manifest: Manifest, number: int | None = None) -> CheckpointSummary:
        """Put the manifest under its session's next number: THE commit point. All that it names
        must be durable.
        """
        numbered = manifest.with_use(number=number or self.next_number(manifest))
        conditional = self.capabilities.conditional_create
        return manifest_objects.write(self.store, self.sealer, numbered, conditional=conditional)

    def remove(self, summary: CheckpointSummary, *, newer_stays: bool = False) -> None:
        """Remove a checkpoint; raise `Conflict` if it is pinned, or a part of a group checkpoint.
        The garbage collection removes its packs.

        `newer_stays`: the session has one with a higher number, which the caller does not remove:
        then no record is needed that this number was used.
        """
        if summary.pinned or self.catalog.is_pinned(summary.id):
            raise Conflict(
                f"{summary.session}@{summary.number} is pinned",
                hint="Unpin it first: `criuctl unpin`.",
            )
        if group := self.groups.members().get(summary.id):
            raise Conflict(
                f"{summary.session}@{summary.number} is a part of group checkpoint {group}",
                hint=f"Remove that: `criuctl rm --group {quoted(group)}`.",
            )
        token = parse_name(summary.object)[0]
        if not newer_stays and self.catalog.next_number(token) == summary.number + 1:
            used = f"numbers/{token}/{summary.number:020d}"
            try:
                self.store.put(used, b"")
            except StoreFull:
                self.store.delete(summary.object)  # frees the space that the tombstone below needs
                with suppress(StoreFull):
                    self.store.put(used, b"")
        self.store.delete(summary.object)

    # -- inside
    # ----------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Read the state of the store that a new checkpoint depends on."""
        from . import gclists

        self.sealer.prepare()
        _, avoided = side_by_side(
            "criuctl-learn", self.index.look, lambda: gclists.avoided(self.store, self.sealer)
        )
        self.index.avoid(avoided)
        self._learned = time.monotonic()

    def _cache_path(self) -> Path | None:
        if self.capabilities.kind == "memory":
            return None
        writer = self._opened.writer.id if self._opened and self._opened.writer else None
        return cache_path(self.store, self.config, self.id, self.sealer, writer)

    def list(
        self,
        session: str | None = None,
        *,
        unreadable: list[DataError] | None = None,
        hidden: list[DataError] | None = None,
    ) -> list[CheckpointSummary]:
        """List the checkpoints (of one session) by session and number.

        A manifest that cannot be read (damaged, or of a newer criuctl) does not hide the others: it
        is left out and its error is appended to `unreadable`, or to `hidden` where a write-only
        host must not read it.
        """
        errors: list[DataError] = []
        found = self.catalog.summaries(self.catalog.names(session), errors)
        for error in errors:
            into = hidden if isinstance(error, Foreign) else unreadable
            if into is not None:
                into.append(error)
        return sorted(found, key=lambda s: (s.session, s.number, s.created, s.id))
