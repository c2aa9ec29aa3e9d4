"""The life of a restore, told once from top to bottom.

Nothing of the tree runs before everything is in place: chunks verified, files put back, connections handed
back.  Until then every failure unwinds in reverse: CRIU kills what it had restored (it is told no in
post-restore, or its socket closes), private namespaces end, files put back are undone, firewall tables are
removed, the plain images vanish with their tmpfs, the lease is released.  Nothing is left of it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoint import leases
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.repository import Repository
from ..config import Config
from ..connections import rules
from ..criu import binary, driver
from ..criu.images import ImageSet
from ..criu.lazy import LazyImage, LazyPages
from ..criu.options import RestoreOptions
from ..errors import RestoreFailed
from ..hooks import Hooks
from ..hooks.contract import RECONNECT
from ..hooks.find import executables
from ..proc.command import InterruptsDeferred
from ..proc.namespaces import pid_in
from ..proc.privatens import PrivateNamespaces
from ..proc.scratch import Scratch
from ..proc.tree import ProcessIdentity
from ..report import Reporter
from ..store import open_store
from . import (
    arrival,
    cgroups,
    events,
    groupyard,
    handback,
    hooking,
    insidereport,
    interrupted,
    materialise,
    mend,
    moves,
    overlays,
    predicates,
    remaps,
)
from .absent import absent
from .arrival import RestoreResult
from .earlytasks import EarlyTasks
from .feeding import FedPages, Feeder
from .fencing import with_lease
from .filelocks import locked_elsewhere
from .filling import Filling
from .holders import RestoredHolder
from .host import host_id
from .lazymemory import worthwhile
from .maintenance import check_open
from .netlock import ConnectionLock, table_of
from .plan import RestorePlan, Wishes, make_plan, observe
from .processors import bind_processors
from .putback import Applied, Policy
from .registry import Registry, boot_id, check_name, exclusive_session, forget_stale_locks
from .terminals import RestoredTerminals


def _operation(wishes: Mapping[str, Any]) -> str:
    """What this restore is called as an event; a dry run is none, and what is held is received from another host."""
    return "" if wishes.get("dry_run") else "receive" if wishes.get("held") is not None else "restore"


@events.recorded(_operation, about=events.reference)
def restore(
    config: Config,
    ref: str,
    *,
    reporter: Reporter,
    new_name: str | None = None,
    pids: str = "auto",
    connections: str | None = None,
    connections_deadline: float | None = None,
    files: Policy | None = None,
    lazy: bool | None = False,
    dry_run: bool = False,
    force: bool = False,
    alone: bool = False,
    take_over: bool = False,
    returning: bool = False,
    instead_of: leases.Head | None = None,
    ttl: int = 0,
    repository: Repository | None = None,
    held: Callable[[list[dict[str, Any]]], None] | None = None,
    feeder: Feeder | None = None,
) -> RestoreResult | RestorePlan:
    """Bring the checkpoint that `ref` names back to life here; with `dry_run` only say what would be done.

    `force`: also when it is stale (`predicates`).  `alone`: for a trial, in a network of its own, stale or not.
    `held` is called, with what became of the connections, when everything is in place and nothing has run: when it returns,
    the tree runs; when it raises, nothing is left.  The checkpoint is in `repository` if that is given, which stays open.
    If memory follows, the `feeder` brings it; with `lazy` None it does so where there is one and it is worth it.
    `instead_of` is a lease that has run out, `ttl` (milliseconds) how long the new one lasts without being renewed: see `leases`.
    """
    began = time.monotonic()
    registry = Registry(config)
    if new_name is not None:
        check_name(new_name)
    with ExitStack() as stack:
        reporter.step("resolve", ref=ref)
        forget_stale_locks(config)
        insidereport.sweep(config)
        criu = binary.find(config)
        if repository is None:
            store = open_store(config.store, config)
            stack.callback(store.close)
            repository = Repository.open(store, config)
            stack.callback(repository.close)
        with arrival.offering_another(repository, ref):
            manifest = repository.manifest(ref)
        stack.enter_context(arrival.offering_another(repository, ref, manifest))
        name = new_name or manifest.session.name
        stack.enter_context(exclusive_session(config, name))
        arrival.check_not_running(registry, name, copy=new_name is not None)
        if not (dry_run or alone or returning or held is not None):
            check_open(config)
        if new_name is None and held is None:
            moves.check_at_home(config, name, take_over=take_over)
        hooks = hooking.of_restore(config, reporter, manifest, name)
        if not dry_run:
            stack.enter_context(hooks.telling("restore-failed"))

        reporter.step("preflight")
        reader = repository.reader(reporter)
        scratch = stack.enter_context(Scratch())
        folder = scratch.folder("images")
        stack.callback(os.close, folder)
        materialise.write_images(manifest, reader, folder)
        images = ImageSet(folder)
        terminals = RestoredTerminals(manifest, images)
        wishes = Wishes(
            pids,
            new_name is not None,
            connections,
            files or config.file_conflicts,
            rules.parse(config),
            connections_deadline,
            frozenset(hook.name for hook in executables(config, RECONNECT)),
            alone,
        )
        remains = arrival.remains_of(manifest)
        facts = observe(manifest, images.reserved_ids(), remains, wishes)
        if not alone:
            stale = predicates.examine(config, manifest, force=force)
            locked = locked_elsewhere(images, copy=new_name is not None)
            gone = absent(images, manifest, facts.files, facts.missing_folders)
            facts = replace(facts, findings=(*facts.findings, *stale, *locked, *gone))
        plan = make_plan(manifest, facts, wishes)
        if dry_run:
            return plan
        if plan.errors:
            raise arrival.refusal(plan.errors)
        for finding in plan.findings:
            reporter.finding(finding)

        reporter.step("claim", session=name)
        session = arrival.next_incarnation(registry, manifest, name, copy=new_name is not None)
        hooks.run("pre-restore", incarnation=session.incarnation, connections=plan.to_dict()["connections"])
        claim = leases.claim(
            repository,
            session.name,
            session.id,
            session.incarnation,
            host=host_id(config),
            host_name=platform.node(),
            take_over=take_over,
            instead_of=instead_of,
            ttl=ttl,
            copy=new_name is not None,
        )
        stack.callback(claim.release_unless_kept)
        if claim.warning:
            reporter.step("unleased", why=claim.warning)
        if claim.refused:
            reporter.warning(claim.refused)

        reporter.step("pages")
        if lazy is None:
            lazy = feeder is not None and worthwhile(manifest.memory, reader)
        pages = materialise.lazy_pages(manifest, reader, folder) if lazy else {}
        filling = None
        if not lazy:
            filling = materialise.write_pages(manifest, reader, folder)
            stack.callback(filling.stop)
        if lazy and feeder is not None:
            feeder.load(manifest, folder)
        if scratch.free_bytes() == 0:
            raise RestoreFailed("memory for the images ran out", hint="The host has too little free memory for this checkpoint.")

        before = registry.get(name)
        here = replace(session, state="checkpointed", boot_id=boot_id(), store=config.store, checkpoint=manifest.id)
        here = replace(here, lock_table=table_of(images), lock_kept=False)
        if claim.leased:
            here = with_lease(here, repository, claim.head.epoch)
        if here.lock_table and not (before and before.lock_kept):
            registry.put(here)  # the next command takes the lock down, should this one be killed

        def register(root: int) -> None:
            """Known before it runs: a criuctl that is killed from here on leaves a session, not a stray tree."""
            nonlocal here
            claim.check()
            here = replace(here, state="running", pid=root, start_time=ProcessIdentity.of(root).start_time)
            registry.put(here)
            names = {"session": name, "incarnation": session.incarnation, "checkpoint": manifest.id}
            insidereport.publish(config, root, names, work.connections, reporter)

        copy = new_name is not None
        holder = RestoredHolder(config, manifest, session)
        work = _Restore(
            config,
            reporter,
            manifest,
            plan,
            images,
            terminals,
            holder,
            folder,
            reader,
            register,
            pages,
            hooks,
            copy=copy,
            held=held,
            feeder=feeder,
            filling=filling,
        )
        with ExitStack() as running:
            try:
                root = work.run(criu, running)
            except BaseException as error:
                insidereport.sweep(config)
                if before is None:
                    registry.forget(name)
                else:
                    registry.put(before)
                if isinstance(error, driver.CriuFailed):
                    raise arrival.explain(config, error, manifest) from error
                raise
            hooks.done = True
            claim.keep()
            if here.lock_table:
                with suppress(OSError):  # a full disk: the next command looks for the lock once more
                    registry.put(replace(here, lock_table=""))
        if not os.path.exists(f"/proc/{root}"):
            reporter.warning(f"PID {root}: the restored root has ended already")
    hooks.run("post-resume")
    reporter.step("done")
    return RestoreResult(
        checkpoint=manifest.id,
        session=name,
        incarnation=session.incarnation,
        pid=root,
        inner_pid=work.inner_root,
        elapsed_ms=round((work.running_at - began) * 1000, 1),
        lazy=lazy,
        pids=plan.pids,
        connections=work.connections,
        files=[{"path": path, "newer_copy": aside} for path, aside in work.aside],
        warnings=list(reporter.warnings),
        degraded=hooks.degraded or any(c["outcome"] == "failed" for c in work.connections),
        hooks=hooks.records(),
    )


@dataclass(slots=True)
class _Restore:
    """One restore under way: from images and pages in a folder to a running tree."""

    config: Config
    reporter: Reporter
    manifest: Manifest
    plan: RestorePlan
    images: ImageSet
    terminals: RestoredTerminals
    holder: RestoredHolder
    folder: int
    reader: CheckpointReader
    register: Callable[[int], None]  # the root's PID, before it runs
    lazy: dict[int, LazyImage]  # pages that follow later; empty for an eager restore
    hooks: Hooks
    copy: bool = False  # beside a live original
    held: Callable[[list[dict[str, Any]]], None] | None = None
    feeder: Feeder | None = None
    filling: Filling | None = None  # pages of an eager restore that CRIU does not bring
    inner_root: int = 0  # the root's PID as the tree sees it
    connections: list[dict[str, Any]] = field(default_factory=list)
    aside: list[tuple[str, str]] = field(default_factory=list)
    placed: ProcessIdentity | None = None  # the root, from when it is restored until it runs
    early: EarlyTasks | None = None  # who gives terminals to leaders before they have children
    following: LazyPages | FedPages | None = None  # who brings the pages of a lazy restore
    running_at: float = 0.0  # monotonic
    root: int = 0  # the root's PID as we see it, once the tree runs for good
    net: int | None = None  # descriptor of the net namespace, if it is not ours

    def run(self, criu: binary.CriuBinary, running: ExitStack) -> int:
        """Restore and let it run; returns the root's PID as we see it.

        From when it runs for good no signal breaks anything off until `running` is left, and no failure: there is no way back,
        and a tree that nobody knows of, or whose lease is given back, might be restored a second time.
        """
        try:
            self._run(criu, running)
        except Exception as error:
            if not self.root:
                raise
            self.reporter.warning(f"not everything that was made for the restore could be taken down: {error}")
        return self.root

    def _run(self, criu: binary.CriuBinary, running: ExitStack) -> None:
        manifest, plan = self.manifest, self.plan
        self.inner_root = self.images.pids()[0]
        self.images.give_up(handback.endings(plan.connections))
        # What came along is as it was read, and somebody may have made it shorter just then: CRIU may know another size.
        judged = {j.record.path for j in plan.files if j.verdict in ("grown", "moved-on") or j.record.data is not None}
        if judged:
            self.images.forget_sizes(judged)

        with ExitStack() as stack:
            applied = Applied(self.reader, manifest.id[:8])
            stack.callback(lambda: None if self.root else applied.undo())
            self.reporter.step("files")
            applied.apply(plan.files)
            self.images.forget_modes()
            stack.enter_context(remaps.provided(manifest.links, self.reader))
            self.holder.prepare(self.reader, stack, private=plan.pids == "private")
            private: PrivateNamespaces | None = None  # whose PIDs CRIU will speak of
            prefix: list[str] = []
            if plan.net in ("named", "existing"):
                self.net = os.open(plan.net_source, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, self.net)
                prefix = ["nsenter", f"--net={plan.net_source}", "--"]
            network = list(prefix)
            fresh: PrivateNamespaces | None = None
            if plan.pids == "private" or plan.net == "private":
                spaces = PrivateNamespaces(
                    net=plan.net == "private",
                    reserved=self.images.reserved_ids(),
                    bind=self.holder.shown,
                    layers=stack.enter_context(overlays.laid(plan.files, self.reader)),
                    start=self.holder.starter,
                )
                fresh = stack.enter_context(spaces)
                # A tree that is PID 1 makes its own PID namespace: CRIU must stay outside of any other.
                private = None if plan.pids == "init" else fresh
                network = [*prefix, *(fresh.net_entry if fresh.net else [])]
                prefix += fresh.net_entry if private is None else fresh.entry
            lock = ConnectionLock(self.images, self.reporter, self.net, fresh=plan.net == "private")
            stack.callback(lambda: lock.remove(failed=not self.root))
            lock.make(network)  # not with libraries that came along
            on: str | None = None
            if plan.pids == "init":
                on = arrival.mount_point()
                prefix += [*arrival.PRIVATE_ROOT, on]
            groups = self._groups_anew(stack)
            stack.callback(lambda: arrival.kill_tree(self.placed))
            inherit = self._open_external(stack) | self.terminals.open(stack)
            self.reporter.step("restore")
            options = RestoreOptions(shell_job=True, lazy=bool(self.lazy), groups=groups, inherit=inherit, root=on)
            mend.arm_timers(self.images)
            if not self.holder.needed:
                mend.drop_parent_signal(self.images, self.reporter)
            interrupted.restart_saved(self.images)
            space = private.pid_namespace if private is not None else None
            early = EarlyTasks(self.inner_root, self.terminals.controlling(), mend.needs_subreaper(self.images), space)
            if early.terminals or early.subreaper:
                stack.callback(early.stop)
                self.early = early
            if self.lazy:
                self.following = (
                    stack.enter_context(LazyPages(criu, self.folder, self.lazy, prefix))
                    if self.feeder is None
                    else stack.enter_context(self.feeder.pages(criu, prefix))
                )
            if self.filling is not None:
                self.filling.begin()
            start = self.holder.starter if private is None else None
            driver.restore(
                criu,
                self.folder,
                options,
                lambda pid: self._placed(pid, private),
                enter=prefix,
                start=start,
                about_to_fork=self.early.follow if self.early is not None else None,
                about_to_run=self.holder.settle,
            )
            self.running_at = time.monotonic()
            if fresh is not None:
                fresh.keep(self.inner_root, ends_with_root=self.holder.ends_with_root)
            assert self.placed is not None  # CRIU has passed post-restore, or the driver raised
            root = self.placed.pid  # it may have ended already: that is no failure of the restore
            if self.following is not None:
                self.reporter.step("pages-follow")
                self.following.finish()
            running.enter_context(InterruptsDeferred())
            self.root, self.placed, self.aside = root, None, applied.aside

    def _placed(self, inner: int, private: PrivateNamespaces | None) -> None:
        """Everything is restored, nothing has run: the last moment at which all can be taken back."""
        self.reporter.step("post-restore")
        self.terminals.made()
        root = self._outer(inner, private)
        self.placed = ProcessIdentity.of(root)
        if self.following is not None:
            self.following.watch(self.placed)
        if self.early is not None and (bereft := self.early.stop()):
            self.reporter.warning(f"sessions {sorted(bereft)}: only their leaders have their controlling terminal")
        pids = handback.outer_pids(root)
        if self.filling is not None:
            self.reporter.step("memory")
            self.filling.finish(pids)
        mend.set_locks(mend.posix_locks(self.images), pids, self.reporter)
        mend.acknowledge(self.images, pids)
        mend.tell_limits(self.images, pids, self.reporter)
        bind_processors(self.manifest.processes, pids, self.reporter)
        if self.plan.connections:
            self.reporter.step("connections")
        self.connections = handback.HandBack(self.config, self.plan.connections, pids, self.hooks.facts | {"pid": root}).run()
        anew = handback.endings(self.plan.connections)
        as_it_was = [r for r in self.manifest.connections if (r.pid, r.fd) not in anew]
        handback.set_options(as_it_was, pids, self.reporter)
        self._rejoin_groups(pids, private)
        self.terminals.replant(self.reader, pids)
        self.hooks.run("post-restore", pid=root, connections=self.connections)
        if self.following is not None:
            self.following.watched()
        if self.held is not None:
            self.held(self.connections)
        mend.wind_timers(self.images, pids, self.reporter)
        self.register(root)
        if self.following is not None:
            self.following.about_to_run()
        self.holder.adopt(root, private.init.pid if private is not None else 0, self.terminals.ptys, pids, self.images)
        self.reporter.step("resume")

    def _groups_anew(self, stack: ExitStack) -> str | None:
        """Where CRIU makes those control groups of the tree that are gone, if it is to make any."""
        if not self._at_home or self.plan.pids != "same" or self.holder.needed:
            return None
        yard = stack.enter_context(groupyard.remade(self.images, [p.cgroups for p in self.manifest.processes]))
        if yard is None:
            return None
        if yard.made:
            self.reporter.warning(f"control groups that were gone are made again as they were: {', '.join(yard.made)}")
        return yard.path

    @property
    def _at_home(self) -> bool:
        """Whether the tree comes back as itself, to the host from which it went and that has not been started anew since."""
        return self.manifest.host.boot_id == boot_id() and not self.copy

    def _rejoin_groups(self, pids: dict[int, int], private: PrivateNamespaces | None) -> None:
        """Back into the control groups that the processes were in, if this is still the same host; not left in our own unit."""
        self._rejoin(pids)
        if not self.holder.needed:
            cgroups.leave_unit([*([private.init.pid] if private is not None else []), *pids.values()])

    def _rejoin(self, pids: dict[int, int]) -> None:
        if not self._at_home:
            return
        wanted = {pids[p.ns_pid]: p.cgroups for p in self.manifest.processes if p.cgroups and p.ns_pid in pids}
        missing = cgroups.put_back(wanted)
        if missing:
            self.reporter.warning(f"control groups that are gone: {', '.join(missing)}; the tree is in criuctl's")

    def _outer(self, inner: int, private: PrivateNamespaces | None) -> int:
        """Our PID of the process that CRIU, in its PID namespace, calls `inner`."""
        if private is None:
            return inner
        found = pid_in(private.pid_namespace, inner)
        if found is None:
            raise RestoreFailed(f"the restored root, PID {inner} of its namespace, has ended at once")
        return found

    def _open_external(self, stack: ExitStack) -> dict[str, int]:
        """The files that came from another mount namespace, opened here by path."""
        opened: dict[str, int] = {}
        for external in self.manifest.external:
            flags = os.O_PATH if external.kind == "dir" else os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
            try:
                fd = os.open(external.path, flags | os.O_CLOEXEC)
            except OSError as error:
                raise RestoreFailed(f"{external.path} cannot be opened: {error.strerror}") from error
            stack.callback(os.close, fd)
            opened[external.key] = fd
        return opened
