"""The freeze of a dump: CRIU stops the tree, and all that must be seen while it stands still is
taken.

CRIU was asked early and waits with the tree untouched.  It calls back twice: when every process is
stopped (`Freeze.frozen`), and when it has written all images (`criuctl.dump.commit`).  A tree that
it refuses for something that passes by itself (a process that was just ending, a datagram that was
being put together) runs on for a moment and is tried again.

What is taken from the tree for CRIU's sake (terminals' input, calls that were interrupted) is given
back exactly once, by whichever thread comes first: the main thread, or the watchdog of
`freeze_limit`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import ExitStack, closing

from msgspec import Struct, field

from ..checkpoint.connection_record import ConnectionRecord
from ..checkpoint.file_records import FileRecord, InodeRecord
from ..checkpoint.manifest import ProcessRecord
from ..checkpoint.writer import CheckpointWriter
from ..connections.record import untaken
from ..connections.survey import FreezeAgain
from ..criu import driver, schema
from ..criu.images import ImageSet
from ..criu.pages import PageImage
from ..errors import DumpFailed, FrozenTooLong, NoSuchProcess
from ..files import inode_records, recording
from ..hooks import Hooks
from ..host import connection_locks
from ..host.group_member import AGAIN
from ..proc.descriptors import Descriptor, descriptors
from ..proc.threads import Later, WorkerThread
from ..proc.tree import Process, read_tree
from ..repairs.base import FrozenTree

# loaded now: they are needed in a freeze
from ..repairs.interrupted_calls import restart_living, restart_seized
from ..report import Reporter
from . import criu_facts, private_memory
from .connection_lock import ConnectionLock
from .criu_failures import LONG, PASSES, PAUSES, passing
from .delivery import Delivery
from .freeze_limit import FreezeLimit
from .job import DumpJob
from .manifest_of_tree import process_records
from .parts import TreeParts
from .short_freeze import ShortFreeze


class Seen(Struct):
    """What was seen of the frozen tree, in the last try."""

    tree: list[Process] = field(default_factory=list)
    # complete once `Collected.files` is there
    opened: dict[int, list[Descriptor]] = field(default_factory=dict)
    connections: list[ConnectionRecord] = field(default_factory=list)
    at: float = 0.0  # when the freeze began, monotonic


class Collected(Struct, frozen=True):
    """What another thread collects while CRIU works on the frozen tree."""

    reporter: Reporter  # of the collection: what it reports counts only if this try succeeds
    files: Later[tuple[list[FileRecord], list[InodeRecord]]]
    own: Later[dict[int, list[tuple[int, int]]]]  # see `private_memory`
    processes: Later[list[ProcessRecord]]


class Freeze(Struct, eq=False):
    """The freeze of one dump, with as many tries as CRIU needs."""

    job: DumpJob
    parts: TreeParts
    hooks: Hooks
    writer: CheckpointWriter
    dumper: driver.Dumper
    folder: int  # of CRIU's images
    lock: ConnectionLock
    short: ShortFreeze
    delivery: Delivery | None = None
    seen: Seen = field(default_factory=Seen)
    tries: int = 0  # that CRIU has refused
    _limit: FreezeLimit | None = None
    _helper: WorkerThread | None = None
    _collected: Collected | None = None
    _dumped: bool = False  # CRIU is done with the tree, except for letting it go or ending it
    _given_back: bool = False
    _giving: threading.Lock = field(default_factory=threading.Lock)

    def run(self, commit: Callable[[list[PageImage]], None]) -> None:
        """Freeze the tree and take it; CRIU lets it go or ends it after `commit` has returned."""
        schema.message("CORE")  # loaded now: it is needed in a freeze
        self.parts.holder.read_ahead(self.writer)
        self.parts.terminals.ready()
        ahead = self.writer.keys()  # what a try that failed does not undo
        self._limit = limit = FreezeLimit(
            self.job.max_freeze,
            self.job.reporter,
            break_off=self._break_off,
            undo=self._undo,
            progress=self._stored_so_far,
        )
        steps = driver.DumpSteps(self.frozen, commit, limit.start)
        if self.job.group is not None:  # none stands still while another one is still looked at
            self.job.group.meet("ready")
        with closing(limit):
            while not self._try(steps, limit, ahead):
                pass

    def _try(
        self, steps: driver.DumpSteps, limit: FreezeLimit, ahead: Collection[Hashable]
    ) -> bool:
        """Try once; return False to try again. Raise errors for which another try cannot help."""
        self.parts.survey.wait(self.job.root.pid)
        self.job.reporter.step("freeze")
        self._dumped = self._given_back = False
        try:
            with WorkerThread("criuctl-collect") as self._helper:
                self.parts.call_limits.look(self.job.root.pid)
                holder = self.parts.holder.prepared(self.job.max_freeze)
                with holder as freezer, limit.freeze(self._still_since()):
                    options = self.parts.criu_options(self.job, freezer)
                    self.dumper.dump(options, self.short.sink(self.writer), steps)
        except FreezeAgain as error:  # nothing was taken of the tree yet, and it runs again
            self.parts.holder.unprepare()
            self._forget("thawed", error.message)
        except driver.CriuFailed as error:
            self._outwait(error, ahead)
        else:
            return True
        return False

    def _still_since(self) -> float:
        """When the tree stood still before CRIU stopped it, for its holder or its devices
        (monotonic); 0: it runs.
        """
        devices = self.parts.devices.taken_at if self.parts.devices is not None else 0.0
        return min(filter(None, (self.parts.holder.held_since, devices)), default=0.0)

    def _forget(self, step: str, why: str) -> None:
        self.seen = Seen()
        self.job.reporter.step(step, why=why)

    def _outwait(self, error: driver.CriuFailed, ahead: Collection[Hashable]) -> None:
        """Undo all but the streams `ahead` and wait for what passes by itself; raise `error` if it
        does not.
        """
        self.tries += 1
        frozen = time.monotonic() - self.seen.at if self.seen.tree else 0.0
        again = self.tries <= len(PAUSES) and frozen < LONG and not self.job.root.doomed()
        why = passing(error, self.tries) if again else ""
        # a CRIU that was killed has not undone what it did
        if not why and again and error.undone and (why := self.short.give_up()):
            self.dumper.unfiltered()
        if not why:
            raise error
        if self.job.group is not None and self.job.group.still:
            # its checkpoint is of the moment at which all stood still: all of them begin again
            again_later = DumpFailed(f"{why}; the tree runs on", hint=PASSES)
            again_later.code = AGAIN
            raise again_later from error
        if self.seen.tree:
            self.job.reporter.warning(
                f"CRIU gave up on the tree when it was frozen ({why}), and was asked again: calls "
                "that the program waited in may have ended with EINTR, as for a signal"
            )
        self.parts.terminals.back()
        self.lock.remove()
        self.parts.end_connection_watch()
        self.parts.farewell.drop()
        self.parts.holder.unprepare()
        self.hooks.forget("frozen")
        self.writer.keep(ahead)
        driver.empty(self.folder)
        self._forget("thawed", why)
        time.sleep(PAUSES[self.tries - 1])
        if not self.job.root.alive():
            raise NoSuchProcess(f"PID {self.job.root.pid} has ended before it was frozen")

    # -- what CRIU calls back ----------------------------------------------------------------------

    def frozen(self) -> driver.Frozen:
        """Examine the stopped tree: /proc now shows what the images will contain."""
        try:
            with self.limit.interruptible():
                frozen = self._take_frozen()
            self.job.reporter.at("pages")
            return frozen
        except BaseException:
            self.give_back()
            raise

    def _take_frozen(self) -> driver.Frozen:
        """Take what must be seen while the tree stands still and CRIU has read nothing of it."""
        parts, root = self.parts, self.job.root.pid
        self.seen.at = self._still_since() or time.monotonic()
        if self.delivery is not None:
            self.delivery.frozen()
        parts.call_limits.frozen(2 if parts.holder.held_since else 1)
        parts.holder.seized()
        self.job.reporter.step("frozen")
        self.seen.tree = tree = read_tree(root)
        # of regular files, which may be many, later: see `_files`
        self.seen.opened = opened = {
            p.pid: descriptors(p.pid, still=True, special=True) for p in tree if not p.zombie
        }
        parts.repairs.record(FrozenTree(tree, opened, self.job.reporter))
        # Peers are asked over the program's own connections: only now, before CRIU locks and
        # repairs those.
        with ExitStack() as meanwhile:
            if self.job.group is not None and (table := self.lock.table):
                # it waits for the others, and CRIU's table is there already, without connections
                note = connection_locks.noted(self.job.config, self.job.root, table, ())
                meanwhile.enter_context(note)
            looked = parts.survey.frozen(tree, opened)
        parts.repair_mode.watch(self.dumper.conversation, self.dumper.pid, looked.connections)
        if table := self.lock.table:
            note = connection_locks.noted(
                self.job.config, self.job.root, table, parts.repair_mode.known
            )
            parts.shielded.enter_context(note)
        reporter = Reporter()
        for finding in untaken(c.held for c in looked.connections):
            reporter.finding(finding)
        # Files and memory of one process alone are looked at by another thread, while CRIU reads
        # the memory.
        assert self._helper is not None
        self._collected = Collected(
            reporter,
            own=self._helper.do(lambda: private_memory.own_memory(tree)),
            files=self._helper.do(lambda: self._files(reporter)),
            processes=self._helper.do(lambda: process_records(tree)),
        )
        if not self.job.request.leave_running:
            parts.farewell.hold(looked.external)
        self.seen.connections = [c.record for c in looked.connections]
        parts.terminals.hold(opened, self.dumper.conversation)
        self.hooks.run("frozen", processes=[p.pid for p in tree])
        self.short.frozen(tree)
        return driver.Frozen(criu_facts.page_guards(tree), looked.unix_keys())

    def _files(self, reporter: Reporter) -> tuple[list[FileRecord], list[InodeRecord]]:
        self.seen.opened.update({pid: descriptors(pid, still=True) for pid in self.seen.opened})
        held = inode_records.record(self.seen.tree, self.seen.opened)
        parts, job = self.parts, self.job
        found = recording.collect(
            self.writer,
            job.config,
            self.seen.opened,
            parts.carried,
            parts.binaries,
            job.root.pid,
            reporter,
        )
        if parts.workspace is not None:
            parts.workspace.frozen(self.writer, self.seen.opened, reporter)
        return found, held

    def images_written(self) -> FreezeLimit:
        """CRIU is done with the tree, and waits for the commit."""
        self._dumped = True
        return self.limit

    # -- undoing it --------------------------------------------------------------------------------

    @property
    def limit(self) -> FreezeLimit:
        """The watchdog of the freeze."""
        assert self._limit is not None
        return self._limit

    @property
    def collected(self) -> Collected:
        """What the other thread collects."""
        assert self._collected is not None
        return self._collected

    def give_back(self) -> None:
        """Give the tree back what was taken from it for CRIU, before it runs on; only the first
        call does it.
        """
        with self._giving:
            if self._given_back:
                return
            self.parts.terminals.back()
            if self._dumped:
                restart_living(ImageSet(self.folder), self.seen.tree, self.job.reporter)
            else:
                restart_seized(self.seen.tree, self.job.reporter)
            self._given_back = True

    def _break_off(self, error: FrozenTooLong) -> None:
        """Break off after too long a freeze: wait neither for the store nor for more of CRIU's
        pages.
        """
        error.message += "; the tree runs on" if self.job.root.alive() else "; the tree is gone"
        error.args = (error.message,)
        self.writer.give_up(error)
        self.dumper.break_off()

    def _undo(self) -> None:
        """Let the tree continue, from the watchdog's thread, although `frozen` or the commit has
        not returned.
        """
        if self.dumper.asks:
            self.give_back()
            self.dumper.veto()

    def _stored_so_far(self) -> str:
        """Return the amounts read and stored so far, for a message."""
        stats = self.writer.stats
        if not stats.bytes_in:
            return ""
        read, new, stored = (n >> 20 for n in (stats.bytes_in, stats.bytes_new, stats.bytes_stored))
        return f" ({read} MiB were read, {new} MiB of them are new, {stored} MiB are stored)"
