"""What root does for a job: make this node its home, dump it, restore it, end it.

Every function runs in a process of its own (`apart`), as a dump and a restore want it, and returns
one JSON object. The session's name is the job's (`jobs.Job.name`); no word of the user's reaches an
option of a dump or a restore, and none of a checkpoint's labels is the user's.

A job that was never requeued restores nothing: checkpoints under its name are of an earlier job
with that number, and the claim of a new session id makes them strangers. One that was requeued
restores the newest checkpoint, if it is of the session that holds the lease.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...checkpoint import leases
from ...checkpoint.manifest import SessionRef
from ...checkpoint.repository import Repository
from ...config import Config
from ...criu.tenant import Tenant
from ...errors import Conflict, CriuctlError, DataError, PreflightRefused
from ...host.fencing import with_lease
from ...host.identity import host_id, host_name
from ...host.lost_homes import stand_down
from ...host.registry import Registry, SessionRecord, boot_id
from ...proc import forked
from ...proc.procfs import anonymous_memory
from ...proc.tree import ProcessIdentity, read_tree
from ...report import Reporter
from ...store import open_store
from . import protocol
from .jobs import Job

_STREAMS = ("stdout", "stderr")
_LABEL = "slurm-{}"  # of a checkpoint: the pipe, as CRIU names it


class Settings(Struct, frozen=True):
    """What the administrator allows a job."""

    max_memory: int = 0  # bytes of a tree that is dumped; 0: any
    min_interval: float = 10.0  # seconds between two checkpoints that leave the job running
    keep: int = 2  # newest checkpoints of a job
    fence_every: float = 30.0  # seconds between two looks at the lease


class Bound(Struct, frozen=True):
    """A job, and what its tree may be."""

    job: Job
    tenant: Tenant
    groups: Mapping[str, str]  # the control groups of the process that asks
    settings: Settings

    @property
    def name(self) -> str:
        """Return the session's name."""
        return self.job.name


def apart(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do one piece of work in a forked process; return its answer, or one with an error."""

    def answered() -> dict[str, Any]:
        try:
            return {"ok": True, **work()}
        except CriuctlError as error:
            return protocol.failure(error)

    ended = next(forked.run_all([("job", answered)], at_once=1))
    if ended.answer is not None:
        return ended.answer
    why = ended.bug.strip().splitlines()[-1:] or [f"the process ended with {ended.code}"]
    return protocol.failure(CriuctlError(f"criuctl's service failed: {why[0]}"))


def prepare(config: Config) -> dict[str, Any]:
    """Make the store in passing, as a dump does, when the service starts: no job is to see that."""
    reporter = Reporter()
    with (
        open_store(config.store, config) as store,
        Repository.open_or_make(store, config, reporter) as repository,
    ):
        leased = repository.capabilities.conditional_create
    warnings = [*reporter.warnings, *([] if leased else [leases.UNLEASED])]
    return {"warnings": warnings}


@contextmanager
def _opened(config: Config) -> Iterator[Repository]:
    with (
        open_store(config.store, config) as store,
        Repository.open(store, config) as repository,
    ):
        yield repository


# -- the beginning of a life -----------------------------------------------------------------------


def found(config: Config, bound: Bound) -> dict[str, Any]:
    """Return the number and time of the checkpoint that this job is to be restored from, or None as
    ``checkpoint``.
    """
    if not bound.job.restarts:
        return {"checkpoint": None}
    with _opened(config) as repository:
        listed = repository.list(bound.name)
        if not listed:
            return {"checkpoint": None}
        newest = listed[-1]
        head = None
        if repository.capabilities.conditional_create:
            head = leases.read_head(repository, bound.name)
        session = repository.manifest(newest).session
        if head is not None and head.session.id != session.id:
            return {"checkpoint": None}
        return {"checkpoint": {"number": newest.number, "created": newest.created}}


def begin(config: Config, bound: Bound, root: ProcessIdentity) -> dict[str, Any]:
    """Make this node the home of a program that the job has started, and that waits."""
    reporter, registry = Reporter(), Registry(config)
    with _opened(config) as repository:
        known = SessionRecord(
            name=bound.name, pid=root.pid, start_time=root.start_time, boot_id=boot_id()
        )
        claim = leases.claim(
            repository,
            known.name,
            known.id,
            known.incarnation,
            host=host_id(config),
            host_name=host_name(config),
            take_over=True,  # Slurm runs a job on one node, and knows of no other that has it
        )
        try:
            if claim.leased:
                known = with_lease(known, repository, claim.head.epoch)
            registry.put(known)
        except BaseException:
            claim.release_unless_kept()
            raise
        claim.keep()
        claim.clear()
        if claim.warning:
            reporter.warning(claim.warning)
    return {"warnings": protocol.texts(reporter.warnings)}


def restore(config: Config, bound: Bound, streams: Mapping[str, int]) -> dict[str, Any]:
    """Restore the job's newest checkpoint here; its ends of pipes become `streams`, by name."""
    from ...restore.request import RestoreRequest
    from ...restore.story import restore as restore_tree

    reporter = Reporter()
    with _opened(config) as repository:
        labels = repository.manifest(bound.name).labels
        keys = {labels.get(_LABEL.format(name), ""): fd for name, fd in streams.items()}
        if "" in keys:
            raise DataError(f"the newest checkpoint of {bound.name} was not made for a job")
        request = RestoreRequest(
            tenant=bound.tenant,
            groups=bound.groups,
            streams=keys,
            take_over=True,  # as in `begin`
        )
        result: Any = restore_tree(
            config, bound.name, request=request, reporter=reporter, repository=repository
        )
    return {
        "pid": result.pid,
        "number": result.found.checkpoint.number,
        "incarnation": result.incarnation,
        "warnings": protocol.texts(reporter.warnings),
    }


# -- while it runs ---------------------------------------------------------------------------------


def dump(config: Config, bound: Bound, streams: Mapping[str, str], *, end: bool) -> dict[str, Any]:
    """Store the job, and end its tree or let it run on; `streams`: its pipes, by CRIU's keys."""
    from ...dump.job import DumpRequest
    from ...dump.story import dump as dump_tree

    reporter, registry = Reporter(), Registry(config)
    record = registry.get(bound.name)
    if record is None or not record.alive():
        raise Conflict(f"job {bound.job.number} runs nothing here that could be stored")
    _check_size(bound, record.identity)
    labels = {_LABEL.format(name): key for name, key in streams.items()}
    request = DumpRequest(
        leave_running=not end,
        labels=labels,
        tenant=bound.tenant,
        streams=tuple(streams.values()),
    )
    result = dump_tree(config, bound.name, request=request, reporter=reporter)
    with suppress(CriuctlError):  # what is left too many goes after the next one
        _keep_newest(config, bound)
    return {
        "number": result.manifest.number,
        "frozen_ms": result.to_dict()["frozen_ms"],
        "warnings": protocol.texts(reporter.warnings),
    }


def _check_size(bound: Bound, root: ProcessIdentity) -> None:
    allowed, used = bound.settings.max_memory, 0
    nameless: dict[tuple[int, int], int] = {}
    for process in read_tree(root.pid):
        with suppress(CriuctlError):  # it has just ended
            used += anonymous_memory(process.pid)
            nameless |= _nameless_files(process.pid)
    used += sum(nameless.values())
    if allowed and used > allowed:
        raise PreflightRefused(
            f"the job uses {used >> 20} MiB of memory; this node stores jobs of up to "
            f"{allowed >> 20} MiB",
            hint="The administrator sets --max-memory of `criuctl slurm serve`.",
        )


def _nameless_files(pid: int) -> dict[tuple[int, int], int]:
    """Return device, inode and bytes of the open files without a name (memfds, deleted files): a
    checkpoint holds their contents, mapped or not.
    """
    sizes: dict[tuple[int, int], int] = {}
    with suppress(OSError):  # it has just ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:  # closed since
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes


def _keep_newest(config: Config, bound: Bound) -> None:
    with _opened(config) as repository:
        for old in repository.list(bound.name)[: -bound.settings.keep]:
            repository.remove(old)


def fence(config: Config, bound: Bound) -> dict[str, Any]:
    """End what runs here if another node has taken the job over; ``reason`` is "" if none has."""
    found = next(stand_down(config, [bound.name], reporter=Reporter()))
    return {"reason": found.reason if found.done == "ended" else ""}


# -- its end ---------------------------------------------------------------------------------------


def finish(config: Config, bound: Bound, *, succeeded: bool) -> dict[str, Any]:
    """Record that the program has ended by itself. If it `succeeded`, its checkpoints are removed;
    otherwise they stay, and a requeue of the job restores the newest.
    """
    registry = Registry(config)
    record = registry.get(bound.name)
    if record is None:
        return {}
    with _opened(config) as repository:
        ref, host = SessionRef(record.name, record.id), host_id(config)
        if succeeded:
            for old in repository.list(bound.name):
                repository.remove(old)
            leases.end(repository, ref, record.incarnation, host=host, host_name=host_name(config))
        else:
            leases.release(repository, bound.name, host=host)
    registry.put(replace(record, state="lost", reason="its program has ended", leases={}))
    if succeeded:
        registry.forget(bound.name)
    return {}


def stream_names() -> tuple[str, ...]:
    """Return the names of the streams, in the order of their descriptors in a message."""
    return _STREAMS


def key_of_pipe(fd: int) -> str:
    """Return the name that CRIU gives the pipe of a descriptor; `DataError` if it is no end of a
    nameless pipe to write to.
    """
    target = os.readlink(f"/proc/self/fd/{fd}")
    with open(f"/proc/self/fdinfo/{fd}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    pipe = stat.S_ISFIFO(os.fstat(fd).st_mode) and target.startswith("pipe:[")
    if not pipe or flags & os.O_ACCMODE != os.O_WRONLY:
        raise DataError("a stream of the job is not the writing end of a pipe")
    return target
