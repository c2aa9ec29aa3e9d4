"""Around a dump: the look before it, whose it is, what CRIU is asked for, signals, how a failure is told, what is known then.

Kept apart from `dump`, so that the story there stays a story.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..checkpoint.repository import Repository
from ..config import Config
from ..criu import driver
from ..criu.images import ImageSet, read
from ..criu.options import DumpOptions
from ..errors import Conflict, CriuctlError, DumpFailed, NoSuchBucket, NoSuchProcess, StoreNotInitialised
from ..host.registry import Registry, SessionRecord, check_name, restore_command
from ..host.target import Target
from ..namespaces.namespaces import NamespacePlan
from ..proc.descriptors import Descriptor
from ..proc.limits import effective_capabilities
from ..proc.tree import Process, ProcessIdentity, read_tree
from ..quoting import quoted
from ..report import Finding, Reporter
from ..session.sessions import state_of
from ..store import Store
from . import preflight, surroundings
from .checks.connections import PASSES
from .checks.processes import descriptor_limit, many_shared
from .checks.scene import Scene

if TYPE_CHECKING:
    from ..checkpoint.manifest import CheckpointSummary
    from .devices import DumpedDevices

PAUSES = (0.1, 0.2, 0.5, 1.0)  # seconds before another try of what is refused for something that passes
LONG = 5.0  # seconds; a tree that is to be frozen for so long again is not
_NOT_UNDONE = "from parasite"  # CRIU could not take out of a process what it had put there

_SHARED = 1 << 8 | 1 << 14  # CRIU: VMA_ANON_SHARED and VMA_AREA_MEMFD in criu/include/image.h
_MANY_MAPPINGS = 1 << 14  # bytes of the image of a task's mappings that has a few hundred of them


def look_at(
    target: Target, config: Config, reporter: Reporter, *, leave_running: bool, with_files: Sequence[str]
) -> tuple[list[Finding], Scene | None]:
    """`preflight.look_at`, again while nothing stands in the way but what passes by itself."""
    for pause in PAUSES:
        findings, scene = preflight.look_at(target, config, leave_running=leave_running, with_files=with_files)
        errors = [f for f in findings if f.level == "error"]
        if not errors or not all(f.hint.startswith(PASSES) for f in errors):
            return findings, scene
        reporter.step("not-now", why="; ".join(map(str, errors)))
        time.sleep(pause)
    return preflight.look_at(target, config, leave_running=leave_running, with_files=with_files)


def session_for(registry: Registry, target: Target, name: str | None) -> SessionRecord:
    """The session that this tree is: named by the user, known by its root or its name, or named after its command."""
    known = registry.find(target.root)
    name = name if name is not None else target.session  # a configured tree has its name before it is a session
    if name is not None:
        check_name(name)
        taken = registry.get(name)
        if taken is not None and taken.alive() and taken.identity != target.root:
            raise Conflict(
                f"session {name!r} is running as PID {taken.pid}, which is another tree", hint="Choose another --name."
            )
        held = registry.held(target.root)
        if held not in (None, name):
            raise Conflict(
                f"PID {target.root.pid} is session {held!r}, which has a terminal",
                hint=f"Use that name; `criuctl restore {quoted(held)} --as {quoted(name)}` makes a copy that has another.",
            )
        if taken is not None:
            return taken
        return SessionRecord(name=name, id=known.id if known and known.name == name else os.urandom(16).hex())
    if known is not None:
        return known
    process = read_tree(target.root.pid)[0]
    plain = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in process.command).strip("-._") or "process"
    default = f"{plain}-{process.pid}"
    return SessionRecord(name=default)


def open_for(store: Store, config: Config, registry: Registry, session: SessionRecord, root: ProcessIdentity) -> Repository:
    """The repository for this tree's checkpoint; an absent or empty folder becomes a store.

    But not where one is gone that this tree has checkpoints in, or an encrypted one of any session: a disk is not mounted, and
    what is put below its mount point is found by nobody, in the clear at that.
    """
    try:
        return Repository.open(store, config)
    except (NoSuchBucket, StoreNotInitialised) as error:
        claims = [*session.leases.values()] if session.identity == root else []
        claims += [c for record in registry.all() for c in record.leases.values() if c.get("encrypted")]
        if all(claim.get("url") != store.url for claim in claims):
            return Repository.open(store, config, create_local=True)
        raise type(error)(
            f"the store in {store.url} is gone, which this host has checkpoints in",
            hint=f"Mount what holds it. `criuctl store init --store {quoted(store.url)}` makes a new one.",
        ) from error


def tell_superseded(config: Config, reporter: Reporter, former: SessionRecord) -> None:
    """A warning that this dump takes the name of a session that is stored and runs nowhere.

    No error, as it is where a holder waits for that session: a service that is dumped each night, and started anew by
    something else than a restore, would have no checkpoints any more from then on.
    """
    where = (
        f"has moved to {former.home or former.moved_to}" if former.moved_to else f"is checkpointed as {former.checkpoint[:12]}"
    )
    reporter.warning(
        f"session {former.name!r} {where}, and this is another tree; from now on the name means this one",
        f"{restore_command(config, former.checkpoint[:12], former.store, copy=True)} brings the former back,"
        " `criuctl pin` keeps it from `prune`."
        if not former.moved_to and former.checkpoint
        else "Choose another --name.",
    )


def tell_lost(reporter: Reporter, repository: Repository, session: str, devices: DumpedDevices, error: BaseException) -> None:
    """A failed dump has left processes without their GPUs: with which checkpoint the session goes on."""
    if not devices.lost:
        return
    kept: list[CheckpointSummary] = []
    with suppress(CriuctlError):  # the store may be what has failed
        kept = repository.list(session)
    ref = quoted(f"{session}@{kept[-1].number if kept else 0}")
    hint = f"End it, then `criuctl restore {ref}`." if kept else "Start the program again."
    if isinstance(error, CriuctlError):
        error.hint = hint
    if devices.lost[0] not in str(error):
        reporter.warning("; ".join(devices.lost), hint)


def end_former_holder(config: Config, name: str, root: ProcessIdentity) -> None:
    """A holder that only keeps how an earlier session of this name has ended goes: it would be asked for this one; `Conflict`."""
    state = state_of(config, name)
    if state is None or not state["holder_alive"] or (state["pid"], state["start_time"]) == (root.pid, root.start_time):
        return
    if state["state"] not in ("exited", "lost"):
        raise Conflict(f"session {name!r} is {state['state']}, and another tree", hint="Choose another --name.")
    from ..host.holders import end_holder  # seldom needed

    end_holder(config, name, state)


def dump_options(
    config: Config,
    entry: NamespacePlan,
    root: int,
    external: list[str],
    leave_running: bool,
    freezer: int | None = None,
    *,
    leased: bool,
    shield: bool,
) -> DumpOptions:
    """What CRIU is asked for."""
    return DumpOptions(
        pid=entry.root,
        leave_running=leave_running,
        shell_job=surroundings.needs_shell_job(root),
        external=external,
        external_mounts=entry.is_init,
        timeout=config.criu_timeout,
        freezer=freezer,
        leased=leased,
        shield=shield,
    )


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Whatever becomes of the signal handlers inside (see `ignore_signals`), they are put back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From here on nothing is broken off."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def refuse_unrestorable(images: ImageSet, tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> None:
    """`DumpFailed`, while the tree can still run on, for what has come since the look at it and no restore has room for."""
    limit: int | None = None
    for process in tree:
        name = f"mm-{process.ns_pid}.img"
        if process.zombie or images.size(name) < _MANY_MAPPINGS:
            continue
        limit = descriptor_limit(effective_capabilities()) if limit is None else limit
        shared = {area.shmid for mm in read(images.folder, name, "MM") for area in mm.vmas if area.status & _SHARED}
        for finding in many_shared(process, len(opened.get(process.pid, ())), len(shared), limit):
            raise DumpFailed(f"{finding.text}; the tree runs on", hint=finding.hint, pid=finding.pid)


def passing(error: driver.CriuFailed, tries: int) -> str:
    """What CRIU has refused the tree for, if that passes by itself and the tree runs on as it did before; else "".

    What nobody knows, said beside something that passes, is tried once more only.
    """
    from ..host.failures import diagnosis  # a table of regular expressions that only failures need

    if not error.undone or _NOT_UNDONE in error.log:
        return ""
    found = diagnosis.diagnose(error.log, str(error))
    return found.text if found.passes and (found.code != diagnosis.UNKNOWN or tries == 1) else ""


def explain(
    config: Config, error: driver.CriuFailed, session: str, root: int, tree: Sequence[Process], tries: int = 1
) -> CriuctlError:
    """CRIU's failure in words, by the state the tree is in now; the last one of so many `tries`."""
    if not tree and _ended(root):  # CRIU, as a guest in its PID namespace, has ended with it, or met a zombie
        return NoSuchProcess(f"PID {root} has ended before it was frozen")
    from ..host.failures import diagnosis

    kept = diagnosis.kept(config, error.log, f"dump-{session}")
    found = diagnosis.diagnose(error.log, str(error))
    alive = tree[0].identity.alive() if tree else not _ended(root)
    fate = "the tree runs on" if alive else "the tree is gone"
    often = f" in {tries} tries" if tries > 1 else ""
    return DumpFailed(
        f"CRIU could not dump PID {root}{often}: {found.text}; {fate}",
        hint=found.hint,
        pid=found.pid,
        fd=found.fd,
        **kept,
    )


def _ended(pid: int) -> bool:
    """Whether there is no such process, or one that runs no more, if only nobody has reaped it yet."""
    try:
        return ProcessIdentity.of(pid).doomed()
    except NoSuchProcess:
        return True


def remember(
    config: Config, registry: Registry, record: SessionRecord, root: ProcessIdentity, *, leave_running: bool, lock: str | None
) -> None:
    """Write down where the session is now; the fate of a tree that was to be ended is told by looking at it.

    `lock` is the firewall table that holds the connections until a restore here, None if they are not to be kept.
    """
    doomed = root.doomed()
    if doomed and leave_running and _killed(config, record):
        registry.forget(record.name)  # while it was stored: nobody waits for it any more
        return
    record = replace(record, state="running", pid=root.pid, start_time=root.start_time)
    if doomed and not leave_running:
        record = replace(record, state="checkpointed", lock_table=lock or "", lock_kept=lock is not None)
    registry.put(record)


def _killed(config: Config, record: SessionRecord) -> bool:
    from ..host.audit_log import killed_by_operator  # seldom needed

    return killed_by_operator(config, record)
