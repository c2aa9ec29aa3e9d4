"""Copy a folder tree into a new folder, by reflink where the file system has it.

Both folders are given as descriptors. The walk goes from each folder to its entries by openat2(2)
with O_NOFOLLOW and without crossing a mount, so no link and no mount leads out of the tree, even if
another user changes the tree meanwhile. The kind of each entry is looked at through an O_PATH
descriptor before it is opened: nothing waits for the writer of a FIFO, and no device is opened.

Kept: contents with their holes, owners, modes, times, extended attributes with ACLs, symbolic links
as they are, and hard links between files of the tree. A FIFO is made again, without what is in it.
Left out and reported: sockets, devices, what is mounted inside the tree, and files that cannot be
opened. In a tree that does not belong to root, set-user-ID bits and capabilities that the owner of
the tree could not have given are left out and reported, too: such a copy would outlive an update
of the original program.

The contents of a file share its blocks (FICLONE) if source and target lie on one file system that
can do so, for example xfs or btrfs. Otherwise they are copied by the kernel in pieces, data only.

Owners and modes of a folder are set after its contents, and those of the top folder at the end. The
caller makes the top folder with mode 0700, so no user reaches into a copy that is not complete, and
removes it if an error is raised.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import PreflightRefused
from ..proc import folder_walk, inodes

MAX_DEPTH = 128  # folders; each costs two descriptors while the walk is inside
_FICLONE = 0x40049409
_NO_CLONES = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY)  # true for all files of the two places
_NO_XDEV = 0x01  # openat2(2): RESOLVE_NO_XDEV
_PIECE = 64 << 20  # bytes per call
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME | os.O_NONBLOCK | os.O_NOCTTY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CAPABILITIES = "security.capability"
_ACLS = "system.posix_acl_"
_ACLS_OF_XFS = "trusted.SGI_ACL_"  # the same ACLs again, as xfs stores them


class Limits(NamedTuple):
    """The most that one copy may hold."""

    size: int  # bytes of data; holes do not count
    files: int  # files, folders and links together


class Skipped(NamedTuple):
    """What the copy does not have."""

    path: str  # relative to the top folder
    reason: str


@dataclass
class CloneReport:
    """What was copied. `cloned` and `copied` count regular files, `files` everything."""

    files: int = 0
    size: int = 0  # bytes of data
    cloned: int = 0
    copied: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # written to while they were read


def clone_tree(
    source: int, target: int, limits: Limits, leased: Container[tuple[int, int]] = ()
) -> CloneReport:
    """Copy everything below the folder `source` into the empty folder `target`; return a report.

    Both are descriptors of folders; O_PATH is enough. `target` gets the attributes of `source`.
    `leased`: device and inode of files on which a process has a write lease. They are left out,
    because opening one would send its holder a signal.

    `PreflightRefused` when the tree exceeds `limits` or `MAX_DEPTH`; `OSError` with the path inside
    the tree when `target` cannot be written or a file cannot be read to its end.
    """
    clone = _Clone(source, target, limits, leased)
    try:
        with ExitStack() as stack:
            folders = [_opened_folder(stack, fd) for fd in (source, target)]
            clone.folder(folders[0], folders[1], ())
            clone.attributes(folders[0], folders[1], ".", ".")
    except OSError as error:
        raise OSError(error.errno, error.strerror, clone.at) from error
    return clone.report


def _opened_folder(stack: ExitStack, fd: int) -> int:
    opened = os.open(".", _READ | os.O_DIRECTORY, dir_fd=fd)
    stack.callback(os.close, opened)
    return opened


class _Clone:
    """One copy: where it is, and what it has done so far."""

    def __init__(
        self, source: int, target: int, limits: Limits, leased: Container[tuple[int, int]]
    ) -> None:
        self.report = CloneReport()
        self.at = "."  # the path that is being copied, for errors
        self._target, self._limits, self._leased = target, limits, leased
        self._owner = os.fstat(source)
        self._reflinks = True  # until the kernel says that there are none
        # Where the first name of each file with several names lies in the copy.
        self._linked: dict[tuple[int, int], tuple[str, ...]] = {}

    def folder(self, source: int, target: int, path: tuple[str, ...]) -> None:
        """Copy the entries of an open folder."""
        if len(path) > MAX_DEPTH:
            self._refuse(f"has folders more than {MAX_DEPTH} levels deep")
        for name in self._names(source):
            inner = (*path, name)
            self.at = os.path.join(*inner)
            try:
                flags = inodes.NO_LINKS | _NO_XDEV
                there = inodes.open_below(source, name, flags, os.O_NOFOLLOW)
            except FileNotFoundError:
                self.report.changed.append(self.at)
                continue
            except OSError as error:
                mounted = "another file system is mounted there"
                self._skip(mounted if error.errno == errno.EXDEV else str(error.strerror))
                continue
            try:
                self._entry(there, target, inner)
            finally:
                os.close(there)

    def _names(self, folder: int) -> list[str]:
        """Return the names in a folder; refuse more than the limit allows, before they are held."""
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self.report.files += 1
                if self.report.files > self._limits.files:
                    self._refuse(f"has more than {self._limits.files} files")
                names.append(entry.name)
        return sorted(names)

    def _entry(self, there: int, target: int, path: tuple[str, ...]) -> None:
        status, name = os.fstat(there), path[-1]
        key = (status.st_dev, status.st_ino)
        if key in self._linked:
            with folder_walk.place(self._linked[key], self._target) as first:
                os.link(f"/proc/self/fd/{first}", name, dst_dir_fd=target, follow_symlinks=True)
            return
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            made = self._inside(there, target, path)
        elif stat.S_ISREG(status.st_mode):
            made = self._regular(there, target, name, status)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink("", dir_fd=there), name, dir_fd=target)
            made = True
        elif stat.S_ISFIFO(status.st_mode):
            os.mkfifo(name, 0o600, dir_fd=target)
            made = True
        else:
            kind = "a socket" if stat.S_ISSOCK(status.st_mode) else "a device"
            made = self._skip(f"it is {kind}")
        if made:
            self.at = os.path.join(*path)
            self.attributes(there, target, name, self.at)
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                self._linked[key] = path

    def _inside(self, there: int, target: int, path: tuple[str, ...]) -> bool:
        with ExitStack() as stack:
            try:
                source = _opened_folder(stack, there)
            except OSError as error:  # a server that maps root to another user
                self._skip(f"it cannot be listed: {error.strerror}")
                return True
            made = os.open(path[-1], _READ | os.O_DIRECTORY, dir_fd=target)
            stack.callback(os.close, made)
            self.folder(source, made, path)
        return True

    def _regular(self, there: int, target: int, name: str, status: os.stat_result) -> bool:
        if (status.st_dev, status.st_ino) in self._leased:
            return self._skip("a process has a write lease on it, which reading would break")
        try:
            source = os.open(f"/proc/self/fd/{there}", _READ & ~os.O_NOFOLLOW)
        except OSError as error:
            return self._skip(str(error.strerror))
        try:
            made = os.open(name, _NEW, 0o600, dir_fd=target)
            try:
                self._contents(source, made, status)
            finally:
                os.close(made)
            after = os.fstat(source)
        finally:
            os.close(source)
        if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            self.report.changed.append(self.at)
        return True

    def _contents(self, source: int, made: int, status: os.stat_result) -> None:
        """Share the blocks of `source`, or copy its data; leave holes where it has holes."""
        if self._reflinks:
            self._charge(min(status.st_size, status.st_blocks * 512))
            try:
                fcntl.ioctl(made, _FICLONE, source)
                self.report.cloned += 1
                return
            except OSError as error:  # then copied; what is wrong with the disk shows there, too
                self._reflinks = error.errno not in _NO_CLONES
            self.report.size -= min(status.st_size, status.st_blocks * 512)
        at = 0
        while at < status.st_size:
            try:
                start = os.lseek(source, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # a hole up to the end
            at = min(os.lseek(source, start, os.SEEK_HOLE), status.st_size)
            self._range(source, made, start, at)
        os.truncate(made, status.st_size)
        self.report.copied += 1

    def _range(self, source: int, made: int, start: int, end: int) -> None:
        while start < end:
            size = min(_PIECE, end - start)
            self._charge(size)
            try:
                count = os.copy_file_range(source, made, size, start, start)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.lseek(made, start, os.SEEK_SET)
                count = os.sendfile(made, source, start, size)
            self.report.size -= size - count
            if not count:
                return  # it became shorter: reported as changed
            start += count

    def attributes(self, source: int, target: int, name: str, path: str) -> None:
        """Give `name` in the folder `target` the owner, mode, attributes and times of `source`."""
        status, here = os.fstat(source), f"/proc/self/fd/{source}"
        os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
        made = os.open(name, folder_walk.PLACE, dir_fd=target)
        try:
            there = f"/proc/self/fd/{made}"
            if not stat.S_ISLNK(status.st_mode):
                os.chmod(there, stat.S_IMODE(status.st_mode) & ~self._unkept_bits(status, path))
            self._extended(here, there, path)
        finally:
            os.close(made)
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)

    def _unkept_bits(self, status: os.stat_result, path: str) -> int:
        """Return the bits that the owner of the tree could not have set on this file."""
        owner, bits = self._owner, status.st_mode & (stat.S_ISUID | stat.S_ISGID)
        own = status.st_uid == owner.st_uid and (
            not bits & stat.S_ISGID or status.st_gid == owner.st_gid
        )
        if not bits or owner.st_uid == 0 or own or not stat.S_ISREG(status.st_mode):
            return 0
        self.report.skipped.append(Skipped(path, "its set-user-ID or set-group-ID bit"))
        return bits

    def _extended(self, source: str, target: str, path: str) -> None:
        try:
            wanted = {n for n in os.listxattr(source) if not n.startswith(_ACLS_OF_XFS)}
        except OSError:  # a file system without extended attributes
            wanted = set()
        with suppress(OSError):  # the same
            # A default ACL above the copy gave its files ACLs that the originals do not have.
            for name in set(os.listxattr(target)) - wanted:
                if name.startswith(_ACLS):
                    os.removexattr(target, name)
        for name in sorted(wanted):
            if name == _CAPABILITIES and self._owner.st_uid != 0:
                self.report.skipped.append(Skipped(path, "its capabilities"))
                continue
            try:
                os.setxattr(target, name, os.getxattr(source, name))
            except OSError as error:
                reason = f"its attribute {name}: {error.strerror}"
                self.report.skipped.append(Skipped(path, reason))

    def _charge(self, size: int) -> None:
        self.report.size += size
        if self.report.size > self._limits.size:
            self._refuse(f"has more than {self._limits.size >> 20} MiB of data")

    def _skip(self, reason: str) -> bool:
        self.report.skipped.append(Skipped(self.at, reason))
        return False

    def _refuse(self, what: str) -> None:
        raise PreflightRefused(
            f"the folder {what}: it is not copied",
            hint="Keep in it only what the program works on, or raise the limit.",
            path=self.at,
        )
