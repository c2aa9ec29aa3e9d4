"""The life of a dump, told once from top to bottom.

Who may end the tree: only CRIU, only after `Dumping.commit` has returned, which for a dump that ends the tree
is after the manifest is in the store.  Every failure before that, of whatever part, is a veto: CRIU lets the
tree go on and the packs already written stay unreferenced.  ``kill -9`` of criuctl closes CRIU's socket, which
is a veto too, and so is a freeze that takes too long (`freeze_limit`).

Of a CRIU that is killed itself what it has done to connections can be undone (`criuctl.connections.repair_mode`), but
nobody can undo what it was just doing inside a process, so it ignores the signals that may be ignored.  A dump that leaves the
tree running thaws it as soon as everything is in memory of ours, and uploads afterwards: the tree is never in danger.

CRIU is started while the store is being opened.  It gets ready and waits, the tree untouched, for our word; at the freeze
it is told to go on, or started anew if something else has to be asked of it by then.  A tree that it refuses for what passes by
itself (a process that was just ending, a datagram that was being put together) runs on for a moment, and is tried again.

A dump with a `Delivery` goes to another host, and `commit` returns only after that host has the tree restored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from msgspec.structs import replace

from ..cgroups import remade
from ..checkpoint import leases
from ..config import Config
from ..connections.record import UNTAKEN
from ..connections.survey import Survey
from ..criu import binary, driver
from ..errors import CommandFailed, CriuctlError, DumpFailed, NoSuchProcess, PreflightRefused
from ..files import files, overlays, predicates, remaps
from ..gpu.use import opened_device
from ..host import hooking, inside_report
from ..host.failures.helpers import told_as
from ..host.fencing import Home
from ..host.holders import DumpedHolder
from ..host.identity import host_id
from ..host.journal import events
from ..host.preload import DUMP, preload
from ..host.registry import Registry, boot_id, check_outside, exclusive, exclusive_session
from ..host.stale_locks import forget_stale_locks
from ..host.standdown import stopping
from ..host.target import resolve_target
from ..namespaces.namespaces import plan_entry
from ..proc.procfs import reading
from ..proc.scratch import Scratch
from ..proc.threads import side_by_side
from ..quoting import quoted
from ..report import Reporter, summarised
from ..store import open_store
from ..terminals.dumped import DumpedTerminals
from . import arounddump, freeze_limit, surroundings
from .after_commit import AfterCommit
from .checks.scene import Scene
from .connections import hung_up_unasked
from .delivery import Delivery
from .describe import DumpResult
from .dumping import Dumping


def uses_devices(scene: Scene) -> bool:
    """Whether a process of the tree holds an NVIDIA device."""
    return any(opened_device(d) for held in scene.opened.values() for d in held)


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
    max_freeze: float | None = None,
) -> DumpResult:
    """Dump the tree that `target` names into the configured store; see the module's text for what may fail how."""
    began = time.monotonic()
    bound = freeze_limit.allowed(config, max_freeze, "migrate" if delivery else "snapshot" if leave_running else "dump")
    if bound:  # CRIU bounds the stopping of the processes by itself
        config = replace(config, criu_timeout=min(config.criu_timeout, int(bound) + 2))
    registry = Registry(config)
    check_outside(config)
    reporter.step("resolve", target=target)
    forget_stale_locks(config)
    remade.sweep(config)
    resolved = resolve_target(target, registry.lookup, registry.session_of)
    root = resolved.root
    busy = f"PID {root.pid} is being dumped by another criuctl"
    with AfterCommit(reporter) as after, ExitStack() as stack:
        stack.enter_context(told_as(DumpFailed, lambda: "the tree runs on" if root.alive() else ""))
        stack.enter_context(stopping(config, reporter))
        stack.enter_context(exclusive(config, f"tree/{boot_id()}/{root.pid}/{root.start_time}", busy))
        session = arounddump.session_for(registry, resolved, name)
        former = session if name is not None and session.state == "checkpointed" else None  # and another tree
        session = replace(session, moved_to="", home="")  # which is here
        stack.enter_context(exclusive_session(config, session.name))
        hooks = hooking.of_dump(config, reporter, session, root.pid, labels=labels or {}, leave_running=leave_running)
        stack.enter_context(hooks.telling("dump-failed"))

        # Everything that can be known to fail is found out here, before anything is touched.
        reporter.step("preflight")
        registry.check_writable()
        findings, scene = arounddump.look_at(resolved, config, reporter, leave_running=leave_running, with_files=with_files)
        errors = [f for f in findings if f.level == "error"]
        if scene is None and errors[0].code == NoSuchProcess.code:  # it has ended just now
            raise NoSuchProcess(errors[0].text, hint=errors[0].hint)
        if errors:
            text = "; ".join(map(str, summarised(errors)))
            raise PreflightRefused(text, hint=errors[0].hint, findings=[f.to_dict() for f in errors])
        assert scene is not None  # else there is an error
        for finding in summarised(f for f in findings if f.code not in UNTAKEN):  # which the freeze tells
            reporter.finding(finding)
        arounddump.end_former_holder(config, session.name, root)
        survey = Survey(config, reporter, wish=connections, drain=drain, ending=not leave_running)
        survey.ahead(root.pid, (scene.tree, scene.opened))
        if not leave_running:  # a snapshot is restored when its peers have gone anyway
            for finding in hung_up_unasked(survey.unasked):
                reporter.finding(finding)
        carried = files.resolve_carried(with_files, root.pid)
        required = predicates.wanted(config, session.name, require) if delivery is None else []
        scratch = stack.enter_context(Scratch())
        for finding in scratch.findings():
            reporter.finding(finding)
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
            dumper.ask(
                arounddump.dump_options(config, entry, root.pid, names, leave_running, leased=leased, shield=survey.shield)
            )
        if delivery is None:
            reporter.step("connect", store=config.store)
            store = open_store(config.store, config)
            stack.callback(store.close)
            preload(DUMP, enough=store.ready)
            repository = arounddump.open_for(store, config, registry, session, root)
            repository.warn_unpinned(reporter)
        else:
            repository = delivery.open(session)
            store = repository.store
        stack.callback(repository.close)
        home: Home | None = None
        if delivery is None:  # who has a session that moves is settled between the two hosts
            home = Home(config, repository, registry, session, root, reporter, lives_on=leave_running)
            side_by_side("criuctl-preflight", repository.preflight_write, home.look)
            session = stack.enter_context(home).session
        else:
            repository.preflight_write()
        if name is not None and not resolved.session and registry.get(session.name) is None and repository.list(session.name):
            reporter.warning(f"the store already holds checkpoints named {session.name!r}; this one is added to them")
        if former is not None:
            arounddump.tell_superseded(config, reporter, former)

        with reading(root.pid):
            net = os.open(f"/proc/{root.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, net)
        work = Dumping(
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
            max_freeze=bound,
        )
        stack.callback(work.farewell.drop)
        stack.callback(work.shielded.close)
        stack.callback(work.repair_mode.rest)
        stack.enter_context(arounddump.handlers_restored())
        hooks.run("pre-dump")
        work.required = predicates.note(config, required)
        if uses_devices(scene):
            from .devices import DumpedDevices

            work.devices = DumpedDevices(config, reporter, root.pid, max_freeze=bound)
            stack.callback(work.devices.close)
        try:
            files.store_ahead(work.writer, root.pid, work.binaries)
            if precopy:
                from .precopy import precopy as store_ahead

                work.rounds = store_ahead(work.writer, root.pid, reporter)
                if delivery is not None:
                    work.writer.hurry()
            if work.devices is not None:  # as late as possible: from here on the program waits for its GPU
                work.devices.take()
            manifest = work.run()
        except BaseException as error:
            work.forget_lock()
            ended = work.ended()
            if not ended:
                work.terminals.back()
                work.mend()
                work.holder.failed()
                if work.devices is not None:
                    work.devices.give_back()
                    arounddump.tell_lost(reporter, repository, session.name, work.devices, error)
            if isinstance(error, NoSuchProcess | CommandFailed) and work.tree:  # somebody killed CRIU, or a helper of ours
                raise DumpFailed(f"{error.message} while it was dumped{work.fate()}", hint=error.hint) from error
            if not isinstance(error, driver.CriuFailed):
                raise
            if not ended:
                raise arounddump.explain(config, error, work.session.name, work.root, work.tree, work.tries) from error
            # The last process of a private PID namespace takes CRIU, its guest, along: no answer, but all is done.
            manifest = work.committed()
        after.begins(hooks)
        name = repr(session.name)
        if work.devices is not None:
            with after.optional("the helper that holds the GPUs of the tree could not be ended"):
                work.devices.ended()
        if home is not None:
            with after.optional(f"what is known of the lease of {name} is not complete"):
                home.keep()
        if not leave_running:
            left = work.see_ended()
            with after.optional("not all that was made for the dump could be removed"):
                work.tidy()
            with after.optional("the reports of trees that are gone could not be removed"):
                inside_report.sweep(config)
            if delivery is not None:
                delivery.ended(left)  # and the lease there is the target's, which a source cannot read
            else:
                with after.optional(f"the lease of {name} could not be given back"):
                    leases.release(repository, session.name, host=host_id(config), seen=home.seen if home is not None else None)
        record = replace(work.session, store=work.where, checkpoint=manifest.id, boot_id=boot_id())
        lock = work.lock_table() if work.stays_locked else None
        with after.optional(f"where {name} is could not be written down"):
            arounddump.remember(config, registry, record, work.tree[0].identity, leave_running=leave_running, lock=lock)
        with after.optional(f"the holder of {name} could not be told of the checkpoint"):
            work.holder.done(manifest.id, manifest.number, ended=not leave_running)
    hooks.run("post-commit", number=manifest.number)
    reporter.step("done")
    rounds = [r.to_dict() for r in work.rounds]
    lost = work.devices.lost if work.devices is not None else []
    if lost:
        ref = quoted(f"{manifest.session.name}@{manifest.number}")
        reporter.warning("; ".join(lost), f"The checkpoint is complete: end the tree, then `criuctl restore {ref}`.")
    degraded = hooks.degraded or bool(lost)
    return DumpResult(manifest, store.url, list(reporter.warnings), degraded, hooks.records(), rounds)
