"""Files and folders that are taken along because ``--with-files`` names them.

They are read through ``/proc/PID/root``, so that paths mean what they mean to the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress

from ..checkpoint.file_records import FileRecord
from ..checkpoint.writer import CheckpointWriter
from ..errors import DumpFailed, PreflightRefused, UsageError
from ..proc import folder_walk
from ..proc.procfs import open_entry
from ..report import Reporter
from . import databases
from .contents import base_record, extended_attributes, open_contents, store_contents

_KERNELS = ("/proc/", "/sys/")
_PATH_MAX = 4096  # bytes, with the NUL at the end
_LINK_HINT = "Find out what the link is for; what it leads to can be named itself."


def resolve_carried(paths: Iterable[str], root_pid: int) -> list[str]:
    """Return the absolute paths of what ``--with-files`` names, as the tree has it, checked to
    exist.

    Links on the way are resolved: the tree has a file open by its real path, and it is put back
    there.  A link itself is taken along with what it leads to.
    """
    found: list[str] = []
    for path in paths:
        if not path:  # an unset variable, for example: it would be the working folder
            raise UsageError("'' is no path of a file or folder to take along")
        # ".." is kept: after a link it does not mean the parent in the path
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
            raise PreflightRefused(text, hint="--with-files takes files of the tree.")
        for place in places:
            if place.startswith(_KERNELS):
                text = (
                    f"{place} is not taken along: it is the kernel's, and different each time that "
                    "it is read"
                )
                raise PreflightRefused(text, hint="--with-files takes files of the tree.")
        found += (place for place in places if place not in found)
    return found


def _places(path: str, root_pid: int) -> list[str]:
    view = open_entry(root_pid, "root")
    try:
        return list(folder_walk.trail(path, view))
    finally:
        os.close(view)


def carry(
    writer: CheckpointWriter,
    wanted: str,
    root_pid: int,
    leased: Mapping[tuple[int, int], tuple[int, int]],
    taken: set[str],
    reporter: Reporter,
) -> Iterator[tuple[FileRecord, tuple[int, int]]]:
    """Yield the records of a file, or of a folder and everything below it on the same file system;
    each path once, see `taken`.
    """
    for path, fd in walk(wanted, root_pid):
        # removed by the program before it was frozen, or by a process outside the tree
        if fd is None:
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
        record = base_record(path, "carried", status).with_use(xattrs=extended_attributes(itself))
        if stat.S_ISLNK(status.st_mode):
            record = record.with_use(target=os.readlink("", dir_fd=fd))
        elif stat.S_ISREG(status.st_mode):
            try:
                contents = open_contents(itself, leased.get(identity), os.O_NONBLOCK | os.O_NOCTTY)
            except OSError as error:
                raise DumpFailed(
                    f"{path} cannot be taken along: {error.strerror}; the tree runs on"
                ) from error
            try:
                hashed, data, size = store_contents(
                    writer, path, contents, status.st_size, reporter
                )
                database = path if databases.is_sqlite(contents) else ""
                record = record.with_use(digest=hashed, data=data, size=size, database=database)
            finally:
                os.close(contents)
        elif not (stat.S_ISFIFO(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            reporter.warning(f"{path} is a socket or a device: left out")
            continue
        yield record, identity


def walk(wanted: str, root_pid: int) -> Iterator[tuple[str, int | None]]:
    """Yield what the tree has at a path, and all below it on the same file system: each path, with
    a descriptor (``O_PATH``).

    The descriptor is valid until the next one is asked for; None if nothing is at `wanted`.  Other
    users may move things meanwhile where they can write, but none of their links redirects:
    `PreflightRefused`, and below `wanted` none is followed.
    """
    base, name = os.path.split(wanted)
    with ExitStack() as stack:
        view = open_entry(root_pid, "root")
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
