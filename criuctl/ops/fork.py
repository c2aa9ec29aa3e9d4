"""Forks: several running copies of one session, or of a checkpoint, at once.

A live session is dumped and left running, so the original stands still only as for a snapshot. The
checkpoint stays in the store: the copies go on from it, so what a later snapshot of a copy shares
with it is not stored again. Its memory is read once, into a template
(`criuctl.restore.template`), from which the copies are restored, some at a time, each in a process
of its own (`batch`). Each copy is a session of its own, as one that ``restore --as`` makes.

A copy that fails is its own outcome. If all fail, or the whole is interrupted, nothing is left: the
copies that ran already are ended, and a checkpoint that was made for them is removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.connection_record import endpoint
from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..config import Config
from ..dump.job import DumpRequest
from ..dump.story import dump
from ..errors import CriuctlError, NoSuchCheckpoint, RestoreFailed, SessionGone, UsageError
from ..host import rights
from ..host.group_member import RestoredMember
from ..host.journal import events
from ..host.registry import Registry, check_name, check_outside
from ..host.rights import roles_of
from ..report import Reporter
from ..restore import template
from ..restore.outcome import RestoreResult, warn_of_generators
from ..restore.partners import Partners
from ..restore.relocation import Relocation
from ..restore.request import RestoreRequest
from ..restore.story import restore
from ..session.launch.daemon import WarmHolders
from ..session.names import valid_name
from ..store import open_store
from . import acting, fork_workspaces, inspect, kill, sessions
from .forget import forget
from .scheduling import batch

LABEL = "fork-of"  # of the checkpoint
MOST = 1000  # copies at once
_AT_ONCE_PER_CPU = 2  # restores: each waits for others half of the time


class ForkRequest(Struct, frozen=True, kw_only=True):
    """What a fork is asked for."""

    count: int = 1
    prefix: str | None = None  # of the names; None: the name of the original
    new_name: str | None = None  # of the one copy
    ttl: float | None = None  # seconds until each copy is ended
    share_files: bool = False  # they write to the files of the original
    workspace: bool = False  # each gets a copy of the workspace
    whole: bool = False  # all copies run, or none is left


class Fork(Struct, frozen=True):
    """One copy."""

    session: str
    state: Literal["running", "failed"]
    pid: int | None = None
    ports: dict[str, str] = field(default_factory=dict)
    workspace: str | None = None
    warnings: list[str] = field(default_factory=list)
    restored: dict[str, Any] = field(default_factory=dict)  # the JSON of its restore
    degraded: bool = False  # it runs, but something optional failed
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "session": self.session,
            "pid": self.pid,
            "state": self.state,
            "ports": self.ports,
            "workspace": self.workspace,
            "warnings": self.warnings,
            "error": self.error.to_dict() if self.error is not None else None,
        }


class ForkResult(Struct, frozen=True):
    """All copies of one fork."""

    origin: str  # the session, or what named the checkpoint
    checkpoint: str
    frozen_ms: float | None  # None: the checkpoint existed already
    elapsed_ms: float
    forks: list[Fork]
    warnings: list[str]

    @property
    def degraded(self) -> bool:
        """Whether only some of the copies run, or something optional failed."""
        return any(fork.state == "failed" or fork.degraded for fork in self.forks)

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "from": self.origin,
            "checkpoint": self.checkpoint,
            "frozen_ms": self.frozen_ms,
            "elapsed_ms": self.elapsed_ms,
            "forks": [fork.to_dict() for fork in self.forks],
            "warnings": self.warnings,
        }


@events.recorded("fork", lambda result: [_facts(result)], about=events.reference)
def fork(config: Config, ref: str, *, request: ForkRequest, reporter: Reporter) -> ForkResult:
    """Make `request.count` running copies of the live session `ref`, or of a checkpoint.

    Raises what a snapshot raises, and the first copy's error if none of them runs.
    """
    began = time.monotonic()
    check_outside(config, begins=True)
    if not 1 <= request.count <= MOST:
        raise UsageError(f"{request.count} copies: from 1 to {MOST} can be made at once")
    _check_names(request)
    lives = _lives(config, ref)
    if lives:
        rights.check(config, "fork", ref)
    with ExitStack() as stack:
        warm = stack.enter_context(closing(WarmHolders())) if request.count > 1 else None
        checkpoint, frozen_ms = ref, None
        if lives:
            stored = dump(
                carrying(config, share_files=request.share_files),
                ref,
                request=DumpRequest(leave_running=True, labels={LABEL: ref}),
                reporter=reporter,
            )
            checkpoint, frozen_ms = stored.manifest.id, stored.to_dict()["frozen_ms"]
            stack.enter_context(_unless_used(config, checkpoint, reporter))
        repository, manifest = _opened(config, checkpoint, stack)
        rights.check(config, "fork", manifest.session.name, lambda: roles_of(manifest))
        names = _names(config, request, manifest.session.name)
        asked = _requests(request, manifest, names)
        folders = {str(a.new_name): a.relocation.new for a in asked if a.relocation is not None}
        if folders:
            reporter.step("workspaces", copies=len(folders))
            old = fork_workspaces.workspace_of(manifest)
            stack.enter_context(fork_workspaces.separated(old, folders, reporter))
        reporter.step("template", copies=len(names))
        kept = None
        if template.possible(manifest):
            reader = repository.reader(reporter)
            kept = stack.enter_context(template.made(config, manifest, reader))
        forks = _restored(config, manifest, asked, kept, warm, reporter, whole=request.whole)
    warn_of_generators(reporter)
    return ForkResult(
        ref,
        manifest.id,
        frozen_ms,
        round((time.monotonic() - began) * 1000, 1),
        forks,
        list(reporter.warnings),
    )


def carrying(config: Config, *, share_files: bool) -> Config:
    """Return the configuration of the dump: the contents of what each copy gets its own of travel,
    as they are at the freeze.
    """
    return config if share_files else replace(config, files="carry")


def _facts(result: ForkResult) -> events.Facts:
    running = sum(one.state == "running" for one in result.forks)
    return {
        "checkpoint": result.checkpoint,
        "frozen_ms": result.frozen_ms,
        "total_ms": result.elapsed_ms,
        "states": {"running": running, "failed": len(result.forks) - running},
        "exit_code": events.DEGRADED if result.degraded else 0,
    }


def _requests(
    request: ForkRequest, manifest: Manifest, names: Sequence[str]
) -> list[RestoreRequest]:
    """Return the restores of the copies; `UsageError` for what this session does not allow."""
    if request.ttl is not None and manifest.holder is None:
        raise UsageError(
            f"{manifest.session.name!r} has no holder that could end its copies",
            hint="--ttl is for sessions that `criuctl run` has started.",
        )
    ends = None if request.ttl is None else time.time() + request.ttl
    moves: dict[str, Relocation] = {}
    if request.workspace:
        old = fork_workspaces.workspace_of(manifest)
        found = fork_workspaces.places(old, names)
        moves = {name: Relocation(old, new) for name, new in found.items()}
    origin = manifest.session.name
    return [
        RestoreRequest(
            new_name=name,
            forked_from=origin,
            ends=ends,
            relocation=moves.get(name),
            share_files=request.share_files,
        )
        for name in names
    ]


def _lives(config: Config, ref: str) -> bool:
    """Return whether `ref` names a session that runs here."""
    if not valid_name(ref):
        return False
    record = Registry(config).get(ref)
    return record is not None and record.alive()


def _opened(config: Config, ref: str, stack: ExitStack) -> tuple[Repository, Manifest]:
    store = open_store(config.store, config)
    stack.callback(store.close)
    repository = stack.enter_context(Repository.open(store, config))
    try:
        return repository, repository.manifest(ref)
    except NoSuchCheckpoint as error:
        if valid_name(ref):
            error.message = f"no session {ref!r} runs here, and {error.message}"
        raise


def _check_names(request: ForkRequest) -> None:
    """Raise `UsageError` or `InvalidName` before anything is touched."""
    if request.new_name is not None:
        check_name(request.new_name)
        if request.count != 1 or request.prefix is not None:
            raise UsageError("--as names one copy", hint="Use --prefix for several.")
    if request.prefix is not None:
        check_name(f"{request.prefix}-{request.count}")


def _names(config: Config, request: ForkRequest, origin: str) -> list[str]:
    """Return the names of the copies: PREFIX-1 and so on, without those that are taken."""
    if request.new_name is not None:
        return [request.new_name]
    prefix, count = request.prefix or origin, request.count
    taken = {body["session"] for body in sessions.sessions(config)}
    names: list[str] = []
    number = 0
    while len(names) < count:
        number += 1
        if (name := check_name(f"{prefix}-{number}")) not in taken:
            names.append(name)
    return names


@contextmanager
def _unless_used(config: Config, checkpoint: str, reporter: Reporter) -> Iterator[None]:
    """Remove the checkpoint that was made for the copies if none of them runs."""
    try:
        yield
    except BaseException as error:
        try:
            with acting.undoing():
                inspect.remove(config, [checkpoint], reporter=reporter)
        except CriuctlError as left:
            error.add_note(f"checkpoint {checkpoint} could not be removed: {left}")
        raise


def _restored(
    config: Config,
    manifest: Manifest,
    asked: Sequence[RestoreRequest],
    kept: template.Template | None,
    warm: WarmHolders | None,
    reporter: Reporter,
    *,
    whole: bool,
) -> list[Fork]:
    """Restore the copies; return them in the order of `asked`, or raise and leave none."""
    names = [str(one.new_name) for one in asked]
    work = [
        (str(one.new_name), partial(copied, config, manifest, one, kept, warm)) for one in asked
    ]
    # A copy that does not run leaves nothing of a name that was not known before.
    new = set(names) - {str(body["session"]) for body in sessions.sessions(config)}
    jobs = max(2, len(os.sched_getaffinity(0)) * _AT_ONCE_PER_CPU)
    done: dict[str, Fork] = {}
    try:
        for outcome in batch.each(work, reporter=reporter, jobs=jobs, broken=RestoreFailed):
            done[outcome.key] = made = fork_of(outcome)
            if whole and made.error is not None:
                raise made.error
    except BaseException as error:
        end_copies(config, names, {manifest.id}, error)
        forget_copies(config, new)
        raise
    forks = [done[name] for name in names]
    for one in asked:
        if one.relocation is not None and done[str(one.new_name)].error is not None:
            with suppress(OSError):
                fork_workspaces.remove(one.relocation.new)
    forget_copies(config, new & {one.session for one in forks if one.error is not None})
    failed = [one.error for one in forks if one.error is not None]
    if len(failed) == len(forks):
        raise failed[0]
    return forks


def copied(
    config: Config,
    manifest: Manifest,
    asked: RestoreRequest,
    kept: template.Template | None,
    warm: WarmHolders | None,
    reporter: Reporter,
    group: RestoredMember | None = None,
) -> dict[str, Any]:
    """Restore one copy, perhaps as a member of a `group`; return what `fork_of` reads."""
    partners = Partners(template=kept, warm=warm, group=group)
    result = restore(config, manifest.id, request=asked, reporter=reporter, partners=partners)
    assert isinstance(result, RestoreResult)
    # A port that is taken is not another one: the copy has a network of its own then.
    ports = {c.local: c.local for c in manifest.connections if c.waits and endpoint(c.local)[1]}
    folder = asked.relocation.new if asked.relocation is not None else None
    return {
        "workspace": folder,
        "restored": {**result.to_dict(), "degraded": result.degraded},
        "ports": ports,
    }


def fork_of(outcome: batch.Outcome) -> Fork:
    """Return the copy that `copied` has made, or failed to make."""
    if outcome.answer is None:
        return Fork(outcome.key, "failed", error=outcome.error)
    restored = outcome.answer["restored"]
    return Fork(
        outcome.key,
        "running",
        pid=restored["pid"],
        ports=outcome.answer["ports"],
        workspace=outcome.answer["workspace"],
        warnings=restored["warnings"],
        restored=restored,
        degraded=restored["degraded"],
    )


def end_copies(
    config: Config, names: Iterable[str], checkpoints: Container[str], error: BaseException
) -> None:
    """End those copies of these checkpoints that run already, and remove their records; `error`
    gets a note about one that cannot be ended.
    """
    registry = Registry(config)
    for name in names:
        record = registry.get(name)
        if record is None or record.checkpoint not in checkpoints or not record.forked_from:
            continue
        try:
            with acting.undoing():
                kill.kill(config, name, 0)
        except CriuctlError as left:
            error.add_note(f"copy {name!r} could not be ended: {left}")


def forget_copies(config: Config, names: Iterable[str]) -> None:
    """Remove what these copies, which do not run, have left of themselves on this host."""
    with suppress(CriuctlError), acting.undoing():
        if chosen := sorted(names):
            forget(config, chosen)


def forks_of(config: Config, name: str) -> list[str]:
    """Return the names of the running copies that `fork` has made of the session `name`."""
    return [
        record.name
        for record in Registry(config).all()
        if record.forked_from == name and record.alive()
    ]


def kill_forks(config: Config, name: str, grace: float) -> list[dict[str, Any]]:
    """End every copy that `fork` has made of the session `name`; return the JSON of ``kill`` for
    each. `SessionGone` if none is known.
    """
    found = forks_of(config, name)
    if not found:
        raise SessionGone(
            f"no fork of session {name!r} runs here", hint="`criuctl ls` shows what runs."
        )
    ended = []
    for one in found:
        with suppress(SessionGone):  # it has ended meanwhile
            ended.append(kill.kill(config, one, grace))
    return ended
