"""The life of a dump, told once from top to bottom.

Who may end the tree: only CRIU, only after `_Dump.commit` has returned, which for a dump that ends the tree
is after the manifest is in the store.  Every failure before that, of whatever part, is a veto: CRIU lets the
tree go on and the packs already written stay unreferenced.  ``kill -9`` of criuctl closes CRIU's socket, which
is a veto too.  A dump that leaves the tree running thaws it as soon as everything is in memory of ours, and
uploads afterwards: the tree is never in danger.

CRIU is started while the store is being opened.  It gets ready and waits, the tree untouched, for our word; at the freeze
it is told to go on, or started anew if something else has to be asked of it by then.  A tree that it refuses for what passes by
itself (a process that was just ending, a datagram that was being put together) runs on for a moment, and is tried again.

A dump with a `Delivery` goes to another host, and `commit` returns only after that host has the tree restored.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..checkpoint import leases
from ..checkpoint.manifest import ConnectionRecord, FileRecord, Manifest, PredicateRecord
from ..checkpoint.repository import Repository
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..connections.farewell import Farewell
from ..connections.survey import FreezeAgain, Survey
from ..criu import binary, driver
from ..criu.images import ImageSet
from ..criu.options import DumpOptions
from ..criu.pages import PageImage
from ..errors import CommandFailed, CriuctlError, DumpFailed, NoSuchProcess, PreflightRefused
from ..hooks import Hooks
from ..proc import netfilter
from ..proc.descriptors import Descriptor, descriptors
from ..proc.procfs import reading
from ..proc.scratch import Scratch
from ..proc.sockdiag import socket_inside
from ..proc.tree import Process, ProcessIdentity, read_tree, wait_ended
from ..report import Reporter
from ..store import open_store
from . import (
    dumping,
    events,
    files,
    groupyard,
    hooking,
    insidereport,
    interrupted,
    latesignals,
    overlays,
    ownmemory,
    predicates,
    remaps,
    socketnames,
    surroundings,
)
from .delivery import Delivery
from .describe import DumpResult, Taken, describe
from .fencing import Home
from .holders import DumpedHolder
from .host import host_id
from .namespaces import NamespacePlan, plan_entry
from .registry import Registry, SessionRecord, boot_id, exclusive, exclusive_session, forget_stale_locks
from .standdown import stopping
from .target import resolve_target
from .terminals import DumpedTerminals
from .timelimits import TimeLimits

if TYPE_CHECKING:
    from .precopy import Round

_GONE_TIMEOUT = 10.0  # seconds for a killed tree to be gone


def _operation(wishes: Mapping[str, Any]) -> str:
    """What this dump is called as an event; one in a migration is a part of that."""
    return "" if wishes.get("delivery") is not None else "snapshot" if wishes.get("leave_running") else "dump"


@events.recorded(_operation, about=events.target)
def dump(
    config: Config,
    target: str,
    *,
    reporter: Reporter,
    name: str | None = None,
    leave_running: bool = False,
    labels: dict[str, str] | None = None,
    with_files: Sequence[str] = (),
    connections: str | None = None,
    drain: float = 0.0,
    delivery: Delivery | None = None,
    precopy: bool = False,
    carry_binaries: bool = False,
    require: Sequence[str] = (),
) -> DumpResult:
    """Dump the tree that `target` names into the configured store; see the module's text for what may fail how."""
    began = time.monotonic()
    registry = Registry(config)
    reporter.step("resolve", target=target)
    forget_stale_locks(config)
    groupyard.sweep(config)
    resolved = resolve_target(target, registry.lookup, registry.session_of)
    root = resolved.root
    busy = f"PID {root.pid} is being dumped by another criuctl"
    with ExitStack() as stack:
        stack.enter_context(stopping(config, reporter))
        stack.enter_context(exclusive(config, f"tree/{boot_id()}/{root.pid}/{root.start_time}", busy))
        session = dumping.session_for(registry, resolved, name)
        stack.enter_context(exclusive_session(config, session.name))
        hooks = hooking.of_dump(config, reporter, session, root.pid, labels=labels or {}, leave_running=leave_running)
        stack.enter_context(hooks.telling("dump-failed"))

        # Everything that can be known to fail is found out here, before anything is touched.
        reporter.step("preflight")
        findings, scene = dumping.look_at(resolved, config, reporter, leave_running=leave_running, with_files=with_files)
        errors = [f for f in findings if f.level == "error"]
        if scene is None and errors[0].code == NoSuchProcess.code:  # it has ended just now
            raise NoSuchProcess(errors[0].text, hint=errors[0].hint)
        if errors:
            raise PreflightRefused("; ".join(str(f) for f in errors), hint=errors[0].hint, findings=[f.to_dict() for f in errors])
        assert scene is not None  # else there is an error
        for finding in findings:
            reporter.finding(finding)
        survey = Survey(config, reporter, wish=connections, drain=drain, ending=not leave_running)
        survey.ahead(root.pid, (scene.tree, scene.opened))
        carried = files.resolve_carried(with_files, root.pid)
        required = predicates.wanted(config, session.name, require) if delivery is None else []
        scratch = stack.enter_context(Scratch())
        folder = scratch.folder("images")
        stack.callback(os.close, folder)
        entry = plan_entry(root.pid)
        dumper = driver.Dumper(binary.find(config), folder, entry.prefix)
        stack.callback(dumper.close)
        external = surroundings.external_files(scene.living, scene.opened)
        leased = any(d.leased for held in scene.opened.values() for d in held)
        terminals = DumpedTerminals(root.pid, scene.living, scene.opened, stack)
        with suppress(CriuctlError):  # early, beside the opening of the store; what is wrong with it is told at the freeze
            names = [*external, *terminals.external]
            dumper.ask(dumping.dump_options(config, entry, root.pid, names, leave_running, leased=leased, shield=survey.shield))
        if delivery is None:
            reporter.step("connect", store=config.store)
            store = open_store(config.store, config)
            stack.callback(store.close)
            repository = Repository.open(store, config, create_local=True)
        else:
            repository = delivery.open(session)
            store = repository.store
        stack.callback(repository.close)
        repository.preflight_write()
        home: Home | None = None
        if delivery is None:  # who has a session that moves is settled between the two hosts
            home = Home(config, repository, registry, session, root, reporter, lives_on=leave_running)
            session = stack.enter_context(home).session
        if name is not None and not resolved.session and repository.list(session.name) and registry.get(session.name) is None:
            reporter.warning(f"the store already holds checkpoints named {session.name!r}; this one is added to them")

        with reading(root.pid):
            net = os.open(f"/proc/{root.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, net)
        work = _Dump(
            config=config,
            reporter=reporter,
            registry=registry,
            repository=repository,
            session=session,
            root=root.pid,
            identity=root,
            leave_running=leave_running,
            labels=dict(labels or {}),
            with_files=carried,
            binaries=overlays.Binaries(root.pid, wanted=carry_binaries),
            survey=survey,
            began=began,
            entry=entry,
            links=remaps.DumpedLinks(root.pid, entry, stack),
            external=external,
            leased=leased,
            terminals=terminals,
            holder=DumpedHolder(config, session, root, stack),
            net=net,
            folder=folder,
            dumper=dumper,
            writer=stack.enter_context(repository.writer(reporter, patient=not leave_running and not (precopy and delivery))),
            hooks=hooks,
            delivery=delivery,
            home=home,
        )
        stack.callback(work.farewell.drop)
        stack.enter_context(dumping.handlers_restored())
        hooks.run("pre-dump")
        work.required = predicates.note(config, required)
        try:
            files.store_ahead(work.writer, root.pid, work.binaries)
            if precopy:
                from .precopy import precopy as store_ahead

                work.rounds = store_ahead(work.writer, root.pid, reporter)
                if delivery is not None:
                    work.writer.hurry()
            manifest = work.run()
        except BaseException as error:
            work.forget_lock()
            ended = work.ended()
            if not ended:
                work.terminals.back()
            if isinstance(error, NoSuchProcess | CommandFailed) and work.tree:  # somebody killed CRIU, or a helper of ours
                raise DumpFailed(f"{error.message} while it was dumped{work.fate()}", hint=error.hint) from error
            if not isinstance(error, driver.CriuFailed):
                raise
            if not ended:
                raise dumping.explain(config, error, work.session.name, work.root, work.tree, work.tries) from error
            # The last process of a private PID namespace takes CRIU, its guest, along: no answer, but all is done.
            manifest = work.committed()
        hooks.done = True
        if home is not None:
            home.keep()
        if not leave_running:
            left = work.see_ended()
            try:
                work.tidy()
                insidereport.sweep(config)
            finally:  # whatever of that fails: the tree is not here any more
                if delivery is not None:
                    delivery.ended(left)
            try:
                leases.release(repository, session.name, host=host_id(config))
            except CriuctlError as error:
                reporter.warning(f"the lease of {session.name!r} could not be given back: {error.message}", error.hint)
        record = replace(work.session, store=work.where, checkpoint=manifest.id, boot_id=boot_id())
        lock = work.lock_table() if work.stays_locked else None
        dumping.remember(config, registry, record, work.tree[0].identity, leave_running=leave_running, lock=lock)
        work.holder.done(manifest.id, manifest.number, ended=not leave_running)
    hooks.run("post-commit", number=manifest.number)
    reporter.step("done")
    rounds = [r.to_dict() for r in work.rounds]
    return DumpResult(manifest, store.url, list(reporter.warnings), hooks.degraded, hooks.records(), rounds)


@dataclass(slots=True)
class _Dump:
    """One dump under way."""

    config: Config
    reporter: Reporter
    registry: Registry
    repository: Repository
    session: SessionRecord
    root: int
    identity: ProcessIdentity  # of the root
    leave_running: bool
    labels: dict[str, str]
    with_files: list[str]
    binaries: overlays.Binaries
    survey: Survey
    began: float
    entry: NamespacePlan
    links: remaps.DumpedLinks
    external: dict[str, Descriptor]
    leased: bool
    terminals: DumpedTerminals
    holder: DumpedHolder
    net: int  # descriptor of the tree's net namespace
    folder: int
    dumper: driver.Dumper
    writer: CheckpointWriter
    hooks: Hooks
    delivery: Delivery | None = None
    home: Home | None = None
    tries: int = 0  # of which CRIU has said no
    let_go: bool = False  # CRIU is, or was, about to be told that it may end the tree
    tree: list[Process] = field(default_factory=list)
    opened: dict[int, list[Descriptor]] = field(default_factory=dict)
    helper: ThreadPoolExecutor = field(init=False)
    collected: Future[list[FileRecord]] = field(init=False)
    own: Future[dict[int, list[tuple[int, int]]]] = field(init=False)
    connections: list[ConnectionRecord] = field(default_factory=list)
    required: tuple[PredicateRecord, ...] = ()
    frozen_at: float = 0.0
    frozen_ms: float = 0.0
    rounds: list[Round] = field(default_factory=list)  # of pre-copy
    manifest: Manifest | None = None
    limits: TimeLimits = field(default_factory=TimeLimits)
    farewell: Farewell = field(default_factory=Farewell)
    kept: bool = False  # an external connection is to be kept: the firewall lock stays

    def net_socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        """A socket of ours in the tree's net namespace, which may outlive the tree."""
        return socket_inside(self.net, family, kind, protocol)

    def run(self) -> Manifest:
        """Freeze, take everything, commit; returns the manifest that is in the store."""
        self.holder.read_ahead(self.writer)
        ahead = self.writer.keys()
        steps = driver.DumpSteps(self.frozen, self.commit)
        while True:
            self.survey.wait(self.root)
            self.reporter.step("freeze")
            try:
                with ThreadPoolExecutor(1, thread_name_prefix="criuctl-collect") as self.helper:
                    self.helper.submit(dumping.load_libraries)
                    self.limits.look(self.root)
                    with self.holder.prepared() as freezer:
                        self.dumper.dump(self._options(freezer), self.writer, steps)
                break
            except FreezeAgain as error:  # nothing has been taken of the tree yet, and it runs again
                self.holder.unprepare()
                self.reporter.step("thawed", why=error.message)
            except driver.CriuFailed as error:
                self._outwait(error, ahead)
        assert self.manifest is not None  # commit ran, or the driver raised
        if self.leave_running:
            self.holder.thawed()
            exact = None if self.holder.held_since else ImageSet(self.folder).frozen_us()
            timings = dict(self.manifest.timings, frozen_ms=round((exact or self.frozen_ms * 1000) / 1000, 1))
            self.manifest = self._store(replace(self.manifest, timings=timings))
        return self.manifest

    def _outwait(self, error: driver.CriuFailed, ahead: Collection[Hashable]) -> None:
        """CRIU has let the tree go for what passes by itself: undo all but the streams `ahead` and wait; else raise `error`."""
        self.tries += 1
        why = dumping.passing(error) if self.tries <= len(dumping.PAUSES) and not self.identity.doomed() else ""
        if not why:
            raise error
        self.terminals.back()
        self.forget_lock()
        self.farewell.drop()
        self.holder.unprepare()
        self.hooks.forget("frozen")
        self.writer.keep(ahead)
        driver.empty(self.folder)
        self.tree, self.opened = [], {}
        self.reporter.step("thawed", why=why)
        time.sleep(dumping.PAUSES[self.tries - 1])
        if not self.identity.alive():
            raise NoSuchProcess(f"PID {self.root} has ended before it was frozen")

    def _options(self, freezer: int | None) -> DumpOptions:
        names = [*self.external, *self.terminals.external]
        asked = {"leased": self.leased, "shield": self.survey.shield}
        return dumping.dump_options(self.config, self.entry, self.root, names, self.leave_running, freezer, **asked)

    def frozen(self) -> driver.Frozen:
        """Every task is stopped: what /proc says now is what the images will say."""
        self.frozen_at = self.holder.held_since or time.monotonic()
        if self.delivery is not None:
            self.delivery.frozen()
        self.limits.frozen(2 if self.holder.held_since else 1)
        self.holder.seized()
        self.reporter.step("frozen")
        self.tree = read_tree(self.root)
        self.opened = {p.pid: descriptors(p.pid) for p in self.tree if not p.zombie}
        # Peers are asked over the program's own connections: possible only here, before CRIU locks and repairs them.
        looked = self.survey.frozen(self.tree, self.opened)
        self.own = self.helper.submit(ownmemory.own_memory, self.tree)  # beside CRIU's own work, as the files
        self.collected = self.helper.submit(self._collect)
        if not self.leave_running:
            self.farewell.hold(looked.external)
        self.connections = [c.record for c in looked.connections]
        self.terminals.hold()
        self.hooks.run("frozen", processes=[p.pid for p in self.tree])
        return driver.Frozen(surroundings.page_guards(self.tree), looked.unix_keys())

    def _collect(self) -> list[FileRecord]:
        """The files of the frozen tree."""
        return files.collect(self.writer, self.config, self.opened, self.with_files, self.binaries, self.root, self.reporter)

    def commit(self, memory: list[PageImage]) -> None:
        """Inside post-dump: all pages and images are there.  Returning lets CRIU end (or thaw) the tree."""
        try:
            self._commit(memory)
        except BaseException:
            if not self.let_go:
                interrupted.restart_living(ImageSet(self.folder), self.tree, self.reporter)
            raise

    def _commit(self, memory: list[PageImage]) -> None:
        self.reporter.step("collect")
        self.manifest = self._describe(memory)
        if self.leave_running:
            self.writer.hashed()
            self.terminals.back()
            interrupted.restart_living(ImageSet(self.folder), self.tree, self.reporter)
            self.frozen_ms = (time.monotonic() - self.frozen_at) * 1000
            return
        self.frozen_ms = (time.monotonic() - self.frozen_at) * 1000
        timings = dict(self.manifest.timings, frozen_ms=round(self.frozen_ms, 1))
        self.manifest = self._store(replace(self.manifest, timings=timings))
        if self.delivery is not None:
            self.delivery.hand_over(self.manifest, [p.identity for p in self.tree])
        # The checkpoint exists.  From here to the end of the tree is no way back, so no signal may stop us.
        self.reporter.step("kill")
        dumping.ignore_signals()
        root = self.tree[0]
        ended = replace(self.session, state="checkpointed", store=self.where, checkpoint=self.manifest.id, boot_id=boot_id())
        ended = replace(ended, pid=root.pid, start_time=root.start_time)
        self.registry.put(replace(ended, lock_table=self.lock_table(), lock_kept=self.stays_locked))
        self.holder.commit(self.manifest.id)
        self.terminals.drop()
        self.let_go = True

    def _store(self, manifest: Manifest) -> Manifest:
        """Make everything durable, then publish the manifest: THE commit point."""
        self.reporter.step("store")
        self.writer.flush()
        self.hooks.run("post-dump", checkpoint=manifest.id, connections=hooking.about_connections(manifest))
        manifest = replace(self._with_sizes(manifest), hooks=tuple(self.hooks.records()))
        self.reporter.step("commit")
        if self.home is not None:
            self.home.check()
        summary = self.writer.commit(manifest)
        return replace(manifest, number=summary.number)

    def _with_sizes(self, manifest: Manifest) -> Manifest:
        stats = self.writer.stats
        sizes = dict(manifest.bytes, new=stats.bytes_new, stored=stats.bytes_stored)
        if self.rounds:
            sizes["unused"] = stats.bytes_unused
        timings = dict(manifest.timings, total_ms=round((time.monotonic() - self.began) * 1000, 1))
        return replace(manifest, bytes=sizes, timings=timings, warnings=tuple(self.reporter.warnings))

    def _describe(self, memory: list[PageImage]) -> Manifest:
        images = ImageSet(self.folder)
        if not self.survey.shield and images.streams():  # one came to light that no look shows: what arrives now would be lost
            raise DumpFailed(
                "CRIU has met a TCP connection that was not locked; the tree runs on",
                hint="Its descriptor must be on its way over a unix socket: dump again when the program has received it.",
            )
        dumping.refuse_unrestorable(images, self.tree, self.opened)
        latesignals.add(images, self.tree)
        self.limits.shorten(images)
        socketnames.follow_renamed(images, self.tree, self.reporter)
        links = self.links.collect(images, self.writer)
        file_records = self.collected.result()
        self.kept = any(c.policy == "keep" and c.external and c.protocol == "tcp" for c in self.connections)
        holder = self.holder.begin(self.writer)
        typed = self.terminals.take(self.tree, self.opened, self.writer)
        taken = Taken(
            self.tree, file_records, self.connections, links, self.external, self.entry, self.own.result(), typed, holder
        )
        running = self.leave_running
        made = describe(self.config, self.session, self.labels, taken, images, memory, self.writer, leave_running=running)
        return predicates.with_required(made, self.required)

    def fate(self) -> str:
        """What has become of the tree, for a message."""
        return "; the tree runs on" if self.tree and self.tree[0].identity.alive() else "; the tree is gone"

    def ended(self) -> bool:
        """Whether the checkpoint is committed and the tree is gone, or killed and about to be, whatever CRIU had to say."""
        if self.leave_running or not self.let_go:
            return False
        return all(identity.doomed() for identity in wait_ended((p.identity for p in self.tree), _GONE_TIMEOUT))

    def committed(self) -> Manifest:
        """The manifest that is in the store."""
        assert self.manifest is not None and self.manifest.number
        return self.manifest

    def see_ended(self) -> list[ProcessIdentity]:
        """CRIU has killed the tree: wait for that; who is left."""
        self.reporter.step("cleanup")
        left = wait_ended((p.identity for p in self.tree), _GONE_TIMEOUT)
        if left:
            self.reporter.warning(f"still ending: PIDs {', '.join(str(i.pid) for i in left)}")
        return left

    def tidy(self) -> None:
        """The tree is gone: so goes what was made for the dump, the lock on its connections above all."""
        self.links.clean(self.reporter)
        if not self.stays_locked:
            self.forget_lock()
        self.farewell.say()

    @property
    def where(self) -> str:
        """The URL of the store that has the checkpoint."""
        return self.config.store if self.delivery is None else self.repository.store.url

    @property
    def stays_locked(self) -> bool:
        """Whether the firewall lock waits for a restore here; of a tree that has moved, the connections are elsewhere, too."""
        return self.kept and self.delivery is None

    def lock_table(self) -> str:
        """The firewall table in which CRIU has locked the tree's connections."""
        run_id = driver.run_id(self.folder) if self.survey.shield else None
        return netfilter.criu_table(run_id) if run_id is not None else ""

    def forget_lock(self) -> None:
        """Take down CRIU's lock on the connections: CRIU does so itself, unless it ended the tree or was killed."""
        table = self.lock_table()
        if table:
            try:
                netfilter.delete_table(table, self.net_socket)
            except CriuctlError as error:
                self.reporter.warning(error.message, error.hint)
