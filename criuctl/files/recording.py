"""Record the files of a tree, as they are while it is frozen.

CRIU saves descriptors, not the files behind them, and on restore refuses a file whose size has
changed: the most reported failure of checkpointing.  So every regular file that the tree has open
or mapped is recorded, under each name that it uses:

- ``written``: open, or mapped shared, for writing: size and hash of its contents, and the contents
  too when the policy (`Config.files` = carry) says so, it is memory of the tree
  (`shared_mappings`), or it is small (`mark_small`);
- ``read``: open for reading only: its identity (size, time, inode), and the hash of a small one;
  the contents, too, of small scripts and of data that is mapped (`read_only_files`);
- ``mapped``: executables and libraries: identity; CRIU compares build-ids itself; with
  ``--carry-binaries`` contents and hash too, for `criuctl.files.carried_binaries`; and mapped data
  that is too large to travel;
- ``carried``: named by ``--with-files``: everything, folders with all that is below them.

Contents are read through ``/proc/PID/fd`` and ``/proc/PID/map_files``, which lead to the very
files, and what is to be carried through ``/proc/PID/root``, so that paths mean what they mean to
the tree.  What to do with the records on restore is decided in `criuctl.files.judgement`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO

from ..checkpoint.chunks import FILE_PIECE
from ..checkpoint.file_records import FileRecord
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..errors import DumpFailed, NoSuchProcess, PreflightRefused
from ..namespaces.plan import saved_devices
from ..proc.descriptors import Descriptor, descriptors
from ..proc.tree import read_tree
from ..report import Reporter
from . import databases, mount_points
from .carried_binaries import Binaries
from .carried_files import carry, walk
from .contents import base_record, digest, extended_attributes, open_contents, store_contents
from .read_only_files import HASH_LIMIT, mark_read
from .shared_mappings import in_memory, travels
from .used_files import OpenFile, open_files


def collect(
    writer: CheckpointWriter,
    config: Config,
    opened: Mapping[int, Sequence[Descriptor]],
    with_files: Sequence[str],
    binaries: Binaries,
    root_pid: int,
    reporter: Reporter,
) -> list[FileRecord]:
    """Record (and, if configured, store) the files of a frozen tree; not those on file systems that
    CRIU saves.
    """
    records: list[FileRecord] = []
    carried: dict[tuple[int, int], int] = {}  # by device and inode: its first record
    taken: set[str] = set()
    found_open = open_files(opened)
    leased = {key: entry.leased for key, entry in found_open.items() if entry.leased is not None}
    for wanted in with_files:
        try:
            for record, identity in carry(writer, wanted, root_pid, leased, taken, reporter):
                carried.setdefault(identity, len(records))
                records.append(record)
        except PreflightRefused as error:  # a link was put there since
            raise DumpFailed(error.message, hint=error.hint) from error
    saved = saved_devices(root_pid)
    left = [e for key, e in found_open.items() if key[0] not in saved and key not in carried]
    mark_small(config, left)
    mark_read(config, left, open_contents)
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
    """Yield files that show whether a database was changed, and that its server does not keep
    open.
    """
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
                        yield base_record(path, "read", status).with_use(
                            digest=hashed, database=database
                        )


def mark_small(config: Config, entries: Iterable[OpenFile]) -> None:
    """Mark those files that travel because they are small, up to `Config.files_small_mib` in all.

    Programs remove their PID and lock files, or the JVM its performance data, when they end:
    without the contents, no restore after that is possible.
    """
    left = config.files_small_mib << 20
    if not left:
        return
    sizes: list[tuple[int, str, OpenFile]] = []
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
    compared.
    """
    if not binaries.any:
        return
    # a process that has ended meanwhile: then all is stored later
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
    writer: CheckpointWriter,
    config: Config,
    entry: OpenFile,
    binaries: Binaries,
    reporter: Reporter,
) -> FileRecord | None:
    try:
        fd = open_contents(entry.source, entry.leased, os.O_NONBLOCK | os.O_NOCTTY)
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
                hashed, data, size = store_contents(writer, entry.path, fd, size, reporter)
            else:
                hashed = digest(fd, status.st_size)
        elif entry.mapped and binaries.travels(
            entry.path, status.st_size, executable=entry.executable
        ):
            entry.kind = "mapped"  # perhaps open, too
            attributes = extended_attributes(fd)
            hashed, data, size = store_contents(writer, entry.path, fd, size, reporter)
        elif entry.small:
            # perhaps only mapped; contents of that kind are for programs and libraries
            entry.kind = "read"
            hashed, data, size = store_contents(writer, entry.path, fd, size, reporter)
        elif entry.hashed:
            hashed = digest(fd, size)
        return base_record(entry.path, entry.kind, status).with_use(
            holders=tuple(entry.holders),
            append=entry.append and entry.kind == "written",
            digest=hashed,
            data=data,
            size=size,
            xattrs=attributes,
            role=entry.role,
            database=entry.path if entry.kind == "written" and databases.is_sqlite(fd) else "",
        )
    finally:
        os.close(fd)
