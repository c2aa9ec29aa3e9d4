"""The manifest of a dump, built from what was taken of the frozen tree, and the result for the
caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from .. import __version__
from ..cgroups import membership
from ..checkpoint.chunks import LAYERS
from ..checkpoint.connection_record import ConnectionRecord
from ..checkpoint.file_records import (
    ExternalFile,
    FifoRecord,
    FileRecord,
    InodeRecord,
    LinkRecord,
)
from ..checkpoint.manifest import ImageFile, Manifest, MemoryImage, ProcessRecord, SessionRef
from ..checkpoint.terminal_records import HolderRecord, TerminalRecord
from ..checkpoint.writer import CheckpointWriter
from ..criu.images import ImageSet
from ..criu.pages import PageImage
from ..files import carried_binaries, shown_workspaces
from ..hooks import Hooks
from ..host.identity import host_info
from ..host.registry import SessionRecord
from ..namespaces.plan import NamespacePlan
from ..proc.descriptors import Descriptor
from ..proc.tree import Process
from ..quoting import quoted
from ..repairs import processor_affinity, thread_attributes
from ..tracking.rounds import Round
from . import criu_facts
from .job import DumpJob

if TYPE_CHECKING:
    from .devices import DumpedDevices


class DumpResult(Struct, frozen=True):
    """The result of a dump; `to_dict` is the contract of ``dump --json``."""

    manifest: Manifest
    store: str
    warnings: list[str]
    degraded: bool = False
    hooks: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)  # of pre-copy

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        m = self.manifest
        memory = m.criu.get("memory", {})
        return {
            "checkpoint": m.id,
            "session": m.session.name,
            "number": m.number,
            "incarnation": m.incarnation,
            "store": self.store,
            "processes": len(m.processes),
            "frozen_ms": m.timings.get("frozen_ms"),
            "tracking": "write-protect" if memory.get("way") == "tracked" else "none",
            "pages": memory.get("pages", {"read_running": 0, "read_frozen": 0}),
            "total_ms": m.timings.get("total_ms"),
            "bytes": dict(m.bytes),
            "connections": [c.to_dict() for c in m.connections if not c.waits],
            "terminals": [t.to_dict() for t in m.terminals],
            "hooks": self.hooks,
            "warnings": self.warnings,
        } | self._rarely()

    def _rarely(self) -> dict[str, Any]:
        """Return the fields that few dumps have."""
        required = [f"{p.kind}:{p.argument}" for p in self.manifest.predicates]
        rarely: dict[str, Any] = {"precopy": self.rounds} if self.rounds else {}
        rarely |= {"requires": required} if required else {}
        if self.manifest.gpu is not None:
            from ..host.gpus import gpu_facts  # of few trees

            rarely["gpu"] = gpu_facts(self.manifest.gpu, self.manifest.timings)
        return rarely


def result_of(
    job: DumpJob,
    manifest: Manifest,
    store: str,
    hooks: Hooks,
    rounds: Sequence[Round],
    devices: DumpedDevices | None,
) -> DumpResult:
    """Return the result of a dump; processes that have lost their GPUs are a warning, and make it
    degraded.
    """
    lost = devices.lost if devices is not None else []
    if lost:
        ref = quoted(f"{manifest.session.name}@{manifest.number}")
        hint = f"The checkpoint is complete: end the tree, then `criuctl restore {ref}`."
        job.reporter.warning("; ".join(lost), hint)
    return DumpResult(
        manifest,
        store,
        list(job.reporter.warnings),
        hooks.degraded or bool(lost),
        hooks.records(),
        [r.to_dict() for r in rounds],
    )


class Taken(Struct, frozen=True):
    """What was taken of the tree, without CRIU's pages and images."""

    processes: Sequence[ProcessRecord]
    files: Sequence[FileRecord]
    connections: Sequence[ConnectionRecord]
    links: Sequence[LinkRecord]
    external: Mapping[str, Descriptor]  # CRIU's key -> a file that it could not reach by path
    entry: NamespacePlan
    own: Mapping[int, Sequence[tuple[int, int]]]  # see `criuctl.dump.private_memory`
    terminals: Sequence[TerminalRecord] = ()
    holder: HolderRecord | None = None
    fifos: Sequence[FifoRecord] = ()
    inodes: Sequence[InodeRecord] = ()


def shown(held: HolderRecord | None, root: int) -> HolderRecord | None:
    """Return the state of the holder, with where else the frozen tree finds its workspace."""
    if held is None or not held.workspace:
        return held
    return replace(held, shown=shown_workspaces.points(root, held.workspace))


def store_and_describe(
    job: DumpJob,
    session: SessionRecord,
    taken: Taken,
    images: ImageSet,
    memory: Sequence[PageImage],
    writer: CheckpointWriter,
) -> Manifest:
    """Build the manifest; store CRIU's metadata images and the maps of the memory on the way."""
    image_files = tuple(_add_images(images, writer))
    maps = _entries(memory, writer)
    features = (
        [carried_binaries.FEATURE]
        if any(f.kind == "mapped" and f.data is not None for f in taken.files)
        else []
    )
    made = Manifest(
        id=os.urandom(16).hex(),
        session=SessionRef(session.name, session.id),
        incarnation=session.incarnation,
        parent=session.checkpoint or None,
        labels=_labels(job, taken),
        host=host_info(job.config),
        criu=criu_facts.criu_info(job.config) | {"leave_running": job.request.leave_running},
        criuctl=__version__,
        root=taken.processes[0],
        processes=tuple(taken.processes),
        namespaces=taken.entry.to_dict(),
        images=image_files,
        image_data=writer.stream("images"),
        terminals=tuple(taken.terminals),
        holder=taken.holder,
        connections=tuple(taken.connections),
        files=tuple(taken.files),
        links=tuple(taken.links),
        fifos=tuple(taken.fifos),
        external=tuple(
            ExternalFile(key=key, kind=d.kind, path=d.target, flags=d.flags)
            for key, d in taken.external.items()
        ),
        bytes={
            "memory": 0,
            "files": sum(f.size for f in taken.files if f.data is not None),
            "new": 0,
            "stored": 0,
        },
        features=tuple(features),
    )
    return _with_memory(made, maps, writer, taken.own)


def with_memory(
    manifest: Manifest,
    memory: Sequence[PageImage],
    writer: CheckpointWriter,
    own: Mapping[int, Sequence[tuple[int, int]]],
) -> Manifest:
    """Return the manifest with these images of memory added; store their maps."""
    return _with_memory(manifest, _entries(memory, writer), writer, own)


def _entries(memory: Sequence[PageImage], writer: CheckpointWriter) -> Sequence[PageImage]:
    for image in memory:
        writer.add_bytes(("entries", image.key), image.pack())
    return memory


def _with_memory(
    manifest: Manifest,
    memory: Sequence[PageImage],
    writer: CheckpointWriter,
    own: Mapping[int, Sequence[tuple[int, int]]],
) -> Manifest:
    # Only now: the first call waits until everything is hashed.
    images = tuple(_memory(image, writer, own) for image in memory)
    layered = any(image.data.pages is not None for image in images)
    size = manifest.bytes["memory"] + sum(i.pages for i in memory) * 4096
    return replace(
        manifest,
        memory=manifest.memory + images,
        bytes=dict(manifest.bytes, memory=size),
        features=(
            (*manifest.features, LAYERS)
            if layered and LAYERS not in manifest.features
            else manifest.features
        ),
    )


def _labels(job: DumpJob, taken: Taken) -> dict[str, str]:
    """Return the request's labels, and the ``label`` of a program that asked for a checkpoint."""
    asked = taken.holder.inside.get("label") if taken.holder is not None else ""
    return ({"label": str(asked)} if asked else {}) | dict(job.request.labels)


def _add_images(images: ImageSet, writer: CheckpointWriter) -> Iterator[ImageFile]:
    """Write CRIU's metadata images, one after the other, into one stream."""
    for name in images.names():
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=images.folder)
        with open(fd, "rb") as file:
            size = 0
            while piece := file.read(4 << 20):
                writer.add_bytes("images", piece)
                size += len(piece)
        yield ImageFile(name, size)


def _memory(
    image: PageImage, writer: CheckpointWriter, own: Mapping[int, Sequence[tuple[int, int]]]
) -> MemoryImage:
    return MemoryImage(
        kind=image.key.kind,
        id=image.key.id,
        pages=image.pages,
        entries=writer.stream(("entries", image.key)),
        data=writer.stream(image.key),
        own=tuple(own.get(image.key.id, ())) if image.key.kind == "task" else (),
    )


def process_records(tree: Sequence[Process]) -> list[ProcessRecord]:
    """Return the records of the frozen tree's processes."""
    everywhere = processor_affinity.everywhere()
    return [_process(p, everywhere) for p in tree]


def _process(p: Process, everywhere: set[int]) -> ProcessRecord:
    return ProcessRecord(
        pid=p.pid,
        ns_pid=p.ns_pid,
        ppid=p.ppid,
        pgid=p.pgid,
        sid=p.sid,
        start_time=p.start_time,
        command=p.command,
        argv=p.argv,
        exe=p.exe,
        cwd=p.cwd,
        uid=p.uid,
        gid=p.gid,
        state=p.state,
        threads=p.threads,
        cgroups={} if p.zombie else membership.of_process(p.pid),
        processors={} if p.zombie else processor_affinity.bound(p.pid, p.threads, everywhere),
        manners={} if p.zombie else thread_attributes.unusual(p.pid, p.threads),
    )
