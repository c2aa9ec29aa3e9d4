"""Looking at checkpoints outside any store: exported files, folders of CRIU's images, podman's
checkpoint archives.

They are described by a manifest, so every command that shows a manifest can show them. What the
images do not contain (the host, command lines, which files were carried) stays empty. Nothing is
written, and nothing can be restored from here: an exported file is imported first, and podman or
CRIU restore their own checkpoints.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from ..checkpoint.chunks import StreamRef
from ..checkpoint.connection_record import ConnectionRecord
from ..checkpoint.exported import ExportedCheckpoint, Key
from ..checkpoint.file_records import FileRecord
from ..checkpoint.manifest import ImageFile, Manifest, MemoryImage, ProcessRecord, SessionRef
from ..config import Config
from ..criu import image_records, plain
from ..criu.pages import PAGE, RUN_ENTRY
from ..errors import Damaged, UsageError
from ..report import Reporter
from ..store.archive import MAGIC, ArchiveStore
from .shown import Shown, page_entries, page_maps
from .storing.contents import environments

_FREE_PROCESSES = 1 << 16
# bytes of images for each further process; the record of its state alone is larger
_PROCESS = 256
_PAGEMAP = re.compile(r"pagemap-(?:(shmem)-)?(\d+)\.img")


def look(config: Config, path: Path, *, maps: bool, env: bool = False, reporter: Reporter) -> Shown:
    """Return the content of the file or folder at `path`; raise `NoSuchCheckpoint`,
    `UnsupportedFormat`, `Damaged` or `KeyMissing`.
    """
    if (file := _opened_export(path)) is not None:
        with file:
            return _exported(config, path, file.fileno(), maps, env, reporter)
    if env:
        raise UsageError(
            "environments can be shown only for checkpoints of criuctl",
            hint="They are in memory, which is not read here.",
        )
    images = plain.read(path)
    runs = {
        name: image_records.page_runs(images.get, name)
        for name in images.images
        if _PAGEMAP.fullmatch(name)
    }
    memory = [
        _memory(name, sum(pages for _address, pages, _flags in found))
        for name, found in sorted(runs.items())
    ]
    shown = (
        {
            i: page_entries(_packed(found), PAGE)
            for i, (_name, found) in enumerate(sorted(runs.items()))
        }
        if maps
        else {}
    )
    return Shown(_manifest(images, memory), str(path), shown)


def _opened_export(path: Path) -> BinaryIO | None:
    """Open the file if it is an exported checkpoint; otherwise return None."""
    try:
        # O_NONBLOCK: a FIFO must not block
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, len(MAGIC), 0) == MAGIC:
            return open(os.dup(fd), "rb")
    finally:
        os.close(fd)
    return None


def _exported(
    config: Config, path: Path, fd: int, maps: bool, env: bool, reporter: Reporter
) -> Shown:
    archive = ArchiveStore.verified(fd, str(path))
    with ExportedCheckpoint.unlock(archive, config, Key()) as exported:
        manifest = exported.manifest_at(exported.only().object)
        reader = exported.reader(reporter)
        found = page_maps(manifest, reader) if maps else {}
        return Shown(
            manifest, str(path), found, environments=environments(manifest, reader) if env else None
        )


def _manifest(images: plain.PlainImages, memory: list[MemoryImage]) -> Manifest:
    if len(image_records.pids(images.get)) > _FREE_PROCESSES + images.read // _PROCESS:
        raise Damaged(
            f"{images.where} has more than {_FREE_PROCESSES} processes, about which the images "
            "say nothing"
        )
    processes = tuple(_process(task) for task in image_records.tasks(images.get))
    name, image = (str(images.container.get(key, "")) for key in ("name", "rootfsImageName"))
    created = (
        datetime.fromtimestamp(images.modified, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
    return Manifest(
        id="",
        session=SessionRef(name or Path(images.where).resolve().name, ""),
        incarnation=0,
        created=created,
        labels={"image": image} if image else {},
        root=processes[0] if processes else None,
        processes=processes,
        images=tuple(ImageFile(name, size) for name, size in sorted(images.sizes.items())),
        memory=tuple(memory),
        connections=tuple(_connections(images)),
        files=tuple(_files(images)),
        bytes={"memory": sum(m.data.size for m in memory), "files": 0},
    )


def _process(task: image_records.Task) -> ProcessRecord:
    return ProcessRecord(
        pid=task.pid,
        ns_pid=task.pid,
        ppid=task.ppid,
        pgid=task.pgid,
        sid=task.sid,
        command=task.command,
        exe=task.exe,
        cwd=task.cwd,
        uid=task.uid,
        gid=task.gid,
        state=task.state,
        threads=task.threads,
    )


def _memory(name: str, pages: int) -> MemoryImage:
    match = _PAGEMAP.fullmatch(name)
    assert match is not None
    return MemoryImage(
        "shmem" if match[1] else "task", int(match[2]), pages, StreamRef(), StreamRef(pages * PAGE)
    )


def _packed(runs: list[tuple[int, int, int]]) -> bytes:
    return b"".join(RUN_ENTRY.pack(*run) for run in runs)


def _connections(images: plain.PlainImages) -> Iterator[ConnectionRecord]:
    sockets = image_records.sockets(images.get)
    ends = {(s.local, s.peer) for s in sockets}
    for s in sockets:
        pid, fd = s.holders[0] if s.holders else (0, -1)
        yield ConnectionRecord(
            pid,
            fd,
            holders=s.holders,
            family=s.family,
            type=s.type,
            protocol=s.protocol,
            state=s.state,
            local=s.local,
            peer=s.peer,
            external=bool(s.peer) and (s.peer, s.local) not in ends,
        )


def _files(images: plain.PlainImages) -> Iterator[FileRecord]:
    """Yield the open files by path, then those that are only mapped."""
    found: dict[str, tuple[str, list[tuple[int, int]]]] = {}
    for pid, held in image_records.descriptors(images.get).items():
        for fd, file in held.items():
            if file.kind == "reg" and os.path.isabs(file.what):
                kind, holders = found.setdefault(file.what, ("read", []))
                holders.append((pid, fd))
                if "w" in file.mode and kind == "read":
                    found[file.what] = "written", holders
    for mapped in image_records.areas(images.get).values():
        for area in mapped:
            if area.name.startswith("/"):
                found.setdefault(area.name, ("mapped", []))
    for path, (kind, holders) in sorted(found.items()):
        yield FileRecord(path, kind, holders=tuple(holders))
