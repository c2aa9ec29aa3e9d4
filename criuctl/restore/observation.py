"""Collect everything on this host that the plan of a restore depends on, once, before anything is
decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..checkpoint.manifest import Manifest
from ..config import Config
from ..connections import rule_parsing
from ..criu.images import ImageSet
from ..criu.owners import user_ids
from ..files import (
    deleted_copies,
    deleted_names,
    fifos,
    kernel_files,
    own_files,
    predicates,
    socket_names,
    trust_findings,
)
from ..files.copies import left_behind, separated, spared
from ..files.judgement import Judgement
from ..files.missing_paths import absent
from ..hooks.contract import RECONNECT
from ..hooks.find import executables
from ..host.registry import Registry
from ..namespaces import interfaces
from ..repairs import file_locks
from ..report import Finding, Reporter
from . import memory_needs, outcome
from .connection_plan import owners_in
from .host_facts import HostFacts, PlanOptions
from .observe import observe, sees_mounts_of_dump
from .request import RestoreRequest
from .source import Source, Unpacked

if TYPE_CHECKING:
    from .devices import RestoredDevices


def plan_options(config: Config, request: RestoreRequest) -> PlanOptions:
    """Return what the plan needs of the request and of this host's configuration."""
    return PlanOptions(
        request.pids,
        request.copy,
        request.connections,
        request.files or config.file_conflicts,
        rule_parsing.parse(config),
        request.connections_deadline,
        frozenset(hook.name for hook in executables(config, RECONNECT)),
        request.alone,
        bool(request.group),
        request.network,
        prepared=bool(executables(config, "pre-restore")),
    )


def open_devices(source: Source, reporter: Reporter, stack: ExitStack) -> RestoredDevices | None:
    """Return the GPUs of the checkpoint, None for most trees."""
    if source.manifest.gpu is None:
        return None
    from .devices import RestoredDevices  # of few trees

    return stack.enter_context(RestoredDevices(source.manifest.gpu, reporter))


def observe_all(
    config: Config,
    request: RestoreRequest,
    source: Source,
    unpacked: Unpacked,
    options: PlanOptions,
    devices: RestoredDevices | None,
    *,
    authentic: bool,
) -> HostFacts:
    """Return the facts of the plan; obstacles found already are among their findings.

    `authentic`: no other program than criuctl can have written the checkpoint.
    """
    manifest, images = source.manifest, unpacked.images
    # before any file is opened, which would break the lease
    if leased := file_locks.leased_elsewhere(images):
        raise outcome.refusal(leased)
    remains = outcome.remains_of(manifest)
    facts = observe(manifest, images.reserved_ids(), remains, options, user_ids(images))
    if request.rewind:
        facts = replace(facts, files=_rewound(manifest, facts, unpacked))
    # before anything reads the images' deleted files
    deleted_copies.make(images, facts.files, unpacked.reader)
    files, findings = _files(config, request, manifest, images, facts)
    if request.rewind:
        from ..files import rewind  # seldom asked for

        findings += rewind.conflicts(config, manifest, files)
    own = request.copy and not (request.share_files or request.alone)
    deleted = deleted_names.judge(manifest, images, files, options.files, unpacked.reader, own=own)
    if request.copy:
        findings += deleted_names.both_write(deleted)
    names = facts.names
    if request.alone:
        findings += fifos.untried(images, manifest)
    else:
        findings += _in_the_way(config, request, manifest, images, files, facts)
        names = socket_names.taken(images, manifest, facts.netns, copy=request.copy)
        if request.copy and request.relocation is None:
            findings += outcome.shared_folder(manifest)
    if devices is not None:
        findings += devices.judge()
    findings += memory_needs.lacking(images)
    findings += trust_findings.objections(
        config,
        manifest,
        images,
        files,
        authentic=authentic,
        hang_up=request.connections == "hangup",
    )
    return replace(
        facts,
        files=files,
        findings=(*facts.findings, *findings),
        deleted=deleted,
        names=names,
        bound=interfaces.bound(images, facts.netns),
        owners=owners_in(images),
    )


def _rewound(manifest: Manifest, facts: HostFacts, unpacked: Unpacked) -> tuple[Judgement, ...]:
    """Return the judged files with those of the workspace."""
    from ..files import rewind  # seldom asked for

    return rewind.judge(
        manifest,
        unpacked.reader,
        facts.files,
        user_ids(unpacked.images),
        at_home=sees_mounts_of_dump(manifest),
    )


def _files(
    config: Config,
    request: RestoreRequest,
    manifest: Manifest,
    images: ImageSet,
    facts: HostFacts,
) -> tuple[tuple[Judgement, ...], list[Finding]]:
    """Return the judged files, those of a copy separated from its original's, and findings."""
    if not request.copy:
        return facts.files, list(left_behind(facts.files, images))
    judged = facts.files
    if not request.alone and (taken := file_locks.held(file_locks.wanted(images))):
        holders = {lock.path: file_locks.holder(lock.path) for lock in taken}
        judged = separated(judged, images, holders)
    folder = request.relocation.new if request.relocation is not None else ""
    original = outcome.living(Registry(config), manifest)
    if request.share_files:
        judged = own_files.share(judged, images)
    elif not request.alone:  # a trial writes to overlays
        judged = own_files.separate(
            judged,
            images,
            request.files or config.file_conflicts,
            folder=folder,
            original=original,
        )
    settled, shared = spared(judged, images, original)
    settled = (*settled, *own_files.cleared(facts.files, folder))
    return (*settled, *fifos.own_for_copy(images, manifest)), list(shared)


def _in_the_way(
    config: Config,
    request: RestoreRequest,
    manifest: Manifest,
    images: ImageSet,
    files: tuple[Judgement, ...],
    facts: HostFacts,
) -> Iterator[Finding]:
    """Yield the findings that a trial, which has a shadow of this host for itself, cannot have."""
    yield from predicates.examine(config, manifest, force=request.force)
    own = {j.record.path for j in files if j.verdict == "beside"}
    yield from file_locks.locked_elsewhere(images, own, copy=request.copy)
    yield from absent(images, manifest, files, facts.missing_folders)
    yield from kernel_files.missing(images, manifest, copy=request.copy)
