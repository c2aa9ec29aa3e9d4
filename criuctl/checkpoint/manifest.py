"""What a checkpoint is: the manifest and the records in it.

A manifest names everything that a restore needs, and everything that `show` displays. It is written
once, last, by one atomic put, and never changed. Its JSON is described by
``images/manifest.schema.json``. The records are plain data: `criuctl.dump` makes them and
`criuctl.restore` uses them.

Manifests are untrusted input. `Manifest.from_dict` checks types, ranges, names and paths, so that
no name in one can lead a restore outside the folder that it writes to. The paths of files to put
back are absolute by nature: they are checked to be plain here, and checked again where they are
used.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal, Self

from msgspec import field
from msgspec.structs import replace

from .chunks import StreamRef
from .records import (
    Record,
    check_owner_and_mode,
    check_path,
    check_pattern,
    check_range,
    check_text_of_kernel,
    damaged,
)

MANIFEST_VERSION = 1

_ID = re.compile(r"[0-9a-f]{32}")
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_IMAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z")
_HANDLE = re.compile(r"(?:-?\d{1,10}:(?:[0-9a-f]{2}){1,128})?")
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")
_MAX_REASON = 500  # characters
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_MAX_PAGES = 1 << 40
_GPU = re.compile(r"GPU-[0-9a-f-]{1,64}")
_GPU_NODE = re.compile(r"/dev/nvidia[A-Za-z0-9/_-]{0,64}")

GPU = "nvidia-gpu"  # the feature of a manifest that has a `GpuRecord`

PredicateKind = Literal["file", "command", "output", "age"]


def now() -> str:
    """Return the present time as manifests write it (RFC 3339, UTC, milliseconds)."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SessionRef(Record, frozen=True):
    """The session of a checkpoint: its name, and the id that survives a rename."""

    name: str
    id: str

    def check(self, where: str) -> None:
        check_pattern(_SESSION, self.name, f"{where}.name")
        check_pattern(_ID, self.id, f"{where}.id")


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


class FileRecord(Record, frozen=True):
    """A file of the tree as it was at the freeze; with `data` the checkpoint holds its contents."""

    path: str
    kind: str  # written | read | mapped | carried
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    inode: int = 0
    device: int = 0
    digest: str = ""  # BLAKE3 of the contents, hex; "" when not taken
    data: StreamRef | None = None
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor)
    append: bool = False  # every writer opened it with O_APPEND
    xattrs: dict[str, str] = field(default_factory=dict)  # name -> base64
    target: str = ""  # of a symbolic link
    # of a file that is only read: script (an interpreter reads it) | data (mapped, but not as code)
    role: str = ""
    # the data folder of the server, or the main file of the SQLite database, that it belongs to
    database: str = ""
    mount: str = ""  # the mount point of its file system; "" for "/" and for file systems in memory

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")
        for name, path in (("database", self.database), ("mount", self.mount)):
            if path:
                check_path(path, f"{where}.{name}")
        check_range(self.size, 0, (1 << 63) - 1, f"{where}.size")
        check_owner_and_mode(self.uid, self.gid, self.mode, where)
        check_text_of_kernel(self.target, f"{where}.target")
        for name, value in self.xattrs.items():
            check_text_of_kernel(name, f"{where}.xattrs")
            check_pattern(_BASE64, value, f"{where}.xattrs")
        if self.data is not None and self.data.size > self.size:
            raise damaged(f"{where}.data", "is longer than the file")


class LinkRecord(Record, frozen=True):
    """A helper link that CRIU made for a deleted name of a file that has (or had) other names."""

    path: str
    data: StreamRef
    sibling: str = ""  # another name of the same file; "" for none
    inode: int = 0
    device: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    digest: str = ""  # BLAKE3 of `data`, hex; "" when not taken
    # the kernel's file handle, which finds the file under any name: its kind, ":", hex; "" where
    # its file system has none
    handle: str = ""

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")
        check_pattern(_DIGEST, self.digest, f"{where}.digest")
        check_pattern(_HANDLE, self.handle, f"{where}.handle")
        check_owner_and_mode(self.uid, self.gid, self.mode, where)
        if self.sibling:
            check_path(self.sibling, f"{where}.sibling")


class FifoRecord(Record, frozen=True):
    """A named pipe that holds data which the tree had not read, and the outside processes that had
    it open at the freeze.
    """

    path: str
    inode: int = 0
    device: int = 0
    # (PID, start time) of each process, as criuctl saw it
    outside: tuple[tuple[int, int], ...] = ()

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")


class InodeRecord(Record, frozen=True):
    """The inode at a path that users other than root can change, or the folder of such a socket or
    deleted file.
    """

    path: str
    device: int = 0
    inode: int = 0
    uid: int = 0
    # birth time in nanoseconds of unix time; 0 where the file system does not record it
    born: int = 0
    # as in `LinkRecord`: it includes the generation, so no later inode has the same handle
    handle: str = ""

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")
        check_pattern(_HANDLE, self.handle, f"{where}.handle")


class ExternalFile(Record, frozen=True):
    """A file that CRIU could not reach by path. The restore opens it for CRIU."""

    key: str  # CRIU's name of the resource
    kind: str  # file | dir | device
    path: str
    flags: int = 0  # as of open(2)

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")


class TerminalRecord(Record, frozen=True):
    """A terminal of the tree and the data that its line discipline held. PIDs and process groups
    are numbers of the tree's PID namespace.
    """

    path: str  # "" if the tree had no descriptor of it open
    rdev: int = 0
    dev: int = 0
    master: Literal["outside", "inside", "gone"] = "inside"  # gone: the master was closed
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor), those of /dev/tty included
    leader: int = 0  # the session leader in the tree that it controls; 0 for none
    led_outside: bool = False  # it controls the root, but the session leader is outside the tree
    foreground: int = 0  # its foreground process group, if that is in the tree
    rows: int = 0
    columns: int = 0
    xpixel: int = 0
    ypixel: int = 0
    canonical: bool = True
    echo: bool = True
    stopped: bool = False  # output was stopped (^S)
    # bytes of `input` that the line discipline had processed; the rest waited in its buffer
    queued: int = 0
    input: StreamRef | None = None  # typed and not yet read: as secret as memory
    master_holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor) of a master inside
    printed: StreamRef | None = None  # data that such a master had not read yet
    # no process has the slave open any more: a read from the master returns EIO
    slave_gone: bool = False

    def check(self, where: str) -> None:
        if self.path:
            check_path(self.path, f"{where}.path")
        for name in ("rdev", "dev", "queued"):
            check_range(getattr(self, name), 0, (1 << 63) - 1, f"{where}.{name}")
        for name in ("rows", "columns", "xpixel", "ypixel"):
            check_range(getattr(self, name), 0, (1 << 16) - 1, f"{where}.{name}")
        for name in ("leader", "foreground"):
            check_range(getattr(self, name), 0, 1 << 31, f"{where}.{name}")
        if self.queued > (self.input.size if self.input is not None else 0):
            raise damaged(f"{where}.queued", "is more than there is")
        if (self.printed is not None or self.slave_gone) and not self.master_holders:
            raise damaged(f"{where}.master_holders", "is empty")


class HolderRecord(Record, frozen=True):
    """The state that a session's holder handed over: all that its successor needs to continue."""

    # the tree had its own PID and mount namespaces, which end with its root
    private: bool = False
    created: float = 0.0  # unix seconds
    command: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    workspace: str = ""  # the folder that is moved together with the session, if it has one
    rows: int = 24
    columns: int = 80
    base: int = 0  # offset of the first byte in `scrollback`
    input_offset: int = 0  # offset of the output at which something was last typed
    scrollback: StreamRef | None = None
    # the journal of its steps, one JSON object a line; None if it has none
    steps: StreamRef | None = None
    # of the terminal, as the holder protocol writes them
    modes: dict[str, Any] = field(default_factory=dict)
    shell: dict[str, Any] = field(default_factory=dict)  # what its shell's marks have said
    # what its programs have asked for: checkpoints that wait, conditions, functions to call
    inside: dict[str, Any] = field(default_factory=dict)
    roles: tuple[tuple[str, ...], ...] = ()  # (kind, name, role): the highest role of each operator
    events: int = 0  # sequence of the last event
    audit: int = 0  # sequence of the last entry in the audit log
    # the operator that paused it, whether it was halted, and the PIDs in the tree that were stopped
    paused: dict[str, Any] | None = None

    def check(self, where: str) -> None:
        for name in ("base", "input_offset", "events", "audit"):
            check_range(getattr(self, name), 0, 1 << 62, f"{where}.{name}")
        for name in ("rows", "columns"):
            check_range(getattr(self, name), 0, (1 << 16) - 1, f"{where}.{name}")


UNCONNECTED = "unconnected"


class ConnectionRecord(Record, frozen=True):
    """A connected, listening or bound socket of the tree, and the policy that applies to it.

    An ``unconnected`` socket that no peer can reach is recorded for its options alone.
    """

    pid: int
    fd: int
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor) of every process that shares it
    family: str = ""
    type: str = ""
    protocol: str = ""
    state: str = ""
    inode: int = 0
    local: str = ""
    peer: str = ""
    external: bool = False  # its other end is outside the tree
    direction: str = ""
    rqueue: int = 0
    wqueue: int = 0
    policy: str = ""
    # socket options that differ from a new socket's
    options: dict[str, Any] = field(default_factory=dict)
    tcp: dict[str, Any] = field(default_factory=dict)  # details of TCP_INFO
    host: str = ""  # the name under which a rule knows the peer
    # unix and loopback: "PID (command)" of the process at the other end, if it is local
    peer_process: str = ""
    # application protocol: postgresql, redis, journal, tcp, or the name of a hook
    application: str = ""
    # the session state that the peer holds for this connection, as that protocol reports it
    session: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why the policy differs from the requested one
    ended: bool = False  # the dump ended it along with the tree, so it can only be made again
    # a TCP connection within the tree that its server has not accepted yet: no descriptor of that
    # end exists
    queued: bool = False

    @property
    def datagrams(self) -> bool:
        """Whether it sends packets one by one: nothing of it lives in another kernel."""
        return self.type in ("dgram", "raw")

    @property
    def waits(self) -> bool:
        """Whether it has no other end, but takes connections, or datagrams, from any peer, or may
        yet.
        """
        return self.state in ("listen", "bound", UNCONNECTED)


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
        check_pattern(_DIGEST, self.digest, f"{where}.digest")
        check_pattern(_DIGEST, self.mac, f"{where}.mac")
        check_range(self.size, 0, (1 << 63) - 1, f"{where}.size")
        if self.kind == "file":
            check_path(self.argument, f"{where}.argument")
        if len(self.unmet) > _MAX_REASON:
            raise damaged(f"{where}.unmet", "is too long")
        if not 0 < len(self.argument) <= 4096 or "\0" in self.argument:
            raise damaged(f"{where}.argument", "is not one")


class GpuDevice(Record, frozen=True):
    """A GPU that the host of the dump had."""

    uuid: str
    name: str
    memory: int  # bytes
    capability: str  # compute capability: "9.0"

    def check(self, where: str) -> None:
        check_pattern(_GPU, self.uuid, f"{where}.uuid")
        check_range(self.memory, 0, 1 << 60, f"{where}.memory")


class GpuProcess(Record, frozen=True):
    """A process whose device memory the driver has moved into its ordinary memory; its own
    numbers.
    """

    pid: int
    thread: int  # which gives the device back
    memory: int = 0  # bytes on the device; 0 if unknown

    def check(self, where: str) -> None:
        for name in ("pid", "thread"):
            check_range(getattr(self, name), 1, 1 << 31, f"{where}.{name}")
        check_range(self.memory, 0, 1 << 60, f"{where}.memory")


class GpuDescriptor(Record, frozen=True):
    """A device that a process has open without using it: opened again by path after the restore."""

    pid: int  # its own number
    fd: int
    path: str
    flags: int = 0  # as of open(2)
    cloexec: bool = False

    def check(self, where: str) -> None:
        check_range(self.pid, 1, 1 << 31, f"{where}.pid")
        check_range(self.fd, 0, 1 << 31, f"{where}.fd")
        check_pattern(_GPU_NODE, self.path, f"{where}.path")


class GpuRecord(Record, frozen=True):
    """What a restore must know of the tree's GPUs; a manifest that has it requires the feature
    `GPU`.
    """

    driver: str  # version of NVIDIA's driver: "580.159.04"
    api: int  # version of its interface: 13000
    devices: tuple[GpuDevice, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    opened: tuple[GpuDescriptor, ...] = ()


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
        check_pattern(_ID, self.id, f"{where}.id")
        if self.parent is not None:
            check_pattern(_ID, self.parent, f"{where}.parent")
        check_pattern(_CREATED, self.created, f"{where}.created")
        check_pattern(_DIGEST, self.inodes_mac, f"{where}.inodes_mac")
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
        found += [
            stream for t in self.terminals for stream in (t.input, t.printed) if stream is not None
        ]
        if self.holder is not None:
            of_holder = (self.holder.scrollback, self.holder.steps)
            found += [stream for stream in of_holder if stream is not None]
        return found


class CheckpointSummary(Record, frozen=True):
    """What a list shows of a checkpoint; `object` is the name of its manifest in the store."""

    id: str
    session: str
    session_id: str
    number: int
    incarnation: int
    created: str
    host: str
    bytes: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    processes: int = 0
    object: str = ""

    def check(self, where: str) -> None:
        check_pattern(_ID, self.id, f"{where}.id")
        check_pattern(_SESSION, self.session, f"{where}.session")

    @classmethod
    def of(cls, manifest: Manifest, object: str) -> CheckpointSummary:
        """Return the summary of `manifest`, stored as `object`."""
        return cls(
            id=manifest.id,
            session=manifest.session.name,
            session_id=manifest.session.id,
            number=manifest.number,
            incarnation=manifest.incarnation,
            created=manifest.created,
            host=manifest.host.name,
            bytes=dict(manifest.bytes),
            labels=dict(manifest.labels),
            pinned=manifest.pinned,
            processes=len(manifest.processes),
            object=object,
        )

    def to_stored(self) -> dict[str, Any]:
        """Return all fields, as kept in the store."""
        return Record.to_dict(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the command line's contract."""
        kept = (
            "id",
            "session",
            "number",
            "incarnation",
            "created",
            "host",
            "bytes",
            "labels",
            "pinned",
        )
        return {key: getattr(self, key) for key in kept}
