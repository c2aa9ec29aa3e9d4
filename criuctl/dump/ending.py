"""After the freeze of a dump: a tree that runs on gets everything back; one that has ended leaves
nothing behind.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..checkpoint import leases
from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..criu import driver
from ..errors import CommandFailed, CriuctlError, DumpFailed, NoSuchProcess
from ..host import inside_report
from ..host.identity import host_id
from ..host.registry import Registry, boot_id
from ..proc.tree import ProcessIdentity, wait_ended
from ..quoting import quoted
from ..report import Reporter
from . import subject
from .after_commit import AfterCommit
from .commit import GONE_TIMEOUT, Commit
from .criu_failures import explain
from .freeze import Freeze
from .job import DumpJob
from .parts import TreeParts

if TYPE_CHECKING:
    from ..checkpoint.summary import CheckpointSummary
    from .devices import DumpedDevices


def settle_failure(
    error: BaseException, job: DumpJob, parts: TreeParts, freeze: Freeze, commit: Commit
) -> Manifest:
    """Undo the dump for a tree that continues, and raise the error; return the manifest if the dump
    has succeeded nevertheless.

    CRIU may give no answer although all is done: the last process of a private PID namespace takes
    CRIU, its guest, along.
    """
    freeze.lock.remove()
    ended = commit.ended()
    if not ended:
        parts.terminals.back()
        _mend_connections(job.reporter, parts)
        parts.holder.failed()
        if parts.devices is not None:
            parts.devices.give_back()
            _report_lost(
                job.reporter,
                commit.destination.repository,
                commit.destination.session.name,
                parts.devices,
                error,
            )
    tree = freeze.seen.tree
    # CRIU, or a helper of criuctl, was killed
    if isinstance(error, NoSuchProcess | CommandFailed) and tree:
        fate = "the tree runs on" if tree[0].identity.alive() else "the tree is gone"
        raise DumpFailed(f"{error.message} while it was dumped; {fate}", hint=error.hint) from error
    if not isinstance(error, driver.CriuFailed):
        raise error
    if not ended:
        name = commit.destination.session.name
        raise explain(job.config, error, name, job.root.pid, tree, freeze.tries) from error
    return commit.stored_manifest()


def _mend_connections(reporter: Reporter, parts: TreeParts) -> None:
    """Take connections out of repair mode that a CRIU that was killed has left in it."""
    parts.repair_mode.rest()
    parts.repair_mode.mend()
    if parts.repair_mode.mended:
        reporter.warning(
            f"CRIU was killed while it held {parts.repair_mode.mended} TCP sockets of the tree; "
            "they work again",
            "A program that waited in a call on one of them may have got EPERM from it.",
        )


def _report_lost(
    reporter: Reporter,
    repository: Repository,
    session: str,
    devices: DumpedDevices,
    error: BaseException,
) -> None:
    """Say with which checkpoint the session goes on, if processes are left without their GPUs."""
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


def finish(
    job: DumpJob,
    registry: Registry,
    parts: TreeParts,
    freeze: Freeze,
    commit: Commit,
    after: AfterCommit,
    manifest: Manifest,
) -> None:
    """Clean up after the commit, and record where the session is now; a failure is only a
    warning.
    """
    destination, ending = commit.destination, not job.request.leave_running
    name = repr(destination.session.name)
    if parts.devices is not None:
        with after.optional("the helper that holds the GPUs of the tree could not be ended"):
            parts.devices.ended()
    if destination.home is not None:
        with after.optional(f"what is known of the lease of {name} is not complete"):
            destination.home.keep()
    if ending:
        left = _wait_ended(job.reporter, freeze)
        with after.optional("not all that was made for the dump could be removed"):
            parts.links.clean(job.reporter)
            if not commit.stays_locked:
                freeze.lock.remove()
            parts.farewell.say()
        with after.optional("the reports of trees that are gone could not be removed"):
            inside_report.sweep(job.config)
        if destination.delivery is not None:
            # the lease there is the target's, which a source cannot read
            destination.delivery.ended(left)
        else:
            seen = destination.home.seen if destination.home is not None else None
            with after.optional(f"the lease of {name} could not be given back"):
                leases.release(
                    destination.repository,
                    destination.session.name,
                    host=host_id(job.config),
                    seen=seen,
                )
    where = destination.where(job.config)
    record = replace(destination.session, store=where, checkpoint=manifest.id, boot_id=boot_id())
    lock = freeze.lock.table if commit.stays_locked else None
    with after.optional(f"where {name} is could not be written down"):
        root = freeze.seen.tree[0].identity
        subject.remember(job.config, registry, record, root, leave_running=not ending, lock=lock)
    with after.optional(f"the holder of {name} could not be informed of the checkpoint"):
        parts.holder.done(manifest.id, manifest.number, ended=ending)


def _wait_ended(reporter: Reporter, freeze: Freeze) -> list[ProcessIdentity]:
    """CRIU has killed the tree: wait until it is gone, and return what is left."""
    reporter.step("cleanup")
    left = wait_ended((p.identity for p in freeze.seen.tree), GONE_TIMEOUT)
    if left:
        reporter.warning(f"still ending: PIDs {', '.join(str(i.pid) for i in left)}")
    return left
