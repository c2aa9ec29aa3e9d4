"""Parts of a restore around its main story: its result, its incarnation, its checks, and the
clean-up of a failure.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ..checkpoint import leases
from ..checkpoint.manifest import Manifest
from ..config import Config
from ..criu import driver
from ..criu.images import ImageSet
from ..criu.tenant import Tenant, objections
from ..errors import (
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    NoSuchProcess,
    ObjectMissing,
    PidTaken,
    PreflightRefused,
    RestoreFailed,
    TerminalTaken,
    Vetoed,
)
from ..host.registry import Registry, SessionRecord, boot_id, restore_command
from ..proc import folder_walk
from ..proc.mounts import read_mounts
from ..proc.tree import ProcessIdentity, read_tree, wait_ended
from ..quoting import quoted
from ..report import Finding, Reporter, summarised
from .newest import Found

if TYPE_CHECKING:
    from ..checkpoint.repository import Repository

_GONE_TIMEOUT = 10.0  # seconds for a killed tree to be gone

# Runs a command with the root folder bind-mounted at $1, in a mount namespace that ends with it.
PRIVATE_ROOT = (
    *("unshare", "--mount", "--propagation", "slave", "--"),
    *("sh", "-c", 'mount --bind / "$1" && mount --make-private "$1" && shift && exec "$@"', "sh"),
)
# nothing is mounted below them that others could see
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/home", "/var/tmp", "/tmp")


def mount_point() -> str:
    """Return a folder to mount the root on, with nothing mounted in it."""
    mounted = [mount.point for mount in read_mounts()]
    for folder in _MOUNT_POINTS:
        if os.path.isdir(folder) and not any(
            m == folder or m.startswith(f"{folder}/") for m in mounted
        ):
            return folder
    raise RestoreFailed(
        "no folder to mount the root on was found", hint="Make an empty folder /mnt."
    )


class RestoreResult(Struct, frozen=True):
    """The result of a restore; `to_dict` is the contract of ``restore --json``."""

    checkpoint: str
    session: str
    incarnation: int
    pid: int
    inner_pid: int
    elapsed_ms: float
    lazy: bool
    pids: str
    connections: list[dict[str, Any]]
    files: list[dict[str, Any]]
    warnings: list[str] = field(default_factory=list)
    degraded: bool = False
    hooks: list[dict[str, Any]] = field(default_factory=list)
    gpu: dict[str, Any] | None = None  # of a tree that uses GPUs
    found: Found | None = None
    paused: bool = False  # the session was paused or halted at the dump, and still is

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "checkpoint": self.checkpoint,
            "session": self.session,
            "incarnation": self.incarnation,
            "pid": self.pid,
            "state": "paused" if self.paused else "running",
            "inner_pid": self.inner_pid,
            "elapsed_ms": self.elapsed_ms,
            "lazy": self.lazy,
            "pids": self.pids,
            "connections": self.connections,
            "files": self.files,
            "hooks": self.hooks,
            "warnings": self.warnings,
            **(self.found.to_dict() if self.found is not None else {}),
            **({"gpu": self.gpu} if self.gpu is not None else {}),
        }


@contextmanager
def offering_another(
    repository: Repository, ref: str, manifest: Manifest | None = None
) -> Iterator[None]:
    """Add a hint to the error of a damaged or missing checkpoint: the newest other one of the
    session.

    With a `manifest` it is the newest one before that.
    """
    try:
        yield
    except (Damaged, ObjectMissing) as error:
        name = manifest.session.name if manifest is not None else ref.partition("@")[0]
        with suppress(CriuctlError):
            others = [
                one
                for one in repository.list(name)
                if manifest is None or one.number < manifest.number
            ]
            for other in others[-1:]:
                there = quoted(f"{other.session}@{other.number}")
                offer = (
                    f"Another checkpoint may be whole: `criuctl verify {there}`, then `criuctl "
                    f"restore {there}`."
                )
                error.hint = f"{offer} {error.hint}".rstrip()
        raise


def check_not_running(config: Config, registry: Registry, name: str, *, copy: bool) -> None:
    """Raise `Conflict` if the session runs already, or a copy has no name of its own."""
    record = registry.get(name)
    if record is not None and copy and record.state == "checkpointed" and not record.alive():
        back = f"{restore_command(config, name, record.store)} restores it"
        raise Conflict(f"session {name!r} is checkpointed", hint=f"{back}; or choose another name.")
    if record is None or not record.alive():
        return
    raise Conflict(
        f"session {name!r} is running here as PID {record.pid}",
        hint="Choose another name."
        if copy
        else "End it first, or restore a copy with --as NEW-NAME.",
    )


def check_not_moved(
    registry: Registry, repository: Repository, manifest: Manifest, *, take_over: bool
) -> None:
    """Raise `Conflict` if the session has left for another host, as far as is known here.

    If the store keeps leases, they decide instead.  A checkpoint that was made there afterwards can
    be restored.
    """
    record = registry.get(manifest.session.name)
    if (
        record is None
        or not record.moved_to
        or take_over
        or repository.capabilities.conditional_create
    ):
        return
    if record.id == manifest.session.id and manifest.incarnation < record.incarnation:
        raise Conflict(
            f"session {record.name!r} has left for {record.home or record.moved_to} since, and "
            "this store cannot tell whether it runs there",
            hint=(
                "Dump it there into this store; --take-over once it has ended there, or that host "
                "is lost; or --as NEW-NAME."
            ),
            host=record.home,
        )


def refuse_foreign(images: ImageSet, tenant: Tenant) -> None:
    """Raise `PreflightRefused` if the images would make more than the tenant's own processes."""
    if (objection := next(objections(images, tenant), None)) is not None:
        raise PreflightRefused(
            f"{objection}: it is not user {tenant.uid}'s alone, and is not restored for that user",
            hint="Root may restore it with `criuctl restore`, or an older checkpoint.",
        )


def refusal(errors: Sequence[Finding]) -> CriuctlError:
    """Return the plan's errors as one; nothing was touched.  It is a veto if all of them are
    policies.
    """
    kind = Vetoed if all(f.code == "connection-refuse" for f in errors) else PreflightRefused
    return kind(
        "; ".join(map(str, summarised(errors))),
        hint=errors[0].hint,
        findings=[f.to_dict() for f in errors],
    )


def remains_of(manifest: Manifest) -> list[ProcessIdentity]:
    """Return processes of the dump that may still be zombies here for a moment."""
    if manifest.host.boot_id != boot_id():
        return []
    return [ProcessIdentity(p.pid, p.start_time) for p in manifest.processes if p.start_time]


def living(registry: Registry, manifest: Manifest) -> int | None:
    """Return the PID of the session's root, if it runs here."""
    known = registry.get(manifest.session.name)
    return (
        known.pid
        if known is not None and known.id == manifest.session.id and known.alive()
        else None
    )


def next_incarnation(
    registry: Registry,
    repository: Repository,
    manifest: Manifest,
    name: str,
    *,
    copy: bool,
    forked_from: str = "",
) -> tuple[SessionRecord, leases.Head | None]:
    """Return the session as it will be, and its present lease.

    It gets one incarnation more than any known one; a copy is a new session.  The lease knows the
    incarnations of other hosts, and those that this host has forgotten, for example after a kill.
    """
    if copy:
        own = SessionRecord(name, os.urandom(16).hex(), incarnation=1, forked_from=forked_from)
        return own, None
    head = None
    if repository.capabilities.conditional_create:
        with suppress(DataError):  # the claim reports it
            head = leases.read_head(repository, name)
    newest = manifest.incarnation
    if head is not None and head.session.id == manifest.session.id:
        newest = max(newest, head.incarnation)
    known = registry.get(name)
    if known is not None and known.id == manifest.session.id:
        newest, forked_from = max(newest, known.incarnation), known.forked_from
    return SessionRecord(
        name, manifest.session.id, incarnation=newest + 1, forked_from=forked_from
    ), head


def warn_of_generators(reporter: Reporter) -> None:
    """Warn, once for all copies that a command makes, of what they cannot be kept from sharing."""
    reporter.warning(
        "random generators that a program has seeded itself give the same numbers in each copy",
        "`criuctl help forks` lists some, and what a program can do.",
    )


def kill_tree(root: ProcessIdentity | None, patience: float = _GONE_TIMEOUT) -> None:
    """End what is restored if CRIU was killed, or does not do it any more.

    While CRIU traces it, the end of a process of many threads is not visible: do not call it then.
    """
    if root is None or not root.exists():
        return
    try:
        tree = [process.identity for process in read_tree(root.pid)]
    except NoSuchProcess:
        return  # CRIU has done it meanwhile
    for identity in tree:
        try:
            pidfd = identity.open_pidfd()
        except NoSuchProcess:
            continue
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended meanwhile
        finally:
            os.close(pidfd)
    wait_ended(tree, patience)


def remove_ghosts(paths: Iterable[str]) -> None:
    """Remove deleted files that a killed CRIU has left under temporary names; the next CRIU would
    fail at them.
    """
    for path in paths:
        name = os.path.basename(path)
        with suppress(OSError), folder_walk.folder(os.path.dirname(path)) as folder:
            kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            os.rmdir(name, dir_fd=folder) if stat.S_ISDIR(kind) else os.unlink(name, dir_fd=folder)


def remove_folders(paths: Iterable[str]) -> None:
    """Remove deleted folders that a killed CRIU has made, the innermost first; folders with
    contents stay.
    """
    for path in paths:
        with suppress(OSError):
            os.rmdir(path)


def explain(config: Config, error: driver.CriuFailed, manifest: Manifest) -> CriuctlError:
    """Return CRIU's failure in the user's terms; its log is kept."""
    from ..host.failures import diagnosis  # a table of regular expressions that only failures need

    kept = diagnosis.kept(config, error.log, f"restore-{manifest.session.name}")
    found = diagnosis.diagnose(error.log, str(error))
    kind = {"pid-taken": PidTaken, "terminals": TerminalTaken}.get(found.code, RestoreFailed)
    return kind(
        f"CRIU could not restore {manifest.session.name}: {found.text}; nothing is left of it",
        hint=found.hint,
        pid=found.pid,
        fd=found.fd,
        **kept,
    )


def shared_folder(manifest: Manifest) -> Iterator[Finding]:
    """Warn that a copy works in the folder of its original: only open files are separated."""
    held = manifest.holder.workspace if manifest.holder is not None else ""
    folder = held or manifest.processes[0].cwd
    if folder not in ("", "/"):
        yield Finding(
            "warning",
            "shared-folder",
            f"the copy works in the folder of its original, {quoted(folder)}: what either makes "
            "there from now on, both have",
            "Only the files that the original has open for writing are separated.",
        )
