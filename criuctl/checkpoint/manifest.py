"""What a checkpoint is: the manifest.

A manifest names everything that a restore needs, and everything that `show` displays. It is written
once, last, by one atomic put, and never changed. Its JSON is described by
``images/manifest.schema.json``. It consists of records, which are plain data: `criuctl.dump` makes
them and `criuctl.restore` uses them. The records of the host, the processes and the memory are
here; those of files (`file_records`), connections (`connection_record`), terminals
(`terminal_records`) and GPUs (`gpu_records`) have modules of their own.

Manifests are untrusted input. `Manifest.from_dict` checks types, ranges, names and paths, so that
no name in one can lead a restore outside the folder that it writes to.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal, Self

from msgspec import field
from msgspec.structs import replace

from .chunks import StreamRef
from .connection_record import ConnectionRecord
from .file_records import (
    ExternalFile,
    FifoRecord,
    FileRecord,
    InodeRecord,
    LinkRecord,
    WorkspaceRecord,
)
from .gpu_records import GPU, GpuRecord
from .records import (
    DIGEST,
    ID,
    SESSION_NAME,
    Record,
    check_path,
    check_pattern,
    check_range,
    check_text_of_kernel,
    damaged,
)
from .terminal_records import HolderRecord, TerminalRecord

MANIFEST_VERSION = 1

_IMAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z")
_MAX_REASON = 500  # characters
_MAX_PAGES = 1 << 40

PredicateKind = Literal["file", "command", "output", "age"]


def now() -> str:
    """Return the present time as manifests write it (RFC 3339, UTC, milliseconds)."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SessionRef(Record, frozen=True):
    """The session of a checkpoint: its name, and the id that survives a rename."""

    name: str
    id: str

    def check(self, where: str) -> None:
        check_pattern(SESSION_NAME, self.name, f"{where}.name")
        check_pattern(ID, self.id, f"{where}.id")


class HostInfo(Record, frozen=True):
    """The host of a dump: the properties that a restore compares."""

    name: str = ""
    machine_id: str = ""
    boot_id: str = ""
    kernel: str = ""
    os: str = ""
    arch: str = ""
    cpu_model: str = ""
    cpu_flags: tuple[str, ...] = ()
    page_size: int = 4096


class ProcessRecord(Record, frozen=True):
    """One process of the tree; `pid` as criuctl saw it, `ns_pid` as it sees itself."""

    pid: int
    ns_pid: int
    ppid: int = 0
    pgid: int = 0
    sid: int = 0
    # clock ticks since boot; together with `pid` and the host's boot_id it identifies the process
    start_time: int = 0
    command: str = ""
    argv: tuple[str, ...] = ()
    exe: str = ""
    cwd: str = ""
    uid: int = 0
    gid: int = 0
    state: str = ""
    threads: int = 1
    cgroups: dict[str, str] = field(default_factory=dict)  # hierarchy -> path
    # thread number as the thread sees it -> the processors it may run on: "0,3"
    processors: dict[str, str] = field(default_factory=dict)
    # thread number as the thread sees it -> attributes that differ from the defaults, as in
    # `criuctl.repairs.thread_attributes`
    manners: dict[str, dict[str, int]] = field(default_factory=dict)

    def check(self, where: str) -> None:
        for name in ("pid", "ns_pid", "ppid", "pgid", "sid"):
            check_range(getattr(self, name), 0, 1 << 31, f"{where}.{name}")
        for path in self.cgroups.values():
            check_text_of_kernel(path, f"{where}.cgroups")


class ImageFile(Record, frozen=True):
    """One of CRIU's metadata images: its name, and its length in the stream that holds all
    of them.
    """

    name: str
    size: int

    def check(self, where: str) -> None:
        check_pattern(_IMAGE, self.name, f"{where}.name")
        if ".." in self.name:
            raise damaged(f"{where}.name", "leads elsewhere")
        check_range(self.size, 0, 1 << 40, f"{where}.size")


class MemoryImage(Record, frozen=True):
    """The memory of a task or of a shared memory object: its map and its pages."""

    kind: Literal["task", "shmem"]
    id: int
    pages: int
    entries: StreamRef  # packed <QII vaddr, pages, flags>
    data: StreamRef  # its present pages in order, at most 256 KiB of address space in a chunk
    # addresses (first, end) of the memory that no other task shares, where known
    own: tuple[tuple[int, int], ...] = ()

    def check(self, where: str) -> None:
        check_range(self.id, 0, (1 << 56) - 1, f"{where}.id")
        check_range(self.pages, 0, _MAX_PAGES, f"{where}.pages")
        last = 0
        for low, high in self.own:
            if not last <= low < high or low % 4096 or high % 4096:
                raise damaged(f"{where}.own", "is not a list of ascending areas of whole pages")
            last = high


class PredicateRecord(Record, frozen=True):
    """What must be so where the checkpoint is restored, as it was at the dump: see
    `criuctl.files.predicates`.
    """

    kind: PredicateKind
    argument: str  # a path, a command, or a span of time
    size: int = 0  # of a file: its bytes,
    digest: str = ""  # and BLAKE3 of them, hex; of an output: that of what was printed
    mac: str = ""  # of a command: by it the host that noted the predicate knows it again
    # why it could not be noted, of one that a program of the session asked for: it is stale
    unmet: str = ""

    def check(self, where: str) -> None:
        check_pattern(DIGEST, self.digest, f"{where}.digest")
        check_pattern(DIGEST, self.mac, f"{where}.mac")
        check_range(self.size, 0, (1 << 63) - 1, f"{where}.size")
        if self.kind == "file":
            check_path(self.argument, f"{where}.argument")
        if len(self.unmet) > _MAX_REASON:
            raise damaged(f"{where}.unmet", "is too long")
        if not 0 < len(self.argument) <= 4096 or "\0" in self.argument:
            raise damaged(f"{where}.argument", "is not one")


class Manifest(Record, frozen=True):
    """One checkpoint; see the module's docstring.  `number` and `created` are set by the commit."""

    id: str
    session: SessionRef
    incarnation: int = 1
    number: int = 0
    parent: str | None = None
    created: str = field(default_factory=now)
    labels: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    host: HostInfo = field(default_factory=HostInfo)
    criu: dict[str, Any] = field(default_factory=dict)
    criuctl: str = ""
    root: ProcessRecord | None = None
    processes: tuple[ProcessRecord, ...] = ()
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: tuple[ImageFile, ...] = ()
    image_data: StreamRef = field(default_factory=StreamRef)
    memory: tuple[MemoryImage, ...] = ()
    terminals: tuple[TerminalRecord, ...] = ()
    holder: HolderRecord | None = None
    connections: tuple[ConnectionRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    fifos: tuple[FifoRecord, ...] = ()
    inodes: tuple[InodeRecord, ...] = ()
    inodes_mac: str = ""  # by it the host of the dump knows `inodes` again; hex
    external: tuple[ExternalFile, ...] = ()
    predicates: tuple[PredicateRecord, ...] = ()
    gpu: GpuRecord | None = None
    workspace: WorkspaceRecord | None = None
    hooks: tuple[dict[str, Any], ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    version: int = MANIFEST_VERSION
    features: tuple[str, ...] = ()  # what a reader must understand

    def to_dict(self) -> dict[str, Any]:
        """Return JSON; ``images`` holds both the images' list and their data."""
        made = Record.to_dict(self)
        data = made.pop("image_data")
        made["images"] = {"files": made["images"], "data": data}
        return made

    @classmethod
    def from_dict(cls, value: Any, where: str = "manifest") -> Self:
        """Return the manifest in decoded JSON, which may be hostile; `Damaged` names the field."""
        images = value.get("images") if isinstance(value, dict) else None
        if not isinstance(images, dict) or set(images) != {"files", "data"}:
            raise damaged(f"{where}.images", "has not the parts files and data")
        if "image_data" in value:
            raise damaged(f"{where}.image_data", "is not allowed")
        flat = {**value, "images": images["files"], "image_data": images["data"]}
        return super().from_dict(flat, where)

    def check(self, where: str) -> None:
        check_pattern(ID, self.id, f"{where}.id")
        if self.parent is not None:
            check_pattern(ID, self.parent, f"{where}.parent")
        check_pattern(_CREATED, self.created, f"{where}.created")
        check_pattern(DIGEST, self.inodes_mac, f"{where}.inodes_mac")
        check_range(self.number, 0, 10**19, f"{where}.number")
        check_range(self.incarnation, 0, 1 << 62, f"{where}.incarnation")
        if sum(image.size for image in self.images) != self.image_data.size:
            raise damaged(f"{where}.images", "do not add up to their data")
        for kind, names in (
            ("images", [i.name for i in self.images]),
            ("memory", [f"{m.kind} {m.id}" for m in self.memory]),
        ):
            if len(set(names)) != len(names):
                raise damaged(f"{where}.{kind}", "names something twice")

    def with_gpu(self, record: GpuRecord | None, timings: dict[str, float]) -> Manifest:
        """This manifest with what a restore must know of GPUs, and the feature that it requires
        then.
        """
        if record is None:
            return self
        return replace(
            self, gpu=record, features=(*self.features, GPU), timings=self.timings | timings
        )

    def streams(self) -> list[StreamRef]:
        """Return every stream that a restore may read, each once."""
        found = [self.image_data]
        for image in self.memory:
            found += [image.entries, image.data]
        found += [f.data for f in self.files if f.data is not None]
        found += [link.data for link in self.links]
        if self.workspace is not None:
            found += [self.workspace.index, self.workspace.data]
        found += [
            stream for t in self.terminals for stream in (t.input, t.printed) if stream is not None
        ]
        if self.holder is not None:
            of_holder = (self.holder.scrollback, self.holder.steps)
            found += [stream for stream in of_holder if stream is not None]
        return found
