"""The records of files: what a restore compares with the files of its host, and puts back.

Each names a path of the dump's host. The paths are absolute by nature, and come from a manifest
that is not trusted: here they are checked to be plain; `criuctl.files` checks them again where it
opens them.

- `FileRecord`: a regular file, folder or link that the tree has open, maps or carries along.
- `LinkRecord`: a deleted name of a file that has other names.
- `FifoRecord`: a named pipe with unread data.
- `InodeRecord`: the inode at a path that users other than root can change.
- `ExternalFile`: a file that the restore opens for CRIU.
- `WorkspaceRecord`: the session's workspace at the freeze. Its files may be many, so their records
  are not in the manifest but in a stream (`criuctl.files.workspace_index`).
"""

from __future__ import annotations

import re

from msgspec import field

from .chunks import StreamRef
from .records import (
    DIGEST,
    Record,
    check_owner_and_mode,
    check_path,
    check_pattern,
    check_range,
    check_text_of_kernel,
    damaged,
)

_HANDLE = re.compile(r"(?:-?\d{1,10}:(?:[0-9a-f]{2}){1,128})?")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


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
        check_pattern(DIGEST, self.digest, f"{where}.digest")
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
    gid: int = 0
    mode: int = 0  # 0: not recorded, nor is `gid`
    # birth time in nanoseconds of unix time; 0 where the file system does not record it
    born: int = 0
    # as in `LinkRecord`: it includes the generation, so no later inode has the same handle
    handle: str = ""

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")
        check_pattern(_HANDLE, self.handle, f"{where}.handle")
        check_owner_and_mode(self.uid, self.gid, self.mode, where)


class ExternalFile(Record, frozen=True):
    """A file that CRIU could not reach by path. The restore opens it for CRIU."""

    key: str  # CRIU's name of the resource
    kind: str  # file | dir | device
    path: str
    flags: int = 0  # as of open(2)

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")


class WorkspaceRecord(Record, frozen=True):
    """The session's workspace at the freeze, taken with ``--with-workspace``."""

    path: str
    index: StreamRef  # records of its files, one JSON object a line
    data: StreamRef  # the contents of its regular files, one after the other
    files: int = 0  # files, folders and links
    left_out: int = 0  # sockets, devices and what could not be read

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")
        check_range(self.files, 0, 1 << 32, f"{where}.files")
        check_range(self.left_out, 0, 1 << 32, f"{where}.left_out")
