"""A dump, from top to bottom.

Only CRIU may end the tree, and only after the manifest is in the store (`criuctl.dump.commit`).
Every failure before that, of whatever part, is a veto: CRIU lets the tree go on, and packs that are
already written stay unreferenced.  ``kill -9`` of criuctl closes CRIU's socket, which is a veto
too, and so is a freeze that takes too long (`criuctl.dump.freeze_limit`).

If CRIU itself is killed, its changes to connections can be undone
(`criuctl.connections.repair_mode`), but not what it was doing inside a process, so it ignores the
signals that can be ignored.  A dump that leaves the tree running thaws it as soon as everything is
in criuctl's memory, and uploads afterwards.

With a `Delivery` the checkpoint goes to another host, and the tree is ended only after that host
has it restored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from msgspec.structs import replace

from ..cgroups import recreation
from ..checkpoint.manifest import PredicateKind
from ..config import Config
from ..connections.survey import Survey
from ..criu import binary, driver
from ..errors import CriuctlError, DumpFailed
from ..files import predicates, recording
from ..hooks import Hooks
from ..host import hook_facts, rights, templates
from ..host.failures.command_failures import fate_added, reraised_as
from ..host.group_member import DumpedMember
from ..host.journal import events
from ..host.lost_homes import stopping
from ..host.registry import Registry, check_outside
from ..host.stale_locks import forget_stale_locks
from ..host.target import Target, resolve_target
from ..namespaces.plan import NamespacePlan, plan_entry
from ..proc.scratch import Scratch
from ..proc.tree import ProcessIdentity, ends_reported
from ..report import Reporter
from . import ending, freeze_limit, inside_requests, preflight, subject
from .after_commit import AfterCommit
from .checks.scene import Scene
from .commit import Commit
from .connection_lock import ConnectionLock
from .delivery import Delivery
from .destination import Destination, open_destination
from .freeze import Freeze
from .job import DumpJob, DumpRequest
from .manifest_of_tree import DumpResult, result_of
from .parts import TreeParts, gather, uses_devices
from .short_freeze import ShortFreeze
from .signals import handlers_restored


def _operation(arguments: Mapping[str, Any]) -> str:
    """Return the name of this dump as an event; one in a migration is a part of that."""
    if arguments.get("delivery") is not None:
        return ""
    return "snapshot" if arguments["request"].leave_running else "dump"


def _about(positional: tuple[Any, ...], arguments: Mapping[str, Any]) -> events.Facts:
    return events.target(positional, {"name": arguments["request"].name})


@events.recorded(_operation, about=_about)
def dump(
    config: Config,
    target: str,
    *,
    request: DumpRequest,
    reporter: Reporter,
    delivery: Delivery | None = None,
    group: DumpedMember | None = None,
) -> DumpResult:
    """Dump the tree that `target` names (a PID, a session, a configured tree) into the store.

    As a member of a `group` it is frozen, stored and committed together with the others.

    Raises a `CriuctlError` that says whether the tree runs on; after the commit, failures are
    warnings.
    """
    began = time.monotonic()
    kind = "migrate" if delivery else "snapshot" if request.leave_running else "dump"
    bound = freeze_limit.allowed(config, request.max_freeze, kind)
    if bound:  # CRIU bounds the stopping of the processes by itself
        config = replace(config, criu_timeout=min(config.criu_timeout, int(bound) + 2))
    registry = Registry(config)
    check_outside(config)
    reporter.step("resolve", target=target)
    forget_stale_locks(config)  # first of all: what a killed criuctl has left may be of this tree
    recreation.sweep(config)
    found = resolve_target(target, registry.lookup, registry.session_of)
    with AfterCommit(reporter) as after, ExitStack() as stack:
        stack.enter_context(_fate_in_failures(found.root))
        stack.enter_context(stopping(config, reporter))
        # No other criuctl dumps this tree, or changes its session, meanwhile.
        dumped = subject.claim(config, registry, found, request.name, stack)
        rights.check(config, kind, dumped.session.name)
        job = DumpJob(
            config, reporter, request, dumped.root, began, bound, delivery is not None, group
        )
        hooks = _hooks(job, dumped)
        stack.enter_context(hooks.on_failure("dump-failed"))

        # Preflight: what can be known to fail is found before anything is touched.
        reporter.step("preflight")
        registry.check_writable()
        scene = preflight.examine(job, found)
        stack.enter_context(ends_reported(scene.tree))
        subject.end_former_holder(config, dumped.session.name, dumped.root)
        survey = _survey(job, scene)
        required = _required(job, dumped)

        # A fork's pages may still be in its template alone: CRIU would not know of them.
        templates.complete(config, dumped.root.pid)

        # CRIU gets ready while the store is being opened; the tree is untouched until CRIU is
        # allowed to go on.
        entry = plan_entry(dumped.root.pid)
        folder, short, dumper = _prepare_criu(job, scene, entry, stack)
        parts = gather(job, dumped, scene, survey, entry, stack)
        with suppress(CriuctlError):  # what is wrong with it is reported at the freeze
            dumper.ask(parts.criu_options(job))
        destination = open_destination(job, registry, dumped, delivery, stack, scene.memory)
        _warn_name(job, registry, found, dumped, destination)

        lock = ConnectionLock(parts, folder, reporter)
        freeze = Freeze(
            job, parts, hooks, destination.writer, dumper, folder, lock, short, delivery
        )
        commit = Commit(job, parts, hooks, registry, destination, freeze)
        stack.enter_context(handlers_restored())
        hooks.run("pre-dump")  # while the tree runs; any of them may veto
        inside_requests.call_back(job, parts.holder)  # and any of its programs, last of all
        commit.required = predicates.note(config, required)
        if not job.moves:
            commit.required = inside_requests.note_conditions(job, parts.holder, commit.required)
        try:
            _store_ahead(job, parts, scene, destination, commit)
            if uses_devices(scene.opened):
                _take_devices(job, parts, stack)
            freeze.run(commit.images_complete)
            if request.leave_running:
                commit.store_running()
            manifest = commit.stored_manifest()
        except BaseException as error:
            manifest = ending.settle_failure(error, job, parts, freeze, commit)
        # The checkpoint exists: nothing that fails from here on is a failed dump.
        after.begins(hooks)
        ending.finish(job, registry, parts, freeze, commit, after, manifest)
        short.leave(manifest, destination.repository)
    hooks.run("post-commit", number=manifest.number)
    reporter.step("done")
    return result_of(job, manifest, destination.url, hooks, commit.rounds, parts.devices)


@contextmanager
def _fate_in_failures(root: ProcessIdentity) -> Iterator[None]:
    """Say in failures that know nothing of the tree what has become of it."""
    runs_on = f"PID {root.pid} was not ended and runs on"
    with (
        reraised_as(DumpFailed, lambda: "the tree runs on" if root.alive() else ""),
        fate_added(lambda: runs_on if root.alive() else ""),
    ):
        yield


def _hooks(job: DumpJob, dumped: subject.Subject) -> Hooks:
    """Return the hooks of this dump, with what they are given to know."""
    return hook_facts.of_dump(
        job.config,
        job.reporter,
        dumped.session,
        dumped.root.pid,
        labels=job.request.labels,
        leave_running=job.request.leave_running,
    )


def _required(job: DumpJob, dumped: subject.Subject) -> Sequence[tuple[PredicateKind, str]]:
    """Return what the checkpoint is to require, as it is known so far."""
    if job.moves:
        return ()
    return predicates.wanted(job.config, dumped.session.name, job.request.require)


def _survey(job: DumpJob, scene: Scene) -> Survey:
    """Return what is known of the tree's connections while it runs, and warn of those that will be
    hung up.
    """
    request = job.request
    survey = Survey(
        job.config,
        job.reporter,
        requested=request.connections,
        drain=request.drain,
        ending=not request.leave_running,
    )
    survey.links = job.group
    survey.ahead(job.root.pid, (scene.tree, scene.opened))
    preflight.warn_hung_up(job, survey)
    return survey


def _prepare_criu(
    job: DumpJob, scene: Scene, entry: NamespacePlan, stack: ExitStack
) -> tuple[int, ShortFreeze, driver.Dumper]:
    """Return the folder of CRIU's images, what may read memory ahead of it, and a CRIU that is not
    started yet.
    """
    short = ShortFreeze.of(job, scene)
    stack.callback(short.close)
    scratch = stack.enter_context(Scratch())
    for finding in scratch.findings():
        job.reporter.finding(finding)
    folder = scratch.folder("images")
    stack.callback(os.close, folder)
    dumper = driver.Dumper(binary.find(job.config), folder, entry.prefix, short.scans)
    stack.callback(dumper.close)
    return folder, short, dumper


def _warn_name(
    job: DumpJob,
    registry: Registry,
    found: Target,
    dumped: subject.Subject,
    destination: Destination,
) -> None:
    """Warn where the name that the user has given means something else already."""
    name, stored = job.request.name, destination.repository
    if name is not None and not found.session and registry.get(name) is None and stored.list(name):
        job.reporter.warning(
            f"the store already holds checkpoints named {name!r}; this one is added to them"
        )
    if dumped.former is not None:
        subject.warn_superseded(job.config, job.reporter, dumped.former)


def _store_ahead(
    job: DumpJob, parts: TreeParts, scene: Scene, destination: Destination, commit: Commit
) -> None:
    """Store what does not change, or rarely, while the tree runs: programs, the workspace, and
    memory in rounds.
    """
    recording.store_ahead(destination.writer, job.root.pid, parts.binaries)
    if parts.workspace is not None:
        parts.workspace.ahead(destination.writer, scene.opened)
    short = commit.freeze.short
    tracked = short.begin(destination.writer, destination.repository)
    if job.request.precopy:
        from .precopy import precopy  # of few dumps

        rounds = precopy(destination.writer, job.root.pid, job.reporter, without=tracked)
        rounds += short.read()
        commit.rounds = [replace(made, number=n) for n, made in enumerate(rounds, 1)]
        if destination.delivery is not None:
            destination.writer.hurry()
    else:
        short.read()


def _take_devices(job: DumpJob, parts: TreeParts, stack: ExitStack) -> None:
    """Move the memory of GPUs into the processes; as late as possible: from here on they wait."""
    from .devices import DumpedDevices  # of few trees

    parts.devices = DumpedDevices(job.config, job.reporter, job.root.pid, max_freeze=job.max_freeze)
    stack.callback(parts.devices.close)
    parts.devices.take()
