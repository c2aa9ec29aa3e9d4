"""Small checkpoints with known content, for tests of whatever keeps them."""

from __future__ import annotations

import io
import os
import secrets
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from criuctl.checkpoint.chunks import LAYERS
from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import ExternalFile, FileRecord, LinkRecord
from criuctl.checkpoint.manifest import (
    HostInfo,
    ImageFile,
    Manifest,
    MemoryImage,
    ProcessRecord,
    SessionRef,
)
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.checkpoint.terminal_records import TerminalRecord
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.config import Config
from criuctl.report import Reporter
from criuctl.store import Store
from criuctl.store.memory import MemoryStore

WINDOW = 256 * 1024
ENTRIES = bytes(range(16))


def config(path: Path, **options: object) -> Config:
    """A configuration that touches nothing outside `path`."""
    places: dict[str, object] = {
        name: str(path / name.partition("_")[0]) for name in ("key_dir", "cache_dir", "state_dir")
    }
    return Config(**{**places, "key_dir": str(path / "keys"), **options})  # type: ignore[arg-type]


def repository(
    path: Path, *, encrypted: bool = False, store: Store | None = None, **options: object
) -> Repository:
    """A new repository, in memory unless a store is given."""
    made = config(path, **options)
    return Repository.init(store or MemoryStore(), encryption=encrypted, config=made)


def put_windows(
    writer: CheckpointWriter,
    key: Hashable,
    content: bytes,
    size: int = WINDOW,
    *,
    placed: bool = False,
    ahead: bool = False,
) -> None:
    """`content` as windows of `size` bytes through the writer's buffers, as the page receiver does
    it (`placed`) or a round.
    """
    buffer, fill = writer.acquire(), 0
    for start in range(0, len(content), size):
        piece = content[start : start + size]
        if fill + len(piece) > len(buffer.view):
            writer.release(buffer)
            buffer, fill = writer.acquire(), 0
        buffer.view[fill : fill + len(piece)] = piece
        if ahead:
            writer.ahead(buffer, fill, fill + len(piece), key, start)
        else:
            writer.window(key, buffer, fill, fill + len(piece), start if placed else None)
        fill += len(piece)
    writer.release(buffer)


@dataclass(frozen=True)
class Content:
    """What a checkpoint was given."""

    memory: bytes
    images: Mapping[str, bytes]
    file: bytes = b""
    window: int = WINDOW
    before: bytes = b""  # what was sent ahead of the memory


SMALL = Content(
    memory=b"".join(n.to_bytes(2, "little") * 2048 for n in range(130)),
    images={"inventory.img": b"canary image\n" * 40, "core-7.img": b""},
    file=b"canary file " * 999,
)


def write(
    repo: Repository,
    content: Content = SMALL,
    *,
    session: str = "web",
    labels: dict[str, str] | None = None,
    checkpoint: str = "",
    uid: int = 0,
) -> CheckpointSummary:
    """Commit one checkpoint with `content`, of this user's."""
    with repo.writer(Reporter(), uid=uid) as writer:
        return writer.commit(
            fill(writer, content, session=session, labels=labels, checkpoint=checkpoint)
        )


def fill(
    writer: CheckpointWriter,
    content: Content,
    *,
    session: str = "web",
    labels: dict[str, str] | None = None,
    checkpoint: str = "",
) -> Manifest:
    """Give a writer all of `content`; returns the manifest to commit."""
    if content.before:
        put_windows(writer, "memory", content.before, content.window, ahead=True)
    put_windows(writer, "memory", content.memory, content.window, placed=bool(content.before))
    memory = writer.stream("memory")
    writer.add_bytes("entries", ENTRIES)
    for data in content.images.values():
        writer.add_bytes("images", data)
    writer.add_bytes("file", content.file)
    return Manifest(
        id=checkpoint or secrets.token_hex(16),
        session=SessionRef(session, "ab" * 16),
        labels=labels or {},
        host=HostInfo(name="canary-host", cpu_flags=("avx", "sse"), os="Debian"),
        criu={"version": "4.2.1", "options": {"ghost_limit": 1}},
        criuctl="0",
        root=ProcessRecord(pid=7, ns_pid=7),
        processes=(
            ProcessRecord(pid=7, ns_pid=7, argv=("./canary-program", "\udcff")),
            ProcessRecord(pid=8, ns_pid=8, ppid=7),
        ),
        namespaces={"net": {"mode": "host", "name": None}},
        images=tuple(ImageFile(name, len(data)) for name, data in content.images.items()),
        image_data=writer.stream("images"),
        memory=(
            MemoryImage(
                "task", 7, -(-len(content.memory) // 4096), writer.stream("entries"), memory
            ),
        ),
        terminals=(TerminalRecord("/dev/pts/1", 34817, 22, "outside", holders=((7, 0),)),),
        connections=(
            ConnectionRecord(
                7,
                3,
                holders=((7, 3),),
                family="inet",
                local="1.2.3.4:5",
                peer="6.7.8.9:10",
                external=True,
            ),
        ),
        files=(
            FileRecord(
                "/srv/canary-path",
                "carried",
                size=len(content.file),
                data=writer.stream("file"),
                xattrs={"user.a": "YQ=="},
            ),
        ),
        links=(LinkRecord("/srv/link_remap.1", writer.stream("file"), sibling="/srv/a"),),
        external=(ExternalFile("file[1:2]", "file", "/srv/b"),),
        timings={"frozen_ms": 1.5},
        bytes={"memory": len(content.memory)},
        warnings=("careful",),
        features=() if memory.pages is None else (LAYERS,),
    )


def check(repo: Repository, ref: str | CheckpointSummary, content: Content = SMALL) -> Manifest:
    """Read all of a checkpoint back, in every way there is, and compare."""
    manifest = repo.manifest(ref)
    reader = repo.reader(Reporter())
    assert reader.read(manifest.image_data) == b"".join(content.images.values())
    assert reader.read(manifest.memory[0].entries) == ENTRIES
    data = manifest.files[0].data
    assert data is not None
    assert placed(reader, manifest.memory[0].data) == content.memory
    out = io.BytesIO()
    for chunk in reader.chunks(data):
        out.write(chunk)
    assert out.getvalue() == content.file
    repo.verify(manifest, Reporter())
    return manifest


def placed(reader: CheckpointReader, ref: object, offset: int = 4096) -> bytes:
    """What `write_to` makes of a stream, in a file on tmpfs."""
    fd = os.memfd_create("placed")
    try:
        reader.write_to([(ref, fd, offset)])  # type: ignore[list-item]
        return os.pread(fd, 1 << 30, offset)
    finally:
        os.close(fd)


def pipeline_threads() -> list[str]:
    """The threads of criuctl's pipelines that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("criuctl-")]
