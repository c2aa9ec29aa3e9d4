"""The commit of a dump: all images are there, the manifest is put together and stored, and the tree
is ended or runs on.

RULE: the manifest is written last, by one atomic put; its existence is the checkpoint's existence.
RULE: only CRIU ends the tree, only after `Commit.images_complete` has returned, which for a dump
that ends the tree is after the manifest is in the store.  What raises before is a veto: the tree
runs on.

A tree that runs on is thawed as soon as what only the frozen tree shows has been taken (`_take`);
the images are completed, described and stored afterwards (`store_running`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord
from ..checkpoint.manifest import Manifest, PredicateRecord
from ..criu import socketimages
from ..criu.images import ImageSet
from ..criu.pages import PageImage
from ..criu.tenant import objections
from ..errors import DumpFailed
from ..files import fifos, inode_records, predicates
from ..hooks import Hooks
from ..host import hook_facts, latest_checkpoints
from ..host.group_member import AGAIN
from ..host.latest_checkpoints import Latest
from ..host.registry import Registry, boot_id
from ..proc.child import InterruptsDeferred
from ..proc.tree import wait_ended
from ..tracking.rounds import Round
from .criu_failures import PASSES, refuse_unrestorable
from .destination import Destination
from .freeze import Freeze
from .freeze_limit import FreezeLimit
from .job import DumpJob
from .manifest_of_tree import Taken, shown, store_and_describe
from .parts import TreeParts
from .signals import ignore_signals

GONE_TIMEOUT = 10.0  # seconds for a killed tree to be gone


class Commit(Struct, eq=False):
    """The commit of one dump."""

    job: DumpJob
    parts: TreeParts
    hooks: Hooks
    registry: Registry
    destination: Destination
    freeze: Freeze
    required: Sequence[PredicateRecord] = ()
    rounds: list[Round] = field(default_factory=list)  # of pre-copy
    manifest: Manifest | None = None
    let_go: bool = False  # CRIU is, or was, about to be allowed to end the tree
    _memory: list[PageImage] = field(default_factory=list)
    _taken: Taken | None = None
    _kept: bool = False  # an external connection is kept
    _frozen_ms: float = 0.0

    @property
    def stays_locked(self) -> bool:
        """Whether the firewall lock waits for a restore here; not of a tree that has moved: its
        connections are elsewhere.
        """
        return self._kept and self.destination.delivery is None

    def images_complete(self, memory: list[PageImage]) -> None:
        """Inside CRIU's post-dump: returning lets CRIU end the tree, or thaw it."""
        limit = self.freeze.images_written()
        try:
            with limit.interruptible():
                self._complete(memory, limit)
        except BaseException:
            if not self.let_go:
                self.freeze.give_back()
            raise

    def _complete(self, memory: list[PageImage], limit: FreezeLimit) -> None:
        self.parts.terminals.close_input_again()
        self.job.reporter.step("collect")
        self._memory = memory
        self._taken = self._take()
        if self.job.request.leave_running:  # the rest goes on after the thaw, see `store_running`
            self._meet("images")  # while one is still read, none may run on
            limit.stop_clock()  # before it is given back, which must not be interrupted half way
            self.freeze.give_back()
            self._frozen_ms = (time.monotonic() - self.freeze.seen.at) * 1000
            return
        described = self._with_tracked(self._describe())
        self._frozen_ms = (time.monotonic() - self.freeze.seen.at) * 1000
        self._meet("images")
        self.manifest = self._store(self._timed(described, self._frozen_ms))
        if self.job.group is not None:
            limit.stop_clock()  # once one of the members may be ended, all are
            made = {"checkpoint": self.manifest.id, "frozen_ms": self._frozen_ms}
            with InterruptsDeferred() as interrupts:
                self.job.group.meet("committed", decisive=True, **made)
                interrupts.forget()
        if self.destination.delivery is not None:
            identities = [p.identity for p in self.freeze.seen.tree]
            self.destination.delivery.hand_over(self.manifest, identities)
        # The checkpoint exists.  No signal may stop criuctl before the tree is ended; only
        # `stop_clock` below can still keep CRIU from that.
        self.job.reporter.step("kill")
        ignore_signals()
        self._note_ended(self.manifest)
        self.parts.holder.commit(self.manifest.id)
        limit.stop_clock()
        # nothing would remove them if criuctl were killed from here on
        self.parts.links.clean(self.job.reporter)
        self.parts.terminals.drop()
        self.parts.end_connection_watch()
        self.let_go = True

    def _note_ended(self, manifest: Manifest) -> None:
        """Record the session as checkpointed, with the firewall table of its connections."""
        root = self.freeze.seen.tree[0]
        ended = replace(
            self.destination.session,
            state="checkpointed",
            store=self.destination.where(self.job.config),
            checkpoint=manifest.id,
            boot_id=boot_id(),
            pid=root.pid,
            start_time=root.start_time,
            lock_table=self.freeze.lock.table,
            lock_kept=self.stays_locked,
        )
        self.registry.put(ended)

    def store_running(self) -> None:
        """Store the data of a snapshot, whose tree runs again."""
        self.parts.end_connection_watch()
        self.parts.holder.thawed()
        exact = None if self.parts.holder.held_since else ImageSet(self.freeze.folder).frozen_us()
        devices = self.parts.devices
        if devices is not None:
            devices.give_back()  # if a device is lost nevertheless, this checkpoint is needed
            if devices.taken_at:  # the program has waited since it was locked
                exact = int((time.monotonic() - devices.taken_at) * 1_000_000)
        described = self._with_tracked(self._describe())
        timed = self._timed(described, (exact or self._frozen_ms * 1000) / 1000)
        self.manifest = self._store(replace(timed, timings=timed.timings | self._gpu_timings()))

    def _with_tracked(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the memory that was not read by CRIU."""
        return self.freeze.short.completed(
            manifest,
            self._memory,
            self.freeze.folder,
            self.destination.writer,
            self.freeze.collected.own.result(),
        )

    def _meet(self, point: str) -> None:
        """Wait for the other members of the group, if the tree is dumped as one."""
        if self.job.group is not None:
            self.job.group.meet(point)

    def _timed(self, manifest: Manifest, frozen_ms: float) -> Manifest:
        return replace(manifest, timings=dict(manifest.timings, frozen_ms=round(frozen_ms, 1)))

    def _gpu_timings(self) -> dict[str, float]:
        devices = self.parts.devices
        return (
            {f"gpu_{name}": ms for name, ms in devices.timings.items()}
            if devices is not None
            else {}
        )

    def _store(self, manifest: Manifest) -> Manifest:
        """Make everything durable, then publish the manifest: the checkpoint exists."""
        job, writer = self.job, self.destination.writer
        job.reporter.step("store")
        if self.parts.workspace is not None:
            manifest = self.parts.workspace.completed(manifest, writer)
        writer.flush()  # the hooks, and the sizes in the manifest, need to know what was stored
        self.hooks.run(
            "post-dump", checkpoint=manifest.id, connections=hook_facts.about_connections(manifest)
        )
        manifest = replace(self._with_sizes(manifest), hooks=tuple(self.hooks.records()))
        manifest = replace(manifest, fifos=fifos.seen_again(manifest.fifos, self.freeze.seen.tree))
        self._meet("stored")  # a checkpoint of one is of no use without those of the others
        job.reporter.step("commit")
        home = self.destination.home
        summary = writer.commit(manifest, home.look if home is not None else None)
        if self.destination.delivery is None:
            latest_checkpoints.note(
                job.config, Latest.of(summary, self.destination.url), job.reporter
            )
        return replace(manifest, number=summary.number)

    def _with_sizes(self, manifest: Manifest) -> Manifest:
        stats = self.destination.writer.stats
        sizes = dict(manifest.bytes, new=stats.bytes_new, stored=stats.bytes_stored)
        if self.rounds or self.freeze.short.tracks:
            sizes["unused"] = stats.bytes_unused
        total_ms = round((time.monotonic() - self.job.began) * 1000, 1)
        timings = dict(manifest.timings, total_ms=total_ms)
        return replace(
            manifest, bytes=sizes, timings=timings, warnings=tuple(self.job.reporter.warnings)
        )

    def _take(self) -> Taken:
        """Take what only the frozen tree shows; the program waits for it."""
        parts, seen, reporter = self.parts, self.freeze.seen, self.job.reporter
        writer = self.destination.writer
        images = ImageSet(self.freeze.folder)
        _check_links(images, seen.connections)
        parts.repairs.amend_frozen(images)
        parts.call_limits.amend(images)  # a tree that runs on goes on with these, too
        links = parts.links.collect(images, writer)  # CRIU removes them when the tree runs on
        collected = self.freeze.collected
        held = collected.files.result()[1]
        holder = parts.holder.begin(writer)
        if parts.holder.in_flight:
            reporter.warning(
                f"a step that must not be repeated is under way: {parts.holder.in_flight[0]}",
                "A restore goes on in the middle of it.",
            )
        return Taken(
            collected.processes.result(),
            collected.files.result()[0],
            seen.connections,
            links,
            parts.external,
            parts.entry,
            collected.own.result(),
            terminals=parts.terminals.take(seen.tree, seen.opened, writer),
            holder=shown(holder, seen.tree[0].pid),
            fifos=fifos.with_unread(images, seen.tree, seen.opened),
            inodes=[*held, *inode_records.of_links(links)],
        )

    def _describe(self) -> Manifest:
        """Complete CRIU's images, and put the manifest together; the tree may run."""
        assert self._taken is not None
        self.job.reporter.step("describe")
        taken, reporter, writer = self._taken, self.job.reporter, self.destination.writer
        images = ImageSet(self.freeze.folder)
        _check_images(images, self.parts, self.freeze)
        self.parts.repairs.amend_dump(images)
        for text in self.freeze.collected.reporter.warnings:
            reporter.warning(text)
        reporter.codes += self.freeze.collected.reporter.codes
        self._kept = any(
            c.policy == "keep" and c.external and c.protocol == "tcp" for c in taken.connections
        )
        left = self.freeze.short.left(self._memory)
        made = store_and_describe(self.job, self.destination.session, taken, images, left, writer)
        mac = inode_records.mac(self.job.config, made.session.id, taken.inodes)
        made = made.with_use(inodes=tuple(taken.inodes), inodes_mac=mac)
        if self.parts.devices is not None:
            made = made.with_gpu(self.parts.devices.record(), self._gpu_timings())
        return predicates.with_required(made, tuple(self.required))

    # -- the end of the tree -----------------------------------------------------------------------

    def ended(self) -> bool:
        """Return whether the checkpoint is committed and the tree is gone, or killed, whatever CRIU
        has answered.
        """
        if self.job.request.leave_running or not self.let_go:
            return False
        left = wait_ended((p.identity for p in self.freeze.seen.tree), GONE_TIMEOUT)
        return all(identity.doomed() for identity in left)

    def stored_manifest(self) -> Manifest:
        """Return the manifest that is in the store."""
        assert self.manifest is not None and self.manifest.number
        return self.manifest


def _check_links(images: ImageSet, connections: Sequence[ConnectionRecord]) -> None:
    """Raise `DumpFailed` if descriptors are on their way to another member of the group: they
    cannot be kept.
    """
    linked = {c.inode for c in connections if c.linked and c.family == "unix"}
    if linked and socketimages.carry_descriptors(images, linked):
        error = DumpFailed(
            "a descriptor is on its way to another member of the group; the tree runs on",
            hint=PASSES,
        )
        error.code = AGAIN
        raise error


def _check_images(images: ImageSet, parts: TreeParts, freeze: Freeze) -> None:
    """Raise `DumpFailed` for what has come since the preflight, and no restore could bring back."""
    if not parts.survey.shield and socketimages.streams(
        images
    ):  # its input from now on would be lost
        raise DumpFailed(
            "CRIU has met a TCP connection that was not locked; the tree runs on",
            hint=(
                "Its descriptor must be on its way over a unix socket: dump again when the "
                "program has received it."
            ),
        )
    refuse_unrestorable(images, freeze.seen.tree, freeze.seen.opened)
    tenant = freeze.job.request.tenant
    if tenant is not None and (objection := next(objections(images, tenant), None)):
        raise DumpFailed(
            f"{objection}; only what is user {tenant.uid}'s alone is dumped for that user",
            hint="Dump again when that program has ended.",
        )
