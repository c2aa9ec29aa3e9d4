"""One dump under way: the tree is frozen, everything is taken, the checkpoint is committed, the tree is ended or runs on.

`dump` tells the life of a dump, and who may end the tree.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Hashable
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.manifest import ConnectionRecord, FileRecord, InodeRecord, Manifest, PredicateRecord
from ..checkpoint.repository import Repository
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..connections.farewell import Farewell
from ..connections.record import untaken
from ..connections.repair_mode import RepairMode
from ..connections.survey import FreezeAgain, Survey
from ..criu import driver
from ..criu.images import ImageSet
from ..criu.options import DumpOptions
from ..criu.pages import PageImage
from ..errors import CriuctlError, DumpFailed, FrozenTooLong, NoSuchProcess
from ..files import fifos, files, heldinodes, overlays, predicates, remaps
from ..hooks import Hooks
from ..host import connection_locks, hooking, latest
from ..host.fencing import Home
from ..host.holders import DumpedHolder
from ..host.latest import Latest
from ..host.preload import DUMP, preload
from ..host.registry import Registry, SessionRecord, boot_id
from ..namespaces.namespaces import NamespacePlan
from ..proc import netfilter
from ..proc.descriptors import Descriptor, descriptors
from ..proc.sockdiag import socket_inside
from ..proc.threads import Beside, Later
from ..proc.tree import Process, ProcessIdentity, read_tree, wait_ended
from ..repairs.base import FrozenTree
from ..repairs.call_time_limits import Waits
from ..repairs.interrupted_calls import restart_living, restart_seized  # here now, whatever is met when they are needed
from ..repairs.registry import Repairs
from ..report import Reporter
from ..terminals.dumped import DumpedTerminals
from . import arounddump, ownmemory, surroundings
from .delivery import Delivery
from .describe import Taken, describe
from .freeze_limit import FreezeLimit

if TYPE_CHECKING:
    from .devices import DumpedDevices
    from .precopy import Round

_GONE_TIMEOUT = 10.0  # seconds for a killed tree to be gone


class _Beside(Struct, frozen=True):
    """What another thread looks at beside CRIU, while the tree is frozen."""

    heard: Reporter  # what collecting the files tells; nothing of a try that CRIU gives up
    files: Later[tuple[list[FileRecord], list[InodeRecord]]]
    own: Later[dict[int, list[tuple[int, int]]]]


class Dumping(Struct, eq=False):
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
    devices: DumpedDevices | None = None  # GPUs; of a tree that uses some
    tries: int = 0  # of which CRIU has said no
    let_go: bool = False  # CRIU is, or was, about to be told that it may end the tree
    tree: list[Process] = field(default_factory=list)
    opened: dict[int, list[Descriptor]] = field(default_factory=dict)
    helper: Beside | None = None
    beside: _Beside | None = None
    connections: list[ConnectionRecord] = field(default_factory=list)
    required: tuple[PredicateRecord, ...] = ()
    frozen_at: float = 0.0
    frozen_ms: float = 0.0
    rounds: list[Round] = field(default_factory=list)  # of pre-copy
    manifest: Manifest | None = None
    waits: Waits = field(default_factory=Waits)
    farewell: Farewell = field(default_factory=Farewell)
    repair_mode: RepairMode = field(default_factory=RepairMode)
    repairs: Repairs = field(default_factory=Repairs)
    shielded: ExitStack = field(default_factory=ExitStack)
    kept: bool = False  # an external connection is to be kept: the firewall lock stays
    max_freeze: float = 0.0  # seconds; 0: as long as it takes
    limit: FreezeLimit | None = None  # while it runs
    dumped: bool = False  # CRIU is done with the tree, but for letting it go or ending it
    given_back: bool = False  # the tree has got back what was taken from it for CRIU
    giving: threading.Lock = field(default_factory=threading.Lock)  # guards that

    def net_socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        """A socket of ours in the tree's net namespace, which may outlive the tree."""
        return socket_inside(self.net, family, kind, protocol)

    def run(self) -> Manifest:
        """Freeze, take everything, commit; returns the manifest that is in the store."""
        self.holder.read_ahead(self.writer)
        ahead = self.writer.keys()
        self.limit = limit = FreezeLimit(
            self.max_freeze, self.reporter, break_off=self._break_off, undo=self._undo, progress=self._how_far
        )
        with closing(limit):
            self._freeze(limit, ahead)
        assert self.manifest is not None  # commit ran, or the driver raised
        if self.leave_running:
            self.repair_mode.rest()
            self.shielded.close()  # its connections are its own again, and whatever it does to them
            self.holder.thawed()
            exact = None if self.holder.held_since else ImageSet(self.folder).frozen_us()
            if self.devices is not None:
                self.devices.give_back()  # what is lost all the same has the more need of this checkpoint
                if self.devices.taken_at:  # the program has waited since it was locked
                    exact = int((time.monotonic() - self.devices.taken_at) * 1_000_000)
            timings = dict(self.manifest.timings, frozen_ms=round((exact or self.frozen_ms * 1000) / 1000, 1))
            self.manifest = self._store(replace(self.manifest, timings=timings | self._gpu_timings()))
        return self.manifest

    def _gpu_timings(self) -> dict[str, float]:
        return {f"gpu_{name}": ms for name, ms in self.devices.timings.items()} if self.devices is not None else {}

    def _freeze(self, limit: FreezeLimit, ahead: Collection[Hashable]) -> None:
        """Until CRIU has let go of the tree, or ended it."""
        steps = driver.DumpSteps(self.frozen, self.commit, limit.start)
        while True:
            self.survey.wait(self.root)
            self.reporter.step("freeze")
            self.dumped = self.given_back = False
            try:
                with Beside("criuctl-collect") as self.helper:
                    self.helper.do(partial(preload, DUMP))  # beside CRIU
                    self.waits.look(self.root)
                    with self.holder.prepared(self.max_freeze) as freezer, limit.freeze(self._still_since()):
                        self.dumper.dump(self._options(freezer), self.writer, steps)
                return
            except FreezeAgain as error:  # nothing has been taken of the tree yet, and it runs again
                self.holder.unprepare()
                self.tree, self.opened = [], {}
                self.reporter.step("thawed", why=error.message)
            except driver.CriuFailed as error:
                self._outwait(error, ahead)

    def _still_since(self) -> float:
        """Since when the tree stands still before CRIU stops it (monotonic): for its holder, or for its devices; 0: it runs."""
        devices = self.devices.taken_at if self.devices is not None else 0.0
        return min(filter(None, (self.holder.held_since, devices)), default=0.0)

    def _break_off(self, error: FrozenTooLong) -> None:
        """The tree has been frozen for too long: nobody waits for the store, or for more of CRIU's pages."""
        error.message += "; the tree runs on" if self.identity.alive() else "; the tree is gone"
        error.args = (error.message,)
        self.writer.give_up(error)
        self.dumper.break_off()

    def _undo(self) -> None:
        """From the watchdog's thread: let the tree go on, though `frozen` or `commit` have not returned."""
        if self.dumper.asks:
            self._give_back()
            self.dumper.veto()

    def _give_back(self) -> None:
        """The tree is about to go on: what was taken from it for CRIU is its own again, before it can say more."""
        with self.giving:
            if self.given_back:
                return
            self.terminals.back()
            if self.dumped:
                restart_living(ImageSet(self.folder), self.tree, self.reporter)
            else:
                restart_seized(self.tree, self.reporter)
            self.given_back = True

    def _how_far(self) -> str:
        """What the store has got to, for a message."""
        stats = self.writer.stats
        if not stats.bytes_in:
            return ""
        read, new, stored = (n >> 20 for n in (stats.bytes_in, stats.bytes_new, stats.bytes_stored))
        return f" ({read} MiB were read, {new} MiB of them are new, {stored} MiB are stored)"

    def _outwait(self, error: driver.CriuFailed, ahead: Collection[Hashable]) -> None:
        """CRIU has let the tree go for what passes by itself: undo all but the streams `ahead` and wait; else raise `error`."""
        self.tries += 1
        frozen = time.monotonic() - self.frozen_at if self.tree else 0.0
        again = self.tries <= len(arounddump.PAUSES) and frozen < arounddump.LONG and not self.identity.doomed()
        why = arounddump.passing(error, self.tries) if again else ""
        if not why:
            raise error
        if self.tree:
            self.reporter.warning(
                f"CRIU gave up on the tree when it was frozen ({why}), and was asked again: calls that the program waited in "
                "may have ended with EINTR, as for a signal"
            )
        self.terminals.back()
        self.forget_lock()
        self.repair_mode.rest()
        self.shielded.close()
        self.farewell.drop()
        self.holder.unprepare()
        self.hooks.forget("frozen")
        self.writer.keep(ahead)
        driver.empty(self.folder)
        self.tree, self.opened = [], {}
        self.reporter.step("thawed", why=why)
        time.sleep(arounddump.PAUSES[self.tries - 1])
        if not self.identity.alive():
            raise NoSuchProcess(f"PID {self.root} has ended before it was frozen")

    def _options(self, freezer: int | None) -> DumpOptions:
        names = [*self.external, *self.terminals.external]
        asked = {"leased": self.leased, "shield": self.survey.shield}
        return arounddump.dump_options(self.config, self.entry, self.root, names, self.leave_running, freezer, **asked)

    def frozen(self) -> driver.Frozen:
        """Every task is stopped: what /proc says now is what the images will say."""
        assert self.limit is not None
        try:
            with self.limit.interruptible():
                frozen = self._frozen()
            self.reporter.at("pages")
            return frozen
        except BaseException:
            self._give_back()
            raise

    def _frozen(self) -> driver.Frozen:
        self.frozen_at = self.holder.held_since or time.monotonic()
        if self.devices is not None and self.devices.taken_at:
            self.frozen_at = min(self.frozen_at, self.devices.taken_at)  # it has waited for its device since
        if self.delivery is not None:
            self.delivery.frozen()
        self.waits.frozen(2 if self.holder.held_since else 1)
        self.holder.seized()
        self.reporter.step("frozen")
        self.tree = read_tree(self.root)
        self.opened = {p.pid: descriptors(p.pid) for p in self.tree if not p.zombie}
        self.repairs.record(FrozenTree(self.tree, self.opened, self.reporter))
        # Peers are asked over the program's own connections: possible only here, before CRIU locks and repairs them.
        looked = self.survey.frozen(self.tree, self.opened)
        self.repair_mode.watch(self.dumper.conversation, self.dumper.pid, looked.connections)
        if table := self.lock_table():
            self.shielded.enter_context(connection_locks.noted(self.config, self.identity, table, self.repair_mode.known))
        heard = Reporter()
        for finding in untaken(c.held for c in looked.connections):
            heard.finding(finding)
        assert self.helper is not None
        own = self.helper.do(lambda: ownmemory.own_memory(self.tree))
        self.beside = _Beside(heard, self.helper.do(lambda: self._collect(heard)), own)
        if not self.leave_running:
            self.farewell.hold(looked.external)
        self.connections = [c.record for c in looked.connections]
        self.terminals.hold(self.opened, self.dumper.conversation)
        self.hooks.run("frozen", processes=[p.pid for p in self.tree])
        return driver.Frozen(surroundings.page_guards(self.tree), looked.unix_keys())

    def _collect(self, heard: Reporter) -> tuple[list[FileRecord], list[InodeRecord]]:
        """The files of the frozen tree, and which inodes they are."""
        held = heldinodes.record(self.tree, self.opened)
        return self._files(heard), held

    def _files(self, heard: Reporter) -> list[FileRecord]:
        return files.collect(self.writer, self.config, self.opened, self.with_files, self.binaries, self.root, heard)

    def commit(self, memory: list[PageImage]) -> None:
        """Inside post-dump: all pages and images are there.  Returning lets CRIU end (or thaw) the tree."""
        assert self.limit is not None
        self.dumped = True
        try:
            with self.limit.interruptible():
                self._commit(memory, self.limit)
        except BaseException:
            if not self.let_go:
                self._give_back()
            raise

    def _commit(self, memory: list[PageImage], limit: FreezeLimit) -> None:
        self.terminals.seen()
        self.reporter.step("collect")
        self.manifest = self._describe(memory)
        if self.leave_running:
            self.writer.hashed()
            limit.decide()  # before that: it would be interrupted in the middle of giving back
            self._give_back()
            self.frozen_ms = (time.monotonic() - self.frozen_at) * 1000
            return
        self.frozen_ms = (time.monotonic() - self.frozen_at) * 1000
        timings = dict(self.manifest.timings, frozen_ms=round(self.frozen_ms, 1))
        self.manifest = self._store(replace(self.manifest, timings=timings))
        if self.delivery is not None:
            self.delivery.hand_over(self.manifest, [p.identity for p in self.tree])
        # The checkpoint exists.  From here to the end of the tree is no way back, so no signal may stop us.
        self.reporter.step("kill")
        arounddump.ignore_signals()
        root = self.tree[0]
        ended = replace(self.session, state="checkpointed", store=self.where, checkpoint=self.manifest.id, boot_id=boot_id())
        ended = replace(ended, pid=root.pid, start_time=root.start_time)
        self.registry.put(replace(ended, lock_table=self.lock_table(), lock_kept=self.stays_locked))
        self.holder.commit(self.manifest.id)
        limit.decide()
        self.links.clean(self.reporter)  # nobody would remove them if we were killed from here on
        self.terminals.drop()
        self.repair_mode.rest()
        self.shielded.close()
        self.let_go = True

    def _store(self, manifest: Manifest) -> Manifest:
        """Make everything durable, then publish the manifest: THE commit point."""
        self.reporter.step("store")
        self.writer.flush()
        self.hooks.run("post-dump", checkpoint=manifest.id, connections=hooking.about_connections(manifest))
        manifest = replace(self._with_sizes(manifest), hooks=tuple(self.hooks.records()))
        manifest = replace(manifest, fifos=fifos.seen_again(manifest.fifos, self.tree))
        self.reporter.step("commit")
        summary = self.writer.commit(manifest, self.home.look if self.home is not None else None)
        if self.delivery is None:
            latest.note(self.config, Latest.of(summary, self.repository.store.url), self.reporter)
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
        arounddump.refuse_unrestorable(images, self.tree, self.opened)
        self.repairs.amend_dump(images)
        self.waits.amend(images)
        links = self.links.collect(images, self.writer)
        assert self.beside is not None
        file_records, held = self.beside.files.result()
        for text in self.beside.heard.warnings:
            self.reporter.warning(text)
        self.reporter.codes += self.beside.heard.codes
        self.kept = any(c.policy == "keep" and c.external and c.protocol == "tcp" for c in self.connections)
        holder = self.holder.begin(self.writer)
        typed = self.terminals.take(self.tree, self.opened, self.writer)
        own = self.beside.own.result()
        pipes = fifos.with_unread(images, self.tree, self.opened)
        taken = Taken(self.tree, file_records, self.connections, links, self.external, self.entry, own, typed, holder, pipes)
        running = self.leave_running
        made = describe(self.config, self.session, self.labels, taken, images, memory, self.writer, leave_running=running)
        held += heldinodes.of_links(links)
        made = made.with_use(inodes=tuple(held), inodes_mac=heldinodes.mac(self.config, made.session.id, held))
        if self.devices is not None:
            made = made.with_gpu(self.devices.record(), self._gpu_timings())
        return predicates.with_required(made, self.required)

    def fate(self) -> str:
        """What has become of the tree, for a message."""
        return "; the tree runs on" if self.tree and self.tree[0].identity.alive() else "; the tree is gone"

    def mend(self) -> None:
        """The tree goes on: so do its connections, if CRIU could not see to that."""
        self.repair_mode.rest()
        self.repair_mode.mend()
        if self.repair_mode.mended:
            self.reporter.warning(
                f"CRIU was killed while it held {self.repair_mode.mended} TCP sockets of the tree; they work again",
                "A program that waited in a call on one of them may have got EPERM from it.",
            )

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
