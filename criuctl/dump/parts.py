"""The parts of a tree that a dump handles apart from CRIU's images; each owns what it takes, and
gives it back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ..connections.closing import Farewell
from ..connections.repair_mode import RepairMode
from ..connections.survey import Survey
from ..criu.options import DumpOptions
from ..errors import PreflightRefused
from ..files import carried_binaries, carried_files, link_remaps
from ..gpu.use import opened_device
from ..host.dumped_holder import DumpedHolder
from ..namespaces.plan import NamespacePlan
from ..proc.descriptors import Descriptor
from ..proc.procfs import open_entry
from ..repairs.call_time_limits import Waits
from ..repairs.registry import Repairs
from ..terminals.dumped import DumpedTerminals
from . import criu_facts
from .checks.scene import Scene
from .job import DumpJob
from .subject import Subject

if TYPE_CHECKING:
    from ..files.workspaces import Workspace
    from .devices import DumpedDevices


class TreeParts(Struct):
    """What a dump knows and holds of one tree."""

    survey: Survey  # its connections
    carried: list[str]  # absolute paths of --with-files
    binaries: carried_binaries.Binaries
    entry: NamespacePlan  # how CRIU gets into its namespaces
    net: int  # descriptor of its network namespace, which may outlive the tree
    links: link_remaps.DumpedLinks
    external: Mapping[str, Descriptor]  # CRIU's key -> what it cannot reach by a path
    leased: bool  # a process has a lease on a file
    terminals: DumpedTerminals
    holder: DumpedHolder
    workspace: Workspace | None = None  # that is taken along
    devices: DumpedDevices | None = None  # GPUs, from when they are taken
    repairs: Repairs = field(default_factory=Repairs)
    call_limits: Waits = field(default_factory=Waits)
    repair_mode: RepairMode = field(default_factory=RepairMode)
    shielded: ExitStack = field(default_factory=ExitStack)  # the note of its locked connections
    farewell: Farewell = field(default_factory=Farewell)

    def criu_options(self, job: DumpJob, freezer: int | None = None) -> DumpOptions:
        """Return what CRIU is asked for; `freezer` is a control group that stands still."""
        return DumpOptions(
            pid=self.entry.root,
            leave_running=job.request.leave_running,
            shell_job=criu_facts.needs_shell_job(job.root.pid),
            external=[*self.external, *self.terminals.external],
            external_mounts=self.entry.is_init,
            timeout=job.config.criu_timeout,
            freezer=freezer,
            leased=self.leased,
            shield=self.survey.shield,
        )

    def end_connection_watch(self) -> None:
        """CRIU no longer touches the tree's connections: stop watching them, and remove the note of
        their lock.
        """
        self.repair_mode.rest()
        self.shielded.close()


def gather(
    job: DumpJob,
    subject: Subject,
    scene: Scene,
    survey: Survey,
    entry: NamespacePlan,
    stack: ExitStack,
) -> TreeParts:
    """Look at what the preflight has seen of the tree, and hold what could change its name until
    `stack` ends.
    """
    root = job.root
    net = open_entry(root.pid, "ns/net", os.O_RDONLY)
    stack.callback(os.close, net)
    parts = TreeParts(
        survey=survey,
        carried=carried_files.resolve_carried(job.request.with_files, root.pid),
        binaries=carried_binaries.Binaries(root.pid, wanted=job.request.carry_binaries),
        entry=entry,
        net=net,
        links=link_remaps.DumpedLinks(root.pid, entry, stack),
        external=criu_facts.external_files(scene.living, scene.opened),
        leased=any(d.leased for held in scene.opened.values() for d in held),
        terminals=DumpedTerminals(root.pid, scene.living, scene.opened, stack),
        holder=DumpedHolder(job.config, subject.session, root, stack),
    )
    if job.request.with_workspace:
        parts.workspace = _workspace(job, subject, parts.holder)
        stack.callback(parts.workspace.close)
    stack.callback(parts.farewell.drop)
    stack.callback(parts.shielded.close)
    stack.callback(parts.repair_mode.rest)
    return parts


def _workspace(job: DumpJob, subject: Subject, holder: DumpedHolder) -> Workspace:
    from ..files.workspaces import Workspace  # of few dumps

    path = holder.workspace()
    if not path:
        raise PreflightRefused(
            f"{subject.session.name} has no workspace to take along",
            hint="A session gets one by `criuctl run --workspace DIR`. Other files are taken along "
            "by `criuctl dump --with-files`.",
        )
    return Workspace(job.config, path, job.root.pid)


def uses_devices(opened: Mapping[int, Sequence[Descriptor]]) -> bool:
    """Return whether a process holds an NVIDIA device."""
    return any(opened_device(d) for held in opened.values() for d in held)
