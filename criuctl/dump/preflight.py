"""The preflight: find every obstacle to a dump, with process, descriptor and remedy, before
anything is touched.

`check_tree` examines the running tree and this host.  It stops nothing, changes nothing, and does
not raise for what it finds: a tree that is gone or that criuctl may not look at is a finding too.
What is found while the tree runs may pass until the freeze, or arise before it: CRIU's own refusal
is the last word, and `diagnosis` turns it into the same kind of sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ..config import Config
from ..connections.record import UNTAKEN
from ..connections.survey import Survey
from ..errors import CriuctlError, NoSuchProcess, PreflightRefused
from ..host.target import Target
from ..proc.tree import ends_reported
from ..report import RECORDED, Finding, summarised
from .checks import known_programs
from .checks.carried import check_carried
from .checks.connections import PASSES, check_sockets
from .checks.containers import DECISIVE
from .checks.contents import check_contents
from .checks.files import check_descriptors
from .checks.folders import check_folders
from .checks.gpu import check_gpu
from .checks.host import check_host
from .checks.memory import check_mappings, check_programs
from .checks.mounts import check_mounts
from .checks.namespaces import (
    check_bound,
    check_freezer,
    check_ipc,
    check_namespaces,
    check_network,
    check_proc_mount,
)
from .checks.pipes import check_pipes
from .checks.proc_files import check_proc_files, check_proc_folders, check_refused_files
from .checks.processes import check_processes
from .checks.scene import Scene, collect
from .checks.services import check_service
from .checks.shared_mappings import check_shared_mappings
from .checks.system_v import check_sysv
from .checks.terminals import check_terminals
from .checks.watches import check_watches
from .connection_report import hung_up_unasked
from .criu_failures import PAUSES
from .job import DumpJob

Check = Callable[[Scene], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    check_host,
    check_processes,
    check_namespaces,
    check_proc_mount,
    check_network,
    check_bound,
    check_ipc,
    check_freezer,
    check_mounts,
    check_folders,
    check_descriptors,
    check_proc_files,
    check_refused_files,
    check_proc_folders,
    check_pipes,
    check_watches,
    check_sockets,
    check_terminals,
    check_mappings,
    check_shared_mappings,
    check_sysv,
    check_contents,
    check_programs,
    check_gpu,
    check_service,
)

_ORDER = {"error": 0, "warning": 1, "info": 2}


def examine(job: DumpJob, found: Target) -> Scene:
    """Return what the preflight of a dump has seen; raise for errors, report the other findings.

    It looks again while the only obstacles are such that pass by themselves.
    """
    findings, scene = _settled(job, found)
    errors = [f for f in findings if f.level == "error"]
    if scene is None and errors[0].code == NoSuchProcess.code:  # it has ended just now
        raise NoSuchProcess(errors[0].text, hint=errors[0].hint)
    if errors:
        text = "; ".join(map(str, summarised(errors)))
        raise PreflightRefused(text, hint=errors[0].hint, findings=[f.to_dict() for f in errors])
    assert scene is not None  # else there is an error
    # those of UNTAKEN are reported at the freeze
    for finding in summarised((f for f in findings if f.code not in UNTAKEN), named=RECORDED):
        job.reporter.finding(finding)
    return scene


def _settled(job: DumpJob, found: Target) -> tuple[list[Finding], Scene | None]:
    request = job.request

    def look() -> tuple[list[Finding], Scene | None]:
        return look_at(
            found,
            job.config,
            leave_running=request.leave_running,
            with_files=request.with_files,
            streams=request.streams,
        )

    for pause in PAUSES:
        findings, scene = look()
        # where it moves, the other host has been asked which files it has
        if scene is not None and request.carry_binaries and not job.moves:
            findings += check_carried(scene)
        errors = [f for f in findings if f.level == "error"]
        if not errors or not all(f.hint.startswith(PASSES) for f in errors):
            return findings, scene
        job.reporter.step("not-now", why="; ".join(map(str, errors)))
        time.sleep(pause)
    return look()


def warn_hung_up(job: DumpJob, survey: Survey) -> None:
    """Warn of connections that the default hangs up.

    Not at a snapshot: its peers will be gone when it is restored.
    """
    if not job.request.leave_running:
        for finding in hung_up_unasked(survey.unasked):
            job.reporter.finding(finding)


def check_tree(target: Target, config: Config, *, leave_running: bool = False) -> list[Finding]:
    """Return all findings about the tree, errors first; without errors a dump can be tried."""
    return look_at(target, config, leave_running=leave_running)[0]


def look_at(
    target: Target,
    config: Config,
    *,
    leave_running: bool = False,
    with_files: Sequence[str] = (),
    streams: Sequence[str] = (),
) -> tuple[list[Finding], Scene | None]:
    """Return the findings of `check_tree`, and the scene; None if it could not be read, which is an
    error.
    """
    try:
        scene = collect(
            target.root.pid,
            config,
            leave_running=leave_running,
            with_files=with_files,
            streams=streams,
        )
    except CriuctlError as error:
        return [Finding("error", error.code, error.message, error.hint, pid=target.root.pid)], None
    found: list[Finding] = []
    for check in CHECKS:
        try:
            with ends_reported(scene.tree):
                found += check(scene)
        except (CriuctlError, OSError) as error:
            # What could not be examined is no obstacle: CRIU looks again, with the tree frozen.
            hint = error.hint if isinstance(error, CriuctlError) else ""
            found.append(
                Finding(
                    "warning",
                    "check-incomplete",
                    f"{check.__name__.replace('_', ' ')} was not possible: {error}",
                    hint,
                )
            )
    found = known_programs.remedied(found, known_programs.executables(scene, found))
    return sorted(found, key=lambda f: (_ORDER[f.level], f.code != DECISIVE)), scene
