"""Files put back at a restore, as `criuctl.files.judgement` decides, and all of it undone if the
restore fails.

Setting aside is a rename, so undoing is one too.  Some folders are another user's: that user must
not be able to redirect what is put back (`criuctl.proc.folder_walk`).
"""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord
from ..checkpoint.reader import CheckpointReader
from ..errors import RestoreFailed
from ..proc import folder_walk
from .contents import digest
from .judgement import Judgement
from .set_aside import AsideFolder

T = TypeVar("T")
# the end of the name of a file that was made for a copy alone
OWN_NAME = re.compile(r"\.older-[0-9a-f]{8}-[^/]*\Z")


class Applied:
    """Files put back; `undo` takes all of it back, newest first."""

    def __init__(self, reader: CheckpointReader, mark: str, workspace: str = "") -> None:
        """`workspace`: what is set aside below it goes to one folder next to it; "" for none."""
        self._reader = reader
        self._mark = mark
        self._undo: list[Callable[[], None]] = []
        self._made: dict[tuple[int, int], str] = {}  # device and inode at the dump -> where it is
        # a file that stays: device and inode of its folder, name
        self._own_copies: dict[tuple[int, int, str], str] = {}
        self._folder = AsideFolder(workspace, mark, self._undo.append) if workspace else None
        self.aside: list[tuple[str, str]] = []  # (path, where its newer copy is)
        self.own: dict[str, str] = {}  # path -> the tree's own path instead
        self.created: set[tuple[int, int]] = set()  # device and inode of each
        self.apart: list[tuple[str, str]] = []  # two paths that were one file and cannot be here

    def apply(self, judgements: Sequence[Judgement]) -> None:
        """Put back every file that is to be; `RestoreFailed` names the one that cannot."""
        wanted = [j for j in judgements if j.verdict in ("put-back", "beside")]
        # A name that is gone, or another file's now, comes back as one of the file that is
        # unchanged.
        as_it_was = [
            j.record
            for j in judgements
            if j.verdict == "same" and j.record.digest and stat.S_ISREG(j.record.mode)
        ]
        self._made |= {(record.device, record.inode): record.path for record in as_it_was}
        restored = list(wanted)
        wanted += [j for j in judgements if j.verdict == "set-aside"]
        for judgement in wanted:
            try:
                if judgement.verdict == "set-aside":
                    self._move_away(judgement.record.path)
                elif judgement.verdict == "beside":
                    self._make_own_copy(judgement)
                else:
                    self._put_back(judgement)
            except OSError as error:
                raise RestoreFailed(
                    f"{judgement.record.path} cannot be put back: {error.strerror}"
                ) from error
        # folders last: their times change with what is put into them
        for judgement in reversed(restored):
            path, mtime = judgement.record.path, judgement.record.mtime_ns
            if stat.S_ISDIR(judgement.record.mode):
                with suppress(OSError), folder_walk.folder(os.path.dirname(path)) as folder:
                    os.utime(
                        os.path.basename(path),
                        ns=(mtime, mtime),
                        dir_fd=folder,
                        follow_symlinks=False,
                    )

    def made(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the regular files that were made, each by one name."""
        for path in self._made.values():
            with suppress(OSError):
                status = os.lstat(path)
                if (status.st_dev, status.st_ino) in self.created:
                    yield path, status

    def undo(self) -> None:
        """Take everything back; what cannot be is left, and only logged."""
        while self._undo:
            with suppress(OSError):
                self._undo.pop()()

    def _put_back(self, judgement: Judgement) -> None:
        record = judgement.record
        path, name = record.path, os.path.basename(record.path)
        with self._parent(path) as folder:
            file = (record.device, record.inode) if stat.S_ISREG(record.mode) else None
            if file is not None and self._is_made(file, name, folder):
                return  # by another path that leads here
            newer = self._set_aside(path, folder) if _is_there(name, folder) else ""
            if stat.S_ISDIR(record.mode):
                self._do(path, folder, lambda: os.mkdir(name, 0o700, dir_fd=folder), _rmdir)
                self._created(dress(name, record, folder))
            elif stat.S_ISLNK(record.mode):
                self._do(
                    path, folder, lambda: os.symlink(record.target, name, dir_fd=folder), _unlink
                )
                os.chown(name, record.uid, record.gid, dir_fd=folder, follow_symlinks=False)
            elif stat.S_ISFIFO(record.mode):
                self._make_fifo(record, folder)
            else:
                self._make(record, path, newer if judgement.from_prefix else "", folder)

    def _move_away(self, path: str) -> None:
        """Move away a file made since the dump where it must not be."""
        with suppress(FileNotFoundError), folder_walk.folder(os.path.dirname(path)) as folder:
            if _is_there(os.path.basename(path), folder):
                self._set_aside(path, folder)

    def _make_own_copy(self, judgement: Judgement) -> None:
        """Make the tree's own file under another name; the present file stays."""
        record = judgement.record
        above, name = os.path.split(record.path)
        with folder_walk.folder(above) as folder:
            # another path may lead here
            place = (os.fstat(folder).st_dev, os.fstat(folder).st_ino, name)
            if place not in self._own_copies:
                own = os.path.join(above, self._free_name(OWN_NAME.sub("", name), "older", folder))
                if stat.S_ISFIFO(record.mode):
                    self._make_fifo(replace(record, path=own), folder)
                else:
                    self._make(record, own, name if judgement.from_prefix else "", folder)
                self._own_copies[place] = own
        self.own[record.path] = self._own_copies[place]

    def _make(self, record: FileRecord, path: str, prefix_of: str, folder: int) -> None:
        """Make a regular file at `path`, or another name of one made already, if they were one file
        at the dump.
        """
        file = (record.device, record.inode)
        if file in self._made:
            try:
                self._link(self._made[file], path, folder)
                return
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            self.apart.append((path, self._made[file]))
        self._write(replace(record, path=path), prefix_of, folder)
        self._made.setdefault(file, path)

    def _is_made(self, file: tuple[int, int], name: str, folder: int) -> bool:
        """Return whether what is there was made of this file of the dump."""
        if file not in self._made:
            return False
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.lstat(self._made[file]))

    def _make_fifo(self, record: FileRecord, folder: int) -> None:
        name = os.path.basename(record.path)
        self._do(record.path, folder, lambda: os.mkfifo(name, 0o600, dir_fd=folder), _unlink)
        self._created(dress(name, record, folder))

    @contextmanager
    def _parent(self, path: str) -> Iterator[int]:
        """Open the folder that `path` is in, and make what is missing of it."""
        above = os.path.dirname(path)
        with suppress(FileNotFoundError), folder_walk.folder(above):
            above = ""
        if above:
            with self._parent(above) as folder:
                self._do(
                    above,
                    folder,
                    lambda: os.mkdir(os.path.basename(above), 0o755, dir_fd=folder),
                    _rmdir,
                )
        with folder_walk.folder(os.path.dirname(path)) as folder:
            yield folder

    def _do(
        self, path: str, folder: int, act: Callable[[], T], back: Callable[[str, int], None]
    ) -> T:
        """Do one step in the folder of `path`, and record how to undo it first: a signal may follow
        at once.
        """
        there = os.fstat(folder)

        def undo() -> None:
            with folder_walk.folder(os.path.dirname(path)) as folder:
                if os.path.samestat(os.fstat(folder), there):
                    back(os.path.basename(path), folder)

        self._undo.append(undo)
        try:
            return act()
        except OSError:
            self._undo.pop()
            raise

    def _link(self, made: str, path: str, folder: int) -> None:
        with folder_walk.folder(os.path.dirname(made)) as source:
            names = os.path.basename(made), os.path.basename(path)
            link = partial(
                os.link, *names, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False
            )
            self._do(path, folder, link, _unlink)

    def _write(self, record: FileRecord, prefix_of: str, folder: int) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        name = os.path.basename(record.path)
        fd = self._do(
            record.path, folder, lambda: os.open(name, flags, 0o600, dir_fd=folder), _unlink
        )
        try:
            if prefix_of:
                source = folder_walk.regular(prefix_of, folder)
                try:
                    done = 0
                    while done < record.size:
                        copied = os.copy_file_range(source, fd, record.size - done)
                        if not copied:
                            raise RestoreFailed(f"{record.path} became shorter while it was read")
                        done += copied
                    if record.digest and digest(fd, record.size) != record.digest:
                        raise RestoreFailed(
                            f"{record.path} was changed while it was copied, and its contents at "
                            "the freeze are not in the checkpoint",
                            hint="Take it along at the dump with --with-files.",
                        )
                finally:
                    os.close(source)
            elif record.data is not None:
                os.ftruncate(fd, record.size)
                self._reader.write_to([(record.data, fd, 0)])
            os.fsync(fd)
            self._created(os.fstat(fd))
            _dress(fd, record)
        finally:
            os.close(fd)

    def _created(self, status: os.stat_result) -> None:
        self.created.add((status.st_dev, status.st_ino))

    def _set_aside(self, path: str, folder: int) -> str:
        """Rename what is there; return its new name in this folder, "" if it is in another."""
        if self._folder is not None and self._folder.has(path):
            try:
                self.aside.append((path, self._folder.move(path, folder)))
                return ""
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
        name = os.path.basename(path)
        newer = self._free_name(name, "newer", folder)

        def rename(source: str, target: str, folder: int) -> None:
            os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)

        self._do(
            path,
            folder,
            lambda: rename(name, newer, folder),
            lambda name, folder: rename(newer, name, folder),
        )
        self.aside.append((path, os.path.join(os.path.dirname(path), newer)))
        return newer

    def _free_name(self, name: str, what: str, folder: int) -> str:
        free = f"{name}.{what}-{self._mark}-{time.strftime('%Y%m%dT%H%M%S')}"
        while _is_there(free, folder):
            free += "x"
        return free


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _unlink(name: str, folder: int) -> None:
    os.unlink(name, dir_fd=folder)


def _rmdir(name: str, folder: int) -> None:
    os.rmdir(name, dir_fd=folder)


def dress(path: str, record: FileRecord, folder: int | None = None) -> os.stat_result:
    """Give a new file the owner, mode, attributes and time that it had; return its device and
    inode.

    Its folder may be another user's, who can put a link to any file in its place: nothing is
    followed.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if stat.S_IFMT(status.st_mode) != stat.S_IFMT(record.mode):
            raise OSError(errno.ESTALE, "another file is in its place now", path)
        _dress(fd, record)
        return status
    finally:
        os.close(fd)


def _dress(fd: int, record: FileRecord) -> None:
    """Do the same for an open file."""
    itself = f"/proc/self/fd/{fd}"
    os.chown(itself, record.uid, record.gid)
    os.chmod(itself, stat.S_IMODE(record.mode))
    for name, value in record.xattrs.items():
        with suppress(OSError):  # a file system without them, or security.* without the module
            os.setxattr(itself, name, base64.b64decode(value))
    os.utime(itself, ns=(record.mtime_ns, record.mtime_ns))
