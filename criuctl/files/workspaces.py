"""Take a session's workspace into a checkpoint, as it is at the freeze.

The freeze must not last as long as reading the workspace takes. So the files are stored twice in
part: all of them while the tree runs (`Workspace.ahead`), and again those that have changed when it
is frozen (`Workspace.frozen`). A file counts as unchanged if inode, size and both times of change
are the same, and if these could show a change at all: not in the last second before it was read,
and not where the tree has it mapped, because writes to memory show in the times only later.

Of a changed file the frozen tree waits only for a reflink, a file without a name that shares its
blocks (FICLONE on xfs, btrfs and others); it is read when the tree runs again. Without reflinks,
or for more than `_CLONES` changed files, it is read while the tree is frozen.

Equal contents are stored once, in this store and in all its checkpoints, like everything else.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord, WorkspaceRecord
from ..checkpoint.manifest import Manifest
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..errors import DumpFailed, NoSuchProcess, PreflightRefused
from ..proc.descriptors import Descriptor
from ..report import Reporter
from . import workspace_index
from .carried_files import resolve_carried, walk
from .contents import base_record, extended_attributes, open_contents
from .used_files import OpenFile, open_files

_CLONES = 256  # each is a descriptor from the freeze until it is read
_FICLONE = 0x40049409
_SETTLED = 10**9  # nanoseconds: a later write has another time, on every file system
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY
_Inode = tuple[int, int]  # st_dev, st_ino


class _Signature(NamedTuple):
    """What differs when a file has been written to."""

    size: int
    modified: int
    changed: int


class _Contents(Struct):
    """The contents of one inode: stored as the stream `key`, or in `clone` until it is read."""

    key: Hashable
    signature: _Signature
    digest: str = ""
    size: int = 0
    clone: int = -1  # descriptor


class Workspace:
    """The workspace of one dump, which calls `ahead`, `frozen`, `completed` and `close` in turn.

    `frozen` is called again when the tree is frozen again.
    """

    def __init__(self, config: Config, path: str, root_pid: int) -> None:
        """Find the workspace and check its size; raise `PreflightRefused`."""
        self.path = resolve_carried([path], root_pid)[-1]
        self._root_pid = root_pid
        self._max_size, self._max_files = config.workspace_max_mib << 20, config.workspace_max_files
        self._streams = 0
        self._ahead: dict[_Inode, _Contents] = {}
        self._frozen: dict[_Inode, _Contents] = {}
        self._records: list[FileRecord] = []
        self._left_out = 0
        self._measure()

    def _measure(self) -> None:
        size = 0
        for files, (path, fd) in enumerate(walk(self.path, self._root_pid), 1):
            if fd is None:
                raise PreflightRefused(f"the workspace {path} is gone")
            status = os.fstat(fd)
            if files == 1 and not stat.S_ISDIR(status.st_mode):
                raise PreflightRefused(f"the workspace {path} is no folder")
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
            self._check(size, files)

    def _check(self, size: int, files: int) -> None:
        if size > self._max_size:
            what, option = f"is larger than {self._max_size >> 20} MiB", "workspace_max_mib"
        elif files > self._max_files:
            what, option = f"has more than {self._max_files} files", "workspace_max_files"
        else:
            return
        raise PreflightRefused(
            f"the workspace {self.path} {what}: it is not taken along",
            hint=f"Move out of it what can be made again, raise {option} in the configuration, or "
            "take the checkpoint without --with-workspace.",
        )

    # -- while the tree runs -----------------------------------------------------------------------

    def ahead(self, writer: CheckpointWriter, opened: Mapping[int, Sequence[Descriptor]]) -> None:
        """Store all files as they are now; what changes meanwhile is stored again at the freeze."""
        later: set[_Inode] = set()
        for pid, held in opened.items():
            with suppress(NoSuchProcess, PreflightRefused):  # it has ended
                used = open_files({pid: held})
                later |= {i for i, e in used.items() if e.leased is not None or e.shared}
        for path, fd in walk(self.path, self._root_pid):
            if fd is None:
                continue
            status = os.fstat(fd)
            inode = (status.st_dev, status.st_ino)
            if inode in later or inode in self._ahead or not _has_contents(status):
                continue
            read_at = time.time_ns()
            with suppress(OSError):  # it is tried again at the freeze, and reported then
                file = open_contents(f"/proc/self/fd/{fd}", None, _FLAGS)
                try:
                    taken, changed = self._store(writer, path, file, status)
                finally:
                    os.close(file)
                if not changed and read_at - status.st_ctime_ns > _SETTLED:
                    self._ahead[inode] = taken

    def _store(
        self, writer: CheckpointWriter, path: str, file: int, status: os.stat_result
    ) -> tuple[_Contents, bool]:
        """Store an open file; return also whether it was written to meanwhile."""
        key = self._key(path)
        taken = writer.add_file(key, file, status.st_size)
        return _Contents(key, _signature(status), taken.digest, taken.size), taken.changed

    def _key(self, path: str) -> Hashable:
        self._streams += 1
        return ("workspace", path, self._streams)

    # -- while it is frozen ------------------------------------------------------------------------

    def frozen(
        self,
        writer: CheckpointWriter,
        opened: Mapping[int, Sequence[Descriptor]],
        reporter: Reporter,
    ) -> None:
        """Note all files as they are, and take those that have changed since `ahead`."""
        self.close()
        self._frozen, self._records, self._left_out = {}, [], 0
        used = open_files(opened)
        top, size, device = -1, 0, -1
        try:
            for path, fd in walk(self.path, self._root_pid):
                if fd is None:
                    reporter.warning(f"{path} is gone since the dump began: left out")
                    continue
                status = os.fstat(fd)
                if top < 0:
                    top, device = os.open(f"/proc/self/fd/{fd}", os.O_PATH), status.st_dev
                if status.st_dev != device:
                    reporter.warning(f"{path}: another file system is mounted there: left out")
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
                try:
                    self._check(size, len(self._records) + 1)
                except PreflightRefused as error:  # it has grown since
                    raise DumpFailed(error.message, hint=error.hint) from error
                self._take(writer, path, fd, used, top, reporter)
        finally:
            if top >= 0:
                os.close(top)

    def _take(
        self,
        writer: CheckpointWriter,
        path: str,
        fd: int,
        used: Mapping[_Inode, OpenFile],
        top: int,
        reporter: Reporter,
    ) -> None:
        status, itself = os.fstat(fd), f"/proc/self/fd/{fd}"
        record = base_record(path, "carried", status).with_use(xattrs=extended_attributes(itself))
        if stat.S_ISLNK(status.st_mode):
            record = record.with_use(target=os.readlink("", dir_fd=fd))
        elif not stat.S_ISREG(status.st_mode):
            if not (stat.S_ISDIR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                self._left_out += 1
                return
        elif _has_contents(status):
            inode = (status.st_dev, status.st_ino)
            if inode not in self._frozen:
                contents = self._ahead.get(inode)
                entry = used.get(inode)
                mapped = entry is not None and entry.shared
                if contents is None or mapped or contents.signature != _signature(status):
                    contents = self._changed(writer, path, itself, status, entry, top, reporter)
                self._frozen[inode] = contents
        self._records.append(record)

    def _changed(
        self,
        writer: CheckpointWriter,
        path: str,
        itself: str,
        status: os.stat_result,
        entry: OpenFile | None,
        top: int,
        reporter: Reporter,
    ) -> _Contents:
        try:
            file = open_contents(itself, entry.leased if entry is not None else None, _FLAGS)
        except OSError as error:
            raise DumpFailed(
                f"{path} cannot be taken along: {error.strerror}; the tree runs on"
            ) from error
        try:
            cloned = sum(contents.clone >= 0 for contents in self._frozen.values())
            if cloned < _CLONES and (clone := _cloned(file, top)) >= 0:
                key = self._key(path)
                return _Contents(key, _signature(status), size=status.st_size, clone=clone)
            taken, changed = self._store(writer, path, file, status)
        finally:
            os.close(file)
        if changed:
            reporter.warning(
                f"{path} was written to by a process outside the tree while it was read"
            )
        return taken

    # -- when it runs again ------------------------------------------------------------------------

    def completed(self, manifest: Manifest, writer: CheckpointWriter) -> Manifest:
        """Store what was only cloned; return the manifest with the workspace."""
        keys: list[Hashable] = []
        seen: set[_Inode] = set()
        records = []
        for record in self._records:
            inode = (record.device, record.inode)
            contents = self._frozen.get(inode)
            if contents is not None and stat.S_ISREG(record.mode):
                if contents.clone >= 0:
                    taken = writer.add_file(contents.key, contents.clone, contents.size)
                    contents.digest, contents.size = taken.digest, taken.size
                    os.close(contents.clone)
                    contents.clone = -1
                record = record.with_use(digest=contents.digest, size=contents.size)
                if inode not in seen and contents.size:
                    seen.add(inode)
                    keys.append(contents.key)
            records.append(record)
        index = ("workspace index",)
        for line in workspace_index.pack(records):
            writer.add_bytes(index, line)
        data = writer.joined(keys)
        made = WorkspaceRecord(
            path=self.path,
            index=writer.stream(index),
            data=data,
            files=len(records),
            left_out=self._left_out,
        )
        amounts = dict(manifest.bytes, files=manifest.bytes.get("files", 0) + data.size)
        features = (*manifest.features, workspace_index.FEATURE)
        return replace(manifest, workspace=made, bytes=amounts, features=features)

    def close(self) -> None:
        """Give up clones that were not read."""
        for contents in self._frozen.values():
            if contents.clone >= 0:
                os.close(contents.clone)
                contents.clone = -1


def _has_contents(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _signature(status: os.stat_result) -> _Signature:
    return _Signature(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _cloned(file: int, folder: int) -> int:
    """Return a file without a name that shares the blocks of `file`; -1 if that cannot be."""
    try:
        clone = os.open(f"/proc/self/fd/{folder}", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system without such files, or a full one
        return -1
    try:
        fcntl.ioctl(clone, _FICLONE, file)
    except OSError:
        os.close(clone)
        return -1
    return clone
