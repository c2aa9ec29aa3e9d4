"""A store in a local folder: one file per object.

An object is first written to a temporary file in ``.tmp/`` of the same folder, made durable
(fdatasync), then published under its name by link(2), which never overwrites, or by rename(2),
which replaces in one step; then its folder is made durable. So a reader sees whole objects only,
whenever a writer dies.

A writer holds a lock (flock) on its temporary file while it lives. `sweep` removes old temporary
files without a lock; `create` and `check_writable` do it in passing.

Folders are 0700 and files 0600. Names are followed component by component without following
symbolic links, so nothing inside the folder can lead out of it; the store's own folder may be a
link. Files that are no objects of criuctl's (other names, links, devices) are never listed, read or
replaced.

Every call opens the folder again: a store whose disk was unmounted or replaced while criuctl runs
is reported as missing, and nothing is written to what is there now.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..errors import (
    Damaged,
    NoSuchBucket,
    ObjectExists,
    ObjectMissing,
    StoreCannot,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from ..quoting import quoted
from . import direct
from .base import (
    Capabilities,
    Data,
    ObjectInfo,
    Store,
    allocate,
    as_views,
    check_limit,
    check_name,
    check_prefix,
    is_probe,
    probe_name,
    short_object,
    valid_name,
)

_TEMP = ".tmp"  # begins with a dot, so no object can have the name
_STALE = 3600.0  # seconds after which an unlocked temporary file belongs to a dead writer
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_INSIDE = _FOLDER | os.O_NOFOLLOW
_VECTORS = 1024  # Linux's IOV_MAX
_PIECE = 4 << 20  # bytes that are read back at once
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore(Store):
    """Objects as files in the folder `path` (absolute)."""

    def __init__(self, path: str, *, verify: bool = False) -> None:
        """`verify`: written data is read back from the disk before it gets its name."""
        self._verify = verify
        self.url = path
        self._path = path

    def place(self) -> str:
        return os.path.abspath(self._path)

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        folder_name, _, base = check_name(name).rpartition("/")
        views = as_views(data)
        with self._errors(name), self._root() as root, self._temp_folder(root) as temps:
            temp, fd = _new_temp(temps)
            try:
                try:
                    _write_all(fd, views)
                    os.fdatasync(fd)
                    if self._verify:
                        self._read_back(fd, views, name)
                    with _folder(root, folder_name, make=True) as folder:
                        fresh = if_absent or not _exists(folder, base)
                        self._publish(temps, temp, folder, base, name, if_absent)
                        try:
                            os.fsync(folder)
                        except OSError:
                            if fresh:  # the caller gets an error, so nothing may remain
                                with suppress(OSError):
                                    os.unlink(base, dir_fd=folder)
                            raise
                finally:
                    # Gone already if it was renamed.
                    with suppress(FileNotFoundError):
                        os.unlink(temp, dir_fd=temps)
            finally:
                os.close(fd)  # releases the lock, so after the name

    def _read_back(self, fd: int, views: Sequence[memoryview], name: str) -> None:
        """Raise `Damaged` if the disk does not hold what was written.

        The page cache proves nothing about the disk.
        """
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer, done = allocate(_PIECE), 0
        for view in views:
            for start in range(0, view.nbytes, _PIECE):
                wanted = view[start : start + _PIECE]
                got = direct.read(fd, done, buffer[: wanted.nbytes])
                while got < wanted.nbytes and (
                    count := os.preadv(fd, [buffer[got : wanted.nbytes]], done + got)
                ):
                    got += count
                if buffer[:got] != wanted:
                    raise Damaged(
                        f"{name} in {self.url} is not what was written, when it is read back",
                        hint=(
                            "The disk, or the memory of this host, is faulty: see the kernel's log."
                        ),
                        object=name,
                    )
                done += wanted.nbytes

    def _publish(
        self, temps: int, temp: str, folder: int, base: str, name: str, if_absent: bool
    ) -> None:
        if not if_absent:
            os.rename(temp, base, src_dir_fd=temps, dst_dir_fd=folder)
            return
        try:
            os.link(temp, base, src_dir_fd=temps, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            raise ObjectExists(f"{name} is in {self.url} already", object=name) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreCannot(
                f"the file system of {self.url} has no hard links ({error.strerror}), which a "
                "store needs",
                hint="Put the store on a Linux file system (ext4, XFS, btrfs, NFS, ...).",
            ) from error

    def delete(self, name: str) -> None:
        folder_name, _, base = check_name(name).rpartition("/")
        with self._errors(name), self._root() as root:
            try:
                with _folder(root, folder_name) as folder:
                    os.unlink(base, dir_fd=folder)
                    # Durable at once: a manifest must not reappear after its packs were removed.
                    os.fsync(folder)
            except FileNotFoundError:
                return

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str, limit: int | None = None) -> bytes:
        with self._errors(name), self._object(name) as fd:
            size = os.fstat(fd).st_size
            check_limit(name, self.url, size, limit)
            return self._read(fd, name, 0, size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        with self._errors(name), self._object(name) as fd:
            return self._read(fd, name, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._errors(name), self._object(name) as fd:
            target = buffer.cast("B")
            done = direct.read(fd, offset, target)
            while done < target.nbytes:
                count = os.preadv(fd, [target[done:]], offset + done)
                if not count:
                    raise short_object(name, self.url, offset, target.nbytes, done)
                done += count

    def _read(self, fd: int, name: str, offset: int, length: int) -> bytes:
        # One pread nearly always returns all of it, and its result needs no copying; Linux reads 2
        # GiB at most at once.
        first = os.pread(fd, length, offset)
        if len(first) == length:
            return first
        pieces, done = [first], len(first)
        while done < length:
            piece = os.pread(fd, length - done, offset + done)
            if not piece:
                raise short_object(name, self.url, offset, length, done)
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)

    def stat(self, name: str) -> ObjectInfo:
        with self._errors(name), self._object(name) as fd:
            found = os.fstat(fd)
            return ObjectInfo(name, found.st_size, found.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._errors(prefix or self.url), self._root() as root:
            yield from _walk(root, "", prefix)

    # -- the place ---------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the folder and its parents, 0700; an existing one is used as it is."""
        with self._errors(self.url):
            _make_folders(self._path)
            with self._root() as root, self._temp_folder(root):
                pass
        self.sweep(_STALE)

    def probe(self) -> Capabilities:
        """Test for link(2), which decides between racing creators wherever a file system has it."""
        self.check_writable()
        return Capabilities(conditional_create=True, kind="local")

    def check_writable(self) -> None:
        with self._errors(self.url), self._root() as root, self._temp_folder(root):
            pass
        name = probe_name()
        self.put(name, b"criuctl probe", if_absent=True)
        self.delete(name)
        self.sweep(_STALE)

    def sweep(self, older_than: float) -> int:
        """Remove temporary files older than `older_than` seconds that no living writer holds."""
        removed = 0
        with self._errors(_TEMP), self._root() as root, self._temp_folder(root) as temps:
            for name in os.listdir(temps):
                with suppress(FileNotFoundError):
                    removed += _remove_stale(temps, name, older_than)
        return removed

    # -- descriptors and errors --------------------------------------------------------------------

    @contextmanager
    def _root(self) -> Iterator[int]:
        try:
            fd = os.open(self._path, _FOLDER)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NoSuchBucket(
                f"the store's folder {self._path} {_missing(error)}",
                hint=(
                    f"Make it with `criuctl store init --store {quoted(self._path)}`, or mount "
                    "what holds it."
                ),
            ) from None
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _temp_folder(self, root: int) -> Iterator[int]:
        with _folder(root, _TEMP, make=True) as fd:
            yield fd

    @contextmanager
    def _object(self, name: str) -> Iterator[int]:
        folder_name, _, base = check_name(name).rpartition("/")
        with self._root() as root:
            try:
                with _folder(root, folder_name) as folder:
                    # Not blocking: a FIFO put in an object's place must not hang us.
                    fd = os.open(
                        base,
                        os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                        dir_fd=folder,
                    )
            except FileNotFoundError:
                raise ObjectMissing(f"{name} is not in {self.url}", object=name) from None
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise StoreError(f"{name} in {self.url} is not a regular file", object=name)
                yield fd
            finally:
                os.close(fd)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Map the kernel's errors to criuctl's, in this one place."""
        try:
            yield
        except OSError as error:
            # the names of test objects and temporary files mean nothing to the reader
            own = what in (self.url, _TEMP) or is_probe(what)
            where = f"the store in {self.url}" if own else f"{what} in {self.url}"
            raise _as_store_error(error, where, self.url) from error


def _as_store_error(error: OSError, where: str, url: str) -> StoreError:
    said = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StoreFull(
                f"no room in the store in {url}: {said}",
                hint="Free space there, or `criuctl prune`, then try again.",
            )
        case errno.EROFS:
            return StoreDenied(
                f"the store in {url} is mounted read-only",
                hint="Mount its file system for writing, or name another store.",
            )
        case errno.EACCES | errno.EPERM:
            return StoreDenied(
                f"no access to {where}: {said}",
                hint="Check owner, mode and mount options of the store's folder.",
            )
        case errno.ESTALE | errno.ETIMEDOUT | errno.ENOTCONN | errno.EHOSTDOWN | errno.EHOSTUNREACH:
            return StoreUnreachable(
                f"{where} does not answer: {said}",
                hint="Check the mount of the file system that holds the store.",
            )
        case errno.ELOOP | errno.ENOTDIR | errno.EISDIR:
            return StoreError(
                f"{where} finds another kind of file under its name: {said}",
                hint="Only criuctl may write into the folder.",
            )
    return StoreError(
        f"{where}: {said}",
        hint="The store's folder must be on a file system on which files can be made.",
    )


def _missing(error: OSError) -> str:
    return "does not exist" if isinstance(error, FileNotFoundError) else "is not a folder"


def _make_folders(path: str) -> None:
    """Make the folder and its parents as mkdir -p does, each new one 0700 and durable."""
    missing = list(itertools.takewhile(lambda p: not os.path.lexists(p), _ancestors(path)))
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        parent = os.open(os.path.dirname(folder), _FOLDER)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _ancestors(path: str) -> Iterator[str]:
    while True:
        yield path
        path = os.path.dirname(path)


@contextmanager
def _folder(root: int, name: str, *, make: bool = False) -> Iterator[int]:
    """Yield the folder `name` ('' is the root itself) below `root`, opened without following
    links.
    """
    fd = os.dup(root)
    try:
        for part in name.split("/") if name else ():
            try:
                inner = os.open(part, _INSIDE, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                os.fsync(fd)
                inner = os.open(part, _INSIDE, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _new_temp(temps: int) -> tuple[str, int]:
    """Make a new locked temporary file; return its name and descriptor."""
    name = f"{os.getpid()}-{os.urandom(8).hex()}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=temps)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.unlink(name, dir_fd=temps)
        os.close(fd)
        raise
    return name, fd


def _remove_stale(temps: int, name: str, older_than: float) -> bool:
    """Remove one temporary file if it is old and its writer's lock is gone."""
    found = os.stat(name, dir_fd=temps, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime < older_than:
        return False
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=temps)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=temps)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _write_all(fd: int, views: Sequence[memoryview]) -> None:
    """Write all of `views`, in as few system calls as possible."""
    pending = [*views]
    if pending:
        pending[0] = pending[0][direct.write(fd, pending[0]) :]
    while pending:
        written = os.writev(fd, pending[:_VECTORS])
        done = 0
        while done < len(pending) and written >= pending[done].nbytes:
            written -= pending[done].nbytes
            done += 1
        del pending[:done]
        if written:
            pending[0] = pending[0][written:]


def _walk(folder: int, path: str, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects below `folder`, sorted.

    `path`: its name in the store ('' or ending in a slash).
    """
    with os.scandir(folder) as entries:
        # A folder sorts as its objects do: with the slash that follows it in their names.
        found = sorted(
            (e.name + "/" * e.is_dir(follow_symlinks=False), e)
            for e in entries
            if valid_name(e.name)
        )
    for part, entry in found:
        name = path + part
        if not (name.startswith(prefix) or (part.endswith("/") and prefix.startswith(name))):
            continue
        # An object deleted since the folder was read is not listed.
        with suppress(FileNotFoundError):
            if part.endswith("/"):
                inner = os.open(part[:-1], _INSIDE, dir_fd=folder)
                try:
                    yield from _walk(inner, name, prefix)
                finally:
                    os.close(inner)
            elif entry.is_file(follow_symlinks=False):
                info = os.stat(part, dir_fd=folder, follow_symlinks=False)
                yield ObjectInfo(name, info.st_size, info.st_mtime)
