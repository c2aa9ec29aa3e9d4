"""Walk to a folder component by component, so that no other user can redirect us.

A user who may write in a folder can replace its contents by symbolic links. What root then creates
by path, or gives to an owner, could be in a place where only root may write. So a link is followed
only if only root, or our user, can have put it there, or if its target belongs to the user who can:
that user may write there anyway. Once a folder is open, its descriptor cannot be redirected any
more.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .syscalls import handle_of, open_by_handle

_LINKS = 40  # per path; the kernel's limit
PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignLink(PermissionError):
    """A link that is not followed."""

    def __init__(self, path: str, uid: int) -> None:
        super().__init__(
            errno.EACCES,
            (
                f"{path} is a symbolic link that user {uid} can have put there, to what is "
                "another user's"
            ),
            path,
        )


@contextmanager
def folder(path: str, root: int | None = None) -> Iterator[int]:
    """Yield a descriptor of the folder `path` for ``dir_fd=``.

    `ForeignLink`, and every other `OSError`. With `root`, links are resolved as a process does
    whose root is that folder: every link ends up at or below it.
    """
    top = os.open("/", PLACE) if root is None else os.dup(root)
    try:
        fd = _Walk(top).go(os.dup(top), path)
    finally:
        os.close(top)
    try:
        yield fd
    finally:
        os.close(fd)


def handle(fd: int) -> str:
    """Return the handle by which `by_handle` finds an open file again.

    "" if its file system has none, for example an overlay.
    """
    try:
        kind, found = handle_of(fd)
    except OSError:
        return ""
    return f"{kind}:{found.hex()}"


@contextmanager
def by_handle(handle: str, sibling: str) -> Iterator[int | None]:
    """Yield a descriptor (``O_PATH``) of a file of any kind by its handle.

    `sibling`: any folder on the same file system. None if the file has no name any more.
    """
    fd = None
    kind, _, packed = handle.partition(":")
    with suppress(OSError):  # ESTALE: the file does not exist any more
        if packed:
            with folder(sibling) as here:
                mount = os.open(
                    f"/proc/self/fd/{here}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                )
                try:
                    fd = open_by_handle(mount, int(kind), bytes.fromhex(packed))
                finally:
                    os.close(mount)
    try:
        yield fd if fd is not None and os.fstat(fd).st_nlink else None
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def place(parts: Sequence[str], folder: int) -> Iterator[int]:
    """Yield a descriptor (``O_PATH``) of the end of this path from a folder.

    No link is followed; `OSError`.
    """
    fd = os.dup(folder)
    try:
        for part in parts:
            inner = os.open(part, PLACE, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def trail(path: str, root: int) -> Iterator[str]:
    """Yield the paths that `path` leads over, for a process whose root is the folder `root`.

    These are all links that end the path, and the target of the last one, each by its name without
    links on the way. Nothing for a file that does not exist. `ForeignLink`, and every other
    `OSError`.
    """
    makers: set[int] = set()  # the users who can have put there the links so far
    for _ in range(_LINKS):
        base, name = os.path.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            base, name = path, ""
        with folder(base, root) as above:
            try:
                there = os.open(name or ".", PLACE, dir_fd=above)
            except FileNotFoundError:
                return
            try:
                status = os.fstat(there)
                if others := makers - {0, os.geteuid(), status.st_uid}:
                    raise ForeignLink(path, others.pop())
                base = _own_name(above, root) or base
                yield os.path.join(base, name) if name else base
                if not stat.S_ISLNK(status.st_mode):
                    return
                makers |= {status.st_uid, os.fstat(above).st_uid}
                path = os.path.join(base, os.readlink("", dir_fd=there))
            finally:
                os.close(there)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _own_name(fd: int, root: int) -> str:
    """Return the path of a folder below `root`, without links; "" if it is unknown."""
    top, path = (os.readlink(f"/proc/self/fd/{one}").rstrip("/") for one in (root, fd))
    if path != top and not path.startswith(f"{top}/"):
        return ""
    path = path[len(top) :] or "/"
    with suppress(OSError), folder(path, root) as found:
        if os.path.samestat(os.fstat(found), os.fstat(fd)):
            return path
    return ""


def regular(path: str, folder: int | None = None) -> int:
    """Return a descriptor to read a regular file with; `OSError`, also for a link.

    A FIFO put in its place does not block. Without `folder`, links of other users on the way are
    not followed, either.
    """
    if folder is None:
        with _folder(os.path.dirname(path)) as found:
            return regular(os.path.basename(path), found)
    itself = os.open(path, PLACE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(itself).st_mode):
            raise OSError(errno.ESTALE, "it is not a regular file any more", path)
        return os.open(f"/proc/self/fd/{itself}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(itself)


_folder = folder  # where a parameter has that name


class _Walk:
    def __init__(self, top: int) -> None:
        self.top = top
        self.links = 0

    def go(self, fd: int, path: str) -> int:
        """Return the target of `path` from the folder `fd`, which is closed."""
        try:
            for part in path.split("/"):
                inner = self._step(fd, part)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _step(self, fd: int, part: str) -> int:
        if part == ".." and os.path.samestat(os.fstat(fd), os.fstat(self.top)):
            part = "."
        inner = os.open(part or ".", PLACE, dir_fd=fd)
        status = os.fstat(inner)
        if stat.S_ISDIR(status.st_mode):
            return inner
        try:
            if not stat.S_ISLNK(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part)
            target = os.readlink("", dir_fd=inner)
        finally:
            os.close(inner)
        self.links += 1
        if self.links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part)
        inner = self.go(os.dup(self.top if target.startswith("/") else fd), target)
        others = {status.st_uid, os.fstat(fd).st_uid} - {0, os.geteuid(), os.fstat(inner).st_uid}
        if others:
            os.close(inner)
            raise ForeignLink(
                f"{os.readlink(f'/proc/self/fd/{fd}').rstrip('/')}/{part}", others.pop()
            )
        return inner
