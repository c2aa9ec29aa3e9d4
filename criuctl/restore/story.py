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
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from ..cgroups import remade
from ..checkpoint import leases
from ..checkpoint.repository import Repository
from ..config import Config
from ..connections import rules
from ..criu import binary, driver
from ..criu.images import ImageSet
from ..criu.owners import user_ids
from ..errors import PidTaken, RestoreFailed
from ..files import deletednames, fifos, kernelfiles, predicates, socket_names, untrusted
from ..files.absent import absent
from ..files.besides import left_behind, separated, spared
from ..files.judgement import Policy
from ..hooks.contract import RECONNECT
from ..hooks.find import executables
from ..host import hooking, inside_report, latest, moves
from ..host.failures.helpers import told_as
from ..host.fencing import with_lease
from ..host.holders import RestoredHolder
from ..host.identity import host_id
from ..host.journal import events
from ..host.maintenance import check_open
from ..host.preload import RESTORE, preload
from ..host.registry import Registry, boot_id, check_name, check_outside, exclusive_session
from ..host.stale_locks import forget_stale_locks
from ..namespaces import interfaces
from ..namespaces.netlock import table_of
from ..namespaces.netplace import is_new
from ..proc.scratch import Scratch
from ..proc.tree import ProcessIdentity
from ..repairs import file_locks
from ..report import Reporter, summarised
from ..store import open_store
from ..terminals.restored import RestoredTerminals
from . import arrival, history, materialise, memory_needs
from .arrival import RestoreResult
from .connectionplan import owners_in
from .feeding import Feeder
from .lazymemory import worthwhile
from .plan import ADD_ADDRESS, RestorePlan, Wishes, make_plan, missing_addresses, observe
from .restoring import Restoring

P = ParamSpec("P")
R = TypeVar("R")


def _operation(wishes: Mapping[str, Any]) -> str:
    """What this restore is called as an event; a dry run is none, and what is held is received from another host."""
    return "" if wishes.get("dry_run") else "receive" if wishes.get("held") is not None else "restore"


def _once_more(operation: Callable[P, R]) -> Callable[P, R]:
    """Between the look at the tree's PIDs and CRIU's forks somebody else may get one: then all of it is decided anew, once."""

    @wraps(operation)
    def tried(*args: P.args, **wishes: P.kwargs) -> R:
        reporter = cast("Reporter", wishes["reporter"])
        warnings, codes = len(reporter.warnings), len(reporter.codes)
        try:
            return operation(*args, **wishes)
        except PidTaken as error:
            if not error.again:
                raise
        del reporter.warnings[warnings:], reporter.codes[codes:]  # they are told again, as far as they are still true
        wishes["again"] = False
        return operation(*args, **wishes)

    return tried


@events.recorded(_operation, about=events.reference)
@_once_more
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
    older: bool = False,
    alone: bool = False,
    take_over: bool = False,
    returning: bool = False,
    instead_of: leases.Head | None = None,
    ttl: int = 0,
    repository: Repository | None = None,
    held: Callable[[list[dict[str, Any]]], None] | None = None,
    feeder: Feeder | None = None,
    again: bool = True,
) -> RestoreResult | RestorePlan:
    """Bring the checkpoint that `ref` names back to life here; with `dry_run` only say what would be done.

    `force`: also when it is stale (`predicates`).  `older`: also when this host knows of a newer one (`history`).
    `alone`: for a trial, in a network of its own, stale or not.
    `held` is called, with what became of the connections, when everything is in place and nothing has run: when it returns,
    the tree runs; when it raises, nothing is left.  The checkpoint is in `repository` if that is given, which stays open.
    If memory follows, the `feeder` brings it; with `lazy` None it does so where there is one and it is worth it.
    `instead_of` is a lease that has run out, `ttl` (milliseconds) how long the new one lasts without being renewed: see `leases`.
    `again`: all of it is tried once more where a PID was taken at the last moment.
    """
    began = time.monotonic()
    registry = Registry(config)
    check_outside(config, begins=not (dry_run or alone))
    if new_name is not None:
        check_name(new_name)
    with told_as(RestoreFailed, lambda: "nothing is left of it"), ExitStack() as stack:
        reporter.step("resolve", ref=ref)
        forget_stale_locks(config)
        with suppress(OSError):  # a read-only run folder: what is left there does no harm
            inside_report.sweep(config)
        remade.sweep(config)
        criu = binary.find(config)
        if repository is None:
            store = open_store(config.store, config)
            stack.callback(store.close)
            preload(RESTORE, enough=store.ready)
            repository = Repository.open(store, config)
            stack.callback(repository.close)
            repository.warn_unpinned(reporter)
        with arrival.offering_another(repository, ref), history.offering_elsewhere(config, repository, ref):
            manifest = repository.manifest(ref)
        stack.enter_context(arrival.offering_another(repository, ref, manifest))
        name = new_name or manifest.session.name
        stack.enter_context(exclusive_session(config, name))
        arrival.check_not_running(config, registry, name, copy=new_name is not None)
        found = history.look(config, repository, ref, manifest, older=older)
        if not (dry_run or alone or returning or held is not None):
            check_open(config)
        if new_name is None and held is None:
            moves.check_at_home(config, name, take_over=take_over)
            arrival.check_not_moved(registry, repository, manifest, take_over=take_over)
        hooks = hooking.of_restore(config, reporter, manifest, name)
        if not dry_run:
            stack.enter_context(hooks.telling("restore-failed"))

        reporter.step("preflight")
        reader = repository.reader(reporter)
        scratch = stack.enter_context(Scratch())
        for finding in scratch.findings():
            reporter.finding(finding)
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
            bool(executables(config, "pre-restore")),
        )
        remains = arrival.remains_of(manifest)
        facts = observe(manifest, images.reserved_ids(), remains, wishes, user_ids(images))
        if not wishes.copy:
            facts = replace(facts, findings=(*facts.findings, *left_behind(facts.files, images)))
        else:
            judged = facts.files
            if not alone and (taken := file_locks.held(file_locks.wanted(images))):
                holders = {lock.path: file_locks.holder(lock.path) for lock in taken}
                judged = separated(judged, images, holders)
            settled, shared = spared(judged, images, arrival.living(registry, manifest))
            own_pipes = fifos.own_for_copy(images, manifest)
            facts = replace(facts, files=(*settled, *own_pipes), findings=(*facts.findings, *shared))
        deleted = deletednames.judge(manifest, images, facts.files, wishes.files, reader)
        both = deletednames.both_write(deleted) if wishes.copy else []
        facts = replace(facts, deleted=deleted, findings=(*facts.findings, *both))
        if alone:
            facts = replace(facts, findings=(*facts.findings, *fifos.untried(images, manifest)))
        else:
            stale = predicates.examine(config, manifest, force=force)
            own = {j.record.path for j in facts.files if j.verdict == "beside"}
            locked = file_locks.locked_elsewhere(images, own, copy=wishes.copy)
            gone = list(absent(images, manifest, facts.files, facts.missing_folders))
            gone += kernelfiles.missing(images, manifest, copy=wishes.copy)
            names = socket_names.taken(images, manifest, facts.netns, copy=wishes.copy)
            facts = replace(facts, findings=(*facts.findings, *stale, *locked, *gone), names=names)
        devices: RestoredDevices | None = None
        if manifest.gpu is not None:
            from .devices import RestoredDevices  # of few trees

            devices = stack.enter_context(RestoredDevices(manifest.gpu, reporter))
            facts = replace(facts, findings=(*facts.findings, *devices.judge()))
        facts = replace(facts, bound=interfaces.bound(images, facts.netns), owners=owners_in(images))
        facts = replace(facts, findings=(*facts.findings, *memory_needs.lacking(images)))
        authentic = repository.encrypted or held is not None
        objections = untrusted.objections(
            config, manifest, images, facts.files, authentic=authentic, hang_up=connections == "hangup"
        )
        facts = replace(facts, findings=(*facts.findings, *objections))
        plan = make_plan(manifest, facts, wishes)
        if dry_run:
            return plan
        if plan.errors:
            raise arrival.refusal(plan.errors)
        for finding in summarised(plan.findings):
            reporter.finding(finding)

        session, lease = arrival.next_incarnation(registry, repository, manifest, name, copy=new_name is not None)
        hooks.run("pre-restore", incarnation=session.incarnation, connections=plan.to_dict()["connections"])
        if facts.missing_addresses and not is_new(plan.net) and (still := missing_addresses(manifest, facts.netns)):
            text = f"{', '.join(sorted(still))}: no address of this host, nor has a hook made it one; the tree listens there"
            raise RestoreFailed(text, hint=ADD_ADDRESS)

        reporter.step("claim", session=name)
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
            seen=lease,
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
            filling.begin()
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
            inside_report.publish(config, root, names, work.connections, reporter)

        copy = new_name is not None
        holder = RestoredHolder(config, manifest, session)
        work = Restoring(
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
            authentic=authentic,
            devices=devices,
        )
        with ExitStack() as running:
            try:
                root = work.run(criu, running)
            except BaseException as error:
                with suppress(OSError):
                    inside_report.sweep(config)
                if before is None:
                    registry.forget(name)
                else:
                    registry.put(before)
                if isinstance(error, driver.CriuFailed):
                    told = arrival.explain(config, error, manifest)
                    if isinstance(told, PidTaken) and again and pids == "auto" and feeder is None:
                        reporter.step("again", why=told.message)
                        hooks.done = told.again = True
                    raise told from error
                raise
            hooks.done = True
            claim.keep()
            if not copy and held is None:
                latest.note(config, found.checkpoint, reporter)
            if here.lock_table and not work.locked:  # else the next command takes it down
                with suppress(OSError):  # a full disk: the next command looks for the lock once more
                    registry.put(replace(here, lock_table=""))
        if not os.path.exists(f"/proc/{root}"):
            reporter.warning(f"PID {root}: the restored root has ended already")
        claim.clear()
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
        files=[
            *({"path": path, "newer_copy": aside} for path, aside in work.aside),
            *({"path": path, "own_copy": own} for path, own in (work.own_files | work.own_names).items()),
        ],
        warnings=list(reporter.warnings),
        gpu=devices.facts() if devices is not None else None,
        degraded=hooks.degraded or any(c["outcome"] == "failed" for c in work.connections),
        hooks=hooks.records(),
        found=found,
    )
