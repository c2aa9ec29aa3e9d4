"""The files of a tree, as they are while it is frozen.

CRIU saves descriptors, not the files behind them, and on restore refuses a file whose size has
changed: the most reported failure of checkpointing.  So every regular file that the tree has open
or mapped is recorded, under each name that it uses:

- ``written``: open, or mapped shared, for writing: size and hash of its contents, and the contents
  too when the policy (`Config.files` = carry) says so, it is memory of the tree (`sharedmaps`), or
  it is small (`mark_small`);
- ``read``: open for reading only: its identity (size, time, inode), and the hash of a small one;
  the contents, too, of small scripts and of data that is mapped (`identity`);
- ``mapped``: executables and libraries: identity; CRIU compares build-ids itself; with
  ``--carry-binaries`` contents and hash too, for `criuctl.files.carried_binaries`; and mapped data
  that is too large to travel;
- ``carried``: named by ``--with-files``: everything, folders with all that is below them.

Contents are read through ``/proc/PID/fd`` and ``/proc/PID/map_files``, which lead to the very
files, and what is to be carried through ``/proc/PID/root``, so that paths mean what they mean to
the tree.  What to do with the records on restore is decided in `criuctl.files.judgement`.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO

from msgspec import Struct, field

from ..checkpoint.chunks import FILE_PIECE, StreamRef
from ..checkpoint.manifest import FileRecord
from ..checkpoint.records import MAX_INT
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..errors import DumpFailed, NoSuchProcess, PreflightRefused, UsageError
from ..namespaces.plan import saved_devices
from ..proc import folder_walk
from ..proc.descriptors import Descriptor, descriptors
from ..proc.mappings import Mapping as MappedRange
from ..proc.syscalls import pidfd_getfd
from ..proc.tree import mappings, read_tree
from ..report import Reporter
from . import databases, mount_points
from .carried_binaries import Binaries
from .read_only_files import HASH_LIMIT, mark_read
from .shared_mappings import behind, in_memory, travels, writes

_PIECE = 1 << 20
_KERNELS = ("/proc/", "/sys/")
_PATH_MAX = 4096  # bytes, with the NUL at the end
_LINK_HINT = "See what the link is for; what it leads to can be named itself."


def digest(fd: int, length: int) -> str:
    """BLAKE3 (hex) of the first `length` bytes of an open file; "" when it is shorter."""
    from blake3 import blake3

    hasher = blake3()
    buffer = bytearray(min(_PIECE, max(length, 1)))
    view = memoryview(buffer)
    position = 0
    while position < length:
        count = os.preadv(fd, [view[: min(len(view), length - position)]], position)
        if count == 0:
            return ""
        hasher.update(view[:count])
        position += count
    return hasher.hexdigest()


class _Open(Struct):
    """One file of the tree, gathered over all its descriptors and mappings."""

    path: str
    source: str  # a name under /proc through which it can be opened
    kind: str = "read"
    append: bool = True  # every writer appends
    holders: list[tuple[int, int]] = field(default_factory=list)
    mapped: bool = False
    executable: bool = False  # mapped as code
    shared: bool = False  # mapped so that the tree writes to it
    live: bool = False  # mapped shared: the tree sees what others write to it
    small: bool = False  # travels because it is small
    hashed: bool = False  # only read, and known by its contents
    role: str = ""  # of one that is only read: see `identity`
    # process and descriptor with a write lease (F_SETLEASE) on it
    leased: tuple[int, int] | None = None
    # further names, hard links, under which it is open or mapped
    others: dict[str, None] = field(default_factory=dict)

    def use(self, pid: int, d: Descriptor) -> None:
        """One more descriptor of it."""
        self.holders.append((pid, d.fd))
        if d.leased:
            self.leased = (pid, d.fd)
        if d.writable:
            self.kind = "written"
            self.source = f"/proc/{pid}/fd/{d.fd}"
            self.append = self.append and bool(d.flags & os.O_APPEND)

    def also(self, path: str) -> None:
        """One more name of it, perhaps."""
        if path != self.path:
            self.others[path] = None


def open_files(
    opened: Mapping[int, Sequence[Descriptor]],
    mapped: Mapping[int, Sequence[MappedRange]] | None = None,
) -> dict[tuple[int, int], _Open]:
    """(device, inode) -> every regular file with a name that the processes in `opened` have open or
    mapped.

    `mapped`: what they have mapped, if that is known.
    """
    found: dict[tuple[int, int], _Open] = {}
    # device and inode of a mapping -> those of the file
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    devices: set[tuple[int, int]] = set()  # of mappings of devices
    deleted: list[tuple[int, Descriptor]] = []  # under a name that is gone; perhaps it has others
    for pid, held in opened.items():
        for d in held:
            if (
                d.kind != "file"
                or not d.target.startswith("/")
                or d.target.startswith(("/proc/", "/sys/"))
            ):
                continue
            if d.deleted:
                deleted.append((pid, d))
                continue
            entry = found.setdefault((d.device, d.inode), _Open(d.target, f"/proc/{pid}/fd/{d.fd}"))
            entry.use(pid, d)
            entry.also(d.target)
        for m in mappings(pid) if mapped is None else mapped.get(pid, ()):
            if not m.inode or m.deleted or not m.path.startswith("/"):
                continue
            key = (m.device, m.inode)
            if key in devices:
                continue
            if key not in seen:
                source = behind(pid, m)
                if not _is_regular(source):
                    devices.add(key)
                    continue
                seen[key] = _key(source, key)
                found.setdefault(seen[key], _Open(m.path, source, kind="mapped"))
            entry = found[seen[key]]
            # maps tells a newline as \\012
            if m.path != entry.path and _key(f"/proc/{pid}/root{m.path}", (0, 0)) == seen[key]:
                entry.also(m.path)
            entry.mapped = True
            entry.executable = entry.executable or "x" in m.perms
            entry.live = entry.live or m.shared
            if writes(pid, m):
                entry.kind, entry.append, entry.shared = "written", False, True
    for pid, d in deleted:
        if (d.device, d.inode) in found:
            found[d.device, d.inode].use(pid, d)
    return found


def _key(source: str, otherwise: tuple[int, int]) -> tuple[int, int]:
    """What ``stat`` says of a mapped file: on overlays and btrfs maps tells another device than
    descriptors do.
    """
    try:
        status = os.stat(source)
    except OSError:
        return otherwise
    return (status.st_dev, status.st_ino)


def _is_regular(source: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(source).st_mode)
    except OSError:  # as far as anybody can tell
        return True


def collect(
    writer: CheckpointWriter,
    config: Config,
    opened: Mapping[int, Sequence[Descriptor]],
    with_files: Sequence[str],
    binaries: Binaries,
    root_pid: int,
    reporter: Reporter,
) -> list[FileRecord]:
    """Record (and where wanted store) the files of a frozen tree; not those that CRIU saves, with
    all of their file system.
    """
    records: list[FileRecord] = []
    carried: dict[tuple[int, int], int] = {}  # by device and inode: its first record
    taken: set[str] = set()
    found_open = open_files(opened)
    leased = {key: entry.leased for key, entry in found_open.items() if entry.leased is not None}
    for wanted in with_files:
        try:
            for record, identity in _carry(writer, wanted, root_pid, leased, taken, reporter):
                carried.setdefault(identity, len(records))
                records.append(record)
        except PreflightRefused as error:  # somebody has put a link there since
            raise DumpFailed(error.message, hint=error.hint) from error
    saved = saved_devices(root_pid)
    left = [e for key, e in found_open.items() if key[0] not in saved and key not in carried]
    mark_small(config, left)
    mark_read(config, left, _open_contents)
    for (device, inode), entry in found_open.items():
        if device in saved:
            continue
        if (device, inode) in carried:
            number = carried[device, inode]
            found = records[number] = records[number].with_use(
                holders=tuple(entry.holders), append=entry.append
            )
            names = (
                []
                if entry.kind == "mapped"
                else [name for name in (entry.path, *entry.others) if name not in taken]
            )
        elif (noted := _record(writer, config, entry, binaries, reporter)) is not None:
            found, names = noted, list(entry.others)
            records.append(found)
        else:
            continue
        # CRIU opens it by each of its names, and at the restore they may be different files, or
        # gone.
        records += [found.with_use(path=name) for name in names]
    records = databases.named(root_pid, records)
    records += _closed_files(root_pid, records, taken)
    return mount_points.named(root_pid, records)


def _closed_files(
    root_pid: int, records: Iterable[FileRecord], taken: Container[str]
) -> Iterator[FileRecord]:
    """What tells that a database was changed, and that its server does not keep open."""
    known = {record.path for record in records}
    for database in sorted({record.database for record in records if record.database}):
        for path in databases.control_files(database):
            if path in known or path in taken:
                continue
            with suppress(PreflightRefused, OSError):
                for _path, fd in walk(path, root_pid):
                    if (
                        fd is not None
                        and stat.S_ISREG((status := os.fstat(fd)).st_mode)
                        and status.st_size <= HASH_LIMIT
                    ):
                        file = os.open(
                            f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                        )
                        try:
                            hashed = digest(file, status.st_size)
                        finally:
                            os.close(file)
                        yield _base(path, "read", status).with_use(digest=hashed, database=database)


def mark_small(config: Config, entries: Iterable[_Open]) -> None:
    """Mark those files that travel because they are small, up to `Config.files_small_mib` in all.

    Programs remove their PID and lock files when they end, and what the JVM tells of itself:
    without the contents, no restore after that is possible.
    """
    left = config.files_small_mib << 20
    if not left:
        return
    sizes: list[tuple[int, str, _Open]] = []
    for entry in entries:
        if entry.kind == "written":
            with suppress(OSError):
                sizes.append((os.stat(entry.source).st_size, entry.path, entry))
    for size, _path, entry in sorted(sizes, key=lambda found: found[:2]):
        left -= size
        if left < 0:
            break
        entry.small = True


def store_ahead(writer: CheckpointWriter, root: int, binaries: Binaries) -> None:
    """Store the programs and libraries that travel while the tree still runs: frozen, they are only
    looked at again.
    """
    if not binaries.any:
        return
    # one that has ended meanwhile: then all is stored later
    with suppress(NoSuchProcess, PreflightRefused):
        opened = {
            process.pid: descriptors(process.pid)
            for process in read_tree(root)
            if not process.zombie
        }
        for entry in open_files(opened).values():
            if not entry.mapped or entry.kind == "written" or entry.leased is not None:
                continue
            with suppress(OSError), open(entry.source, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if binaries.travels(entry.path, size, executable=entry.executable):
                    _send_ahead(writer, file)


def _send_ahead(writer: CheckpointWriter, file: FileIO) -> None:
    fill = 1
    while fill:
        buffer = writer.acquire()
        try:
            fill = file.readinto(buffer.view)
            for start in range(0, fill, FILE_PIECE):
                writer.ahead(buffer, start, min(start + FILE_PIECE, fill))
        finally:
            writer.release(buffer)


def _record(
    writer: CheckpointWriter, config: Config, entry: _Open, binaries: Binaries, reporter: Reporter
) -> FileRecord | None:
    try:
        fd = _open_contents(entry.source, entry.leased, os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if entry.kind == "written":
            reporter.warning(f"{entry.path}: its contents could not be recorded: {error.strerror}")
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        hashed, data, size, attributes = "", None, status.st_size, dict[str, str]()
        if entry.kind == "written":
            memory = entry.shared and in_memory(fd) and travels(config, size)
            if (
                memory
                or entry.small
                or (config.files == "carry" and size <= config.files_max_mib << 20)
            ):
                hashed, data, size = _store(writer, entry.path, fd, size, reporter)
            else:
                hashed = digest(fd, status.st_size)
        elif entry.mapped and binaries.travels(
            entry.path, status.st_size, executable=entry.executable
        ):
            entry.kind = "mapped"  # perhaps open, too
            attributes = _xattrs(fd)
            hashed, data, size = _store(writer, entry.path, fd, size, reporter)
        elif entry.small:
            # perhaps only mapped; contents of that kind are for programs and libraries
            entry.kind = "read"
            hashed, data, size = _store(writer, entry.path, fd, size, reporter)
        elif entry.hashed:
            hashed = digest(fd, size)
        return _base(entry.path, entry.kind, status).with_use(
            holders=tuple(entry.holders),
            append=entry.append and entry.kind == "written",
            digest=hashed,
            data=data,
            size=size,
            xattrs=attributes,
            role=entry.role,
        )
    finally:
        os.close(fd)


def _open_contents(path: str, leased: tuple[int, int] | None, flags: int) -> int:
    """A descriptor from which a file can be read.

    To open a file breaks the write lease that somebody has on it: the kernel sends the program a
    signal, which ends one that expects none.  So the program's own descriptor is borrowed; EACCES
    where that is for writing only.
    """
    if leased is None:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    pid, fd = leased
    pidfd = os.pidfd_open(pid)
    try:
        borrowed = pidfd_getfd(pidfd, fd)
    finally:
        os.close(pidfd)
    if fcntl.fcntl(borrowed, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        os.close(borrowed)
        raise OSError(errno.EACCES, f"PID {pid} has a lease on it, which reading would break")
    return borrowed


def _store(
    writer: CheckpointWriter, path: str, fd: int, size: int, reporter: Reporter
) -> tuple[str, StreamRef, int]:
    """Put the contents into the checkpoint: (hash, stream, size), which is less if somebody has
    made it shorter meanwhile.
    """
    taken = writer.add_file(("file", path), fd, size)
    if taken.changed:
        reporter.warning(f"{path} was written to by a process outside the tree while it was read")
    return taken.digest, writer.stream(("file", path)), taken.size


def _base(path: str, kind: str, status: os.stat_result) -> FileRecord:
    return FileRecord(
        path=path,
        kind=kind,
        size=status.st_size,
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        # some file systems know years before 1386 and after 2554
        mtime_ns=max(-MAX_INT, min(status.st_mtime_ns, MAX_INT)),
        inode=status.st_ino,
        device=status.st_dev,
    )


def _xattrs(file: str | int) -> dict[str, str]:
    """Those of an open file, or of what a link of /proc leads to, which may be a symbolic link
    itself.
    """
    try:
        return {n: base64.b64encode(os.getxattr(file, n)).decode() for n in os.listxattr(file)}
    except OSError:
        return {}  # a file system without extended attributes


def resolve_carried(paths: Iterable[str], root_pid: int) -> list[str]:
    """The absolute paths of what ``--with-files`` names, as the tree has it, checked to exist.

    Links on the way are resolved: by its own path the tree has a file open, and it is put back.
    What is a link itself is taken along with what it leads to.
    """
    found: list[str] = []
    for path in paths:
        if not path:  # a variable that is not set, say: it would be the working folder
            raise UsageError("'' is no path of a file or folder to take along")
        # with its "..", which mean something else behind a link
        absolute = os.path.join(os.getcwd(), path)
        try:
            places = _places(absolute, root_pid)
        except folder_walk.ForeignLink as error:
            raise PreflightRefused(
                f"{path} is not taken along: {error.strerror}", hint=_LINK_HINT
            ) from error
        except OSError:  # on the way there
            places = []
        if not places:
            text = (
                f"{os.path.normpath(absolute)} is not taken along: there is no such file or "
                f"folder for PID {root_pid}"
            )
            raise PreflightRefused(text, hint="--with-files names files of the tree.")
        for place in places:
            if place.startswith(_KERNELS):
                text = (
                    f"{place} is not taken along: it is the kernel's, and different each time "
                    "that it is read"
                )
                raise PreflightRefused(text, hint="--with-files names files of the tree.")
        found += (place for place in places if place not in found)
    return found


def _places(path: str, root_pid: int) -> list[str]:
    view = os.open(f"/proc/{root_pid}/root", os.O_PATH | os.O_CLOEXEC)
    try:
        return list(folder_walk.trail(path, view))
    finally:
        os.close(view)


def _carry(
    writer: CheckpointWriter,
    wanted: str,
    root_pid: int,
    leased: Mapping[tuple[int, int], tuple[int, int]],
    taken: set[str],
    reporter: Reporter,
) -> Iterator[tuple[FileRecord, tuple[int, int]]]:
    """The records of a file, or of a folder and everything below it on the same file system; each
    path once, see `taken`.
    """
    for path, fd in walk(wanted, root_pid):
        if fd is None:  # the program removed it before it was frozen, or somebody outside the tree
            reporter.warning(f"{path} is gone since the dump began: left out")
            continue
        # named twice, or below a folder that is named; a mount point is followed only under its own
        # name
        if path in taken:
            continue
        taken.add(path)
        if len(os.fsencode(path)) >= _PATH_MAX:
            reporter.warning(f"{path[:100]}... is too long for a path: left out")
            continue
        status, itself = os.fstat(fd), f"/proc/self/fd/{fd}"
        identity = (status.st_dev, status.st_ino)
        record = _base(path, "carried", status).with_use(xattrs=_xattrs(itself))
        if stat.S_ISLNK(status.st_mode):
            record = record.with_use(target=os.readlink("", dir_fd=fd))
        elif stat.S_ISREG(status.st_mode):
            try:
                contents = _open_contents(itself, leased.get(identity), os.O_NONBLOCK | os.O_NOCTTY)
            except OSError as error:
                raise DumpFailed(
                    f"{path} cannot be taken along: {error.strerror}; the tree runs on"
                ) from error
            try:
                hashed, data, size = _store(writer, path, contents, status.st_size, reporter)
                record = record.with_use(digest=hashed, data=data, size=size)
            finally:
                os.close(contents)
        elif not (stat.S_ISFIFO(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            reporter.warning(f"{path} is a socket or a device: left out")
            continue
        yield record, identity


def walk(wanted: str, root_pid: int) -> Iterator[tuple[str, int | None]]:
    """What the tree has at a path, and all below it on the same file system: each path, with a
    descriptor (``O_PATH``) of it.

    The descriptor is good until the next is asked for; None if nothing is at `wanted`.  Where other
    users may write they can move things about meanwhile, but no link of theirs leads elsewhere:
    `PreflightRefused`, and below `wanted` none is followed.
    """
    base, name = os.path.split(wanted)
    with ExitStack() as stack:
        view = os.open(f"/proc/{root_pid}/root", os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, view)
        try:
            above = stack.enter_context(folder_walk.folder(base, view))
        except (FileNotFoundError, NotADirectoryError):
            yield wanted, None
            return
        except folder_walk.ForeignLink as error:
            raise PreflightRefused(
                f"{wanted} is not taken along: {error.strerror}", hint=_LINK_HINT
            ) from error
        device: int | None = None
        # the way to a folder, names in it
        pending: list[tuple[tuple[str, ...], list[str]]] = [((), [name or "."])]
        while pending:
            way, names = pending.pop()
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                folder_walk.place(way, above) as folder,
            ):
                for name in names:
                    path = os.path.normpath(os.path.join(base, *way, name))
                    try:
                        fd = os.open(name, folder_walk.PLACE, dir_fd=folder)
                    except (FileNotFoundError, NotADirectoryError):
                        if device is None:
                            yield path, None
                        continue
                    try:
                        status = os.fstat(fd)
                        device = status.st_dev if device is None else device
                        if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                            pending.append(
                                ((*way, name), sorted(os.listdir(f"/proc/self/fd/{fd}")))
                            )
                        yield path, fd
                    finally:
                        os.close(fd)
