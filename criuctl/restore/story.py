"""A restore, from top to bottom.

Nothing of the tree runs before everything is in place: chunks verified, files put back, connections
handed back.  Until then every failure unwinds in reverse: CRIU kills what it had restored (it is
answered no in post-restore, or its socket closes), private namespaces end, files put back are
undone, firewall tables are removed, the plain images vanish with their tmpfs, the lease is
released.  Nothing is left of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from ..cgroups import recreation
from ..checkpoint.repository import Repository
from ..config import Config
from ..criu import binary, driver
from ..errors import (
    CriuctlError,
    NoSuchProcess,
    NumberTaken,
    PidTaken,
    RestoreFailed,
    TerminalTaken,
)
from ..files import memory_files
from ..hooks import Hooks
from ..host import hook_facts, inside_report, latest_checkpoints, rights
from ..host.failures.command_failures import reraised_as
from ..host.holders import RestoredHolder
from ..host.journal import events
from ..host.registry import Registry, check_name, check_outside
from ..host.rights import roles_of
from ..host.stale_locks import forget_stale_locks
from ..namespaces.network_choice import is_new
from ..report import RECORDED, Reporter, summarised
from ..terminals.restored import RestoredTerminals
from . import memory, outcome, source
from .home import NewHome, claim_home, note_coming
from .host_facts import HostFacts
from .observation import observe_all, open_devices, plan_options
from .observe import missing_addresses
from .outcome import RestoreResult
from .partners import ALONE, Partners
from .plan import ADD_ADDRESS, RestorePlan, make_plan
from .relocation import Moves
from .request import RestoreRequest
from .restoring import Restoring
from .source import Source, Unpacked
from .work import RestoreWork

if TYPE_CHECKING:
    from .devices import RestoredDevices

P = ParamSpec("P")
R = TypeVar("R")


def _operation(arguments: Mapping[str, Any]) -> str:
    """Return the name of this restore as an event; a dry run is none, and what is held has come
    from another host.
    """
    if arguments["request"].dry_run:
        return ""
    return "restore" if arguments.get("partners", ALONE).held is None else "receive"


def _about(positional: tuple[Any, ...], arguments: Mapping[str, Any]) -> events.Facts:
    request: RestoreRequest = arguments["request"]
    asked = {
        "new_name": request.new_name,
        "instead_of": request.instead_of,
        "take_over": request.take_over,
    }
    return events.reference(positional, asked | {"held": arguments.get("held")})


def _right(request: RestoreRequest) -> str:
    """Return the restore's operation in the table of rights."""
    if request.dry_run:
        return "restore --dry-run"
    return "trial" if request.alone else "restore --as" if request.copy else "restore"


def _tried_again(operation: Callable[P, R]) -> Callable[P, R]:
    """Decide everything again, twice at most, where a PID or a terminal's number was taken between
    the look and CRIU's work; the last time with PIDs of its own, which no other process can take.
    """

    @wraps(operation)
    def tried(*args: P.args, **arguments: P.kwargs) -> R:
        reporter = cast("Reporter", arguments["reporter"])
        warnings, codes = len(reporter.warnings), len(reporter.codes)
        while True:
            request = cast("RestoreRequest", arguments["request"])
            try:
                return operation(*args, **arguments)
            except NumberTaken as error:
                if not error.again:
                    raise
                private = isinstance(error, PidTaken) and request.more_tries == 1
            # reported again, as far as they are still true
            del reporter.warnings[warnings:], reporter.codes[codes:]
            arguments["request"] = replace(
                request,
                more_tries=request.more_tries - 1,
                pids="private" if private else request.pids,
            )

    return tried


@events.recorded(_operation, about=_about)
@_tried_again
def restore(
    config: Config,
    ref: str,
    *,
    request: RestoreRequest,
    reporter: Reporter,
    repository: Repository | None = None,
    partners: Partners = ALONE,
) -> RestoreResult | RestorePlan:
    """Bring the checkpoint that `ref` names back to life here; with `request.dry_run` return what
    would be done.

    The checkpoint is in `repository` if that is given, which stays open.
    """
    began = time.monotonic()
    registry = Registry(config)
    check_outside(config, begins=not (request.dry_run or request.alone))
    if request.new_name is not None:
        check_name(request.new_name)
    with reraised_as(RestoreFailed, lambda: "nothing is left of it"), ExitStack() as stack:
        reporter.step("resolve", ref=ref)
        _sweep(config)
        criu = binary.find(config)
        # The checkpoint, and no other criuctl at work on its session.
        received = partners.held is not None
        found = source.find(
            config, ref, request, reporter, registry, repository, stack, received=received
        )
        moves = Moves.of(found.manifest, request.relocation)
        for one in moves.relocations:
            found = replace(found, manifest=one.manifest(found.manifest))
        manifest = found.manifest
        if not received:  # the host that sends it has decided
            rights.check(config, _right(request), manifest.session.name, lambda: roles_of(manifest))
        hooks = hook_facts.of_restore(config, reporter, manifest, found.name)
        if not request.dry_run:
            stack.enter_context(hooks.on_failure("restore-failed"))

        # Observe first, decide once: the plan is a pure function of the manifest and the facts.
        reporter.step("preflight")
        decided = _decide(config, request, found, moves, reporter, stack, received=received)
        plan = decided.plan
        if request.dry_run:
            return plan
        if plan.errors:
            raise outcome.refusal(plan.errors)
        for finding in summarised(plan.findings, named=RECORDED):
            reporter.finding(finding)

        # This host becomes the session's home; a failure from here on gives the lease back.
        session, seen = outcome.next_incarnation(
            registry,
            found.repository,
            manifest,
            found.name,
            copy=request.copy,
            forked_from=request.forked_from,
        )
        hooks.run(
            "pre-restore",
            incarnation=session.incarnation,
            connections=plan.to_dict()["connections"],
        )
        _check_addresses(found, plan, decided.facts)
        claim = claim_home(config, request, found, session, seen, reporter, stack)

        # Memory: all of it now, or what is lazy when the tree touches it.
        brought = memory.bring(request, found, decided.unpacked, partners, reporter, stack)

        # CRIU's part: from here to the end of `running` there is a tree that runs, or nothing.
        copy = request.copy
        home = note_coming(config, found, decided.unpacked, registry, session, claim, copy=copy)
        work = _work(home, request, found, decided, brought, hooks, reporter, partners)
        criu_part = Restoring.of(work)
        with ExitStack() as running:
            root = _run_criu(criu_part, criu, request, running)
            hooks.done = True
            home.keep(unlocked=not criu_part.around.unlock_failed)
            if not request.copy and not received:
                latest_checkpoints.note(config, found.found.checkpoint, reporter)
        if not os.path.exists(f"/proc/{root}"):
            reporter.warning(f"PID {root}: the restored root has ended already")
        claim.clear()
    if request.copy and not request.forked_from:
        outcome.warn_of_generators(reporter)
    hooks.run("post-resume")
    reporter.step("done")
    return _result(criu_part, found, home, root, began=began)


class _Decided(Struct, frozen=True):
    """What was observed for a restore, and the plan that follows from it."""

    unpacked: Unpacked
    terminals: RestoredTerminals
    devices: RestoredDevices | None  # GPUs, of a tree that uses some
    facts: HostFacts
    plan: RestorePlan
    moves: Moves
    authentic: bool  # no other program than criuctl can have written the checkpoint


def _decide(
    config: Config,
    request: RestoreRequest,
    found: Source,
    moves: Moves,
    reporter: Reporter,
    stack: ExitStack,
    *,
    received: bool,
) -> _Decided:
    """Observe this host and the checkpoint, and make the plan."""
    unpacked = source.unpack(found, reporter, stack)
    if request.tenant is not None:
        outcome.refuse_foreign(unpacked.images, request.tenant)
    for one in moves.relocations:
        one.images(unpacked.images)
    terminals = RestoredTerminals(found.manifest, unpacked.images)
    options = replace(plan_options(config, request), shown=bool(moves.shown))
    devices = open_devices(found, reporter, stack)
    authentic = found.repository.encrypted or received
    facts = observe_all(config, request, found, unpacked, options, devices, authentic=authentic)
    plan = make_plan(found.manifest, facts, options)
    return _Decided(unpacked, terminals, devices, facts, plan, moves, authentic)


def _work(
    home: NewHome,
    request: RestoreRequest,
    found: Source,
    decided: _Decided,
    brought: memory.Memory,
    hooks: Hooks,
    reporter: Reporter,
    partners: Partners,
) -> RestoreWork:
    """Return what CRIU's part of the restore has to know."""
    unpacked = decided.unpacked
    return RestoreWork(
        config=home.config,
        reporter=reporter,
        manifest=found.manifest,
        plan=decided.plan,
        images=unpacked.images,
        folder=unpacked.folder,
        reader=unpacked.reader,
        terminals=decided.terminals,
        holder=RestoredHolder(
            home.config,
            found.manifest,
            home.session,
            list if request.copy else partial(_stored_steps, found.repository, home.session.id),
            supervised=bool(request.ttl),
            copy=request.copy,
            group=request.group,
            ends=request.ends,
            warm=partners.warm,
        ),
        hooks=hooks,
        home=home,
        partners=partners,
        copy=request.copy,
        rewind=request.rewind,
        shown=decided.moves.shown,
        authentic=decided.authentic,
        lazy=brought.lazy,
        filling=brought.filling,
        devices=decided.devices,
        groups=request.groups,
        streams=request.streams,
        ends_with_root=request.tenant is not None,
    )


def _stored_steps(repository: Repository, session: str) -> list[dict[str, Any]]:
    """Return the steps of a session that the store has."""
    from ..checkpoint import step_replica  # only sessions have steps

    return step_replica.read(repository, session)


def _sweep(config: Config) -> None:
    """Undo what killed criuctls have left behind on this host."""
    forget_stale_locks(config)
    with suppress(OSError):  # a read-only run folder: what is left there does no harm
        inside_report.sweep(config)
    with suppress(OSError):
        memory_files.sweep(config)
    recreation.sweep(config)


def _check_addresses(found: Source, plan: RestorePlan, facts: HostFacts) -> None:
    """Raise `RestoreFailed` if the pre-restore hooks have not made missing addresses this
    host's.
    """
    if not facts.missing_addresses or is_new(plan.net):
        return
    if still := missing_addresses(found.manifest, facts.netns):
        text = (
            f"{', '.join(sorted(still))}: no address of this host, nor has a hook made it one; "
            "the tree listens there"
        )
        raise RestoreFailed(text, hint=ADD_ADDRESS)


def _run_criu(
    criu_part: Restoring, criu: binary.CriuBinary, request: RestoreRequest, running: ExitStack
) -> int:
    """Return the PID of the root that runs; on failure the host has its previous record again."""
    try:
        return criu_part.run(criu, running)
    except BaseException as error:
        criu_part.work.home.give_up()
        if isinstance(error, driver.CriuFailed):
            raise _explained(criu_part.work, request, error) from error
        if isinstance(error, NoSuchProcess):
            raise RestoreFailed(
                f"a process was ended while the tree was put together: {error.message}; nothing is "
                "left of it",
                hint="Restore it again; end it, if it must end, when it runs.",
            ) from error
        raise


def _explained(
    work: RestoreWork, request: RestoreRequest, error: driver.CriuFailed
) -> CriuctlError:
    """Return CRIU's failure as an error of criuctl; a taken number is tried again."""
    hooks = work.hooks
    explained = outcome.explain(work.config, error, work.manifest)
    free_next_time = isinstance(explained, TerminalTaken) or (
        isinstance(explained, PidTaken) and request.pids == "auto"
    )
    may_try_again = free_next_time and request.more_tries and work.partners.feeder is None
    if isinstance(explained, NumberTaken) and may_try_again:
        hooks.reporter.step("again", why=explained.message)
        hooks.done = explained.again = True
    return explained


def _result(
    criu_part: Restoring,
    found: Source,
    home: NewHome,
    root: int,
    *,
    began: float,
) -> RestoreResult:
    work, outcomes = criu_part.work, criu_part.placed.connections
    applied, names = criu_part.around.applied_files, criu_part.around.names
    own = applied.own | (names.own if names is not None else {})
    new = {j.record.path for j in work.plan.files if j.verdict == "set-aside"}
    return RestoreResult(
        checkpoint=found.manifest.id,
        session=found.name,
        incarnation=home.session.incarnation,
        pid=root,
        inner_pid=criu_part.inner_root,
        elapsed_ms=round((criu_part.running_at - began) * 1000, 1),
        lazy=work.pages_follow,
        pids=work.plan.pids,
        connections=outcomes,
        files=[
            *(
                {"path": path, "newer_copy": aside} | ({"new": True} if path in new else {})
                for path, aside in applied.aside
            ),
            *({"path": path, "own_copy": copy} for path, copy in own.items()),
        ],
        warnings=list(work.reporter.warnings),
        gpu=work.devices.facts() if work.devices is not None else None,
        degraded=work.hooks.degraded or any(c["outcome"] == "failed" for c in outcomes),
        hooks=work.hooks.records(),
        found=found.found,
        paused=work.holder.stands_still,
    )
