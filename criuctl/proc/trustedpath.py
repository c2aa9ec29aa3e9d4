"""Open paths that come from outside (a process, a manifest, an archive, a peer) as root, safely.

This is the only way in which root opens such a path. A name does not show who chose what it leads
to. `opened` therefore walks a path component by component, each opened with O_PATH and O_NOFOLLOW
relative to the descriptor of the one before. It yields a `Place`: the O_PATH descriptor of the last
component, everything that the walk passed, and which component another user could have replaced. A
caller judges the descriptor and uses that descriptor (``/proc/self/fd/N``); it never opens the name
again.

A symbolic link is followed only where only root could have made or moved it: the link and all
folders before it belong to root, and no folder before it can be written by others. A sticky folder
such as /tmp is no exception for a link: a user who has a link of root's in a folder of their own
can move or hard-link it there. A *folder* of root's in a sticky folder is as safe as its own mode,
because the kernel lets no other user move it. Links of procfs are not followed, apart from those at
its top (``/proc/self``): the process chooses their targets, whichever user owns the link.

POSIX ACLs: where a file has one, the group bits of its mode are the ACL's mask, the most that any
named user or group may have. So "can be written by others" errs on the safe side without reading
the ACL (`file_access` reads it). A file system in user space (FUSE) may claim any owner, so only
one that root mounted is believed.

Nothing here blocks on a FIFO or has an effect on a device: O_PATH opens neither.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ..errors import UntrustedPath
from .mounts import read_mounts

MAX_LINKS = 40  # the kernel's limit
ROOT = frozenset({0})
_O_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FUSE, _PROC = 0x65735546, 0x9FA0  # f_type of statfs(2)
_PROC_ROOT = 1  # the inode of /proc itself
_ACL = "system.posix_acl_access"


class Component(NamedTuple):
    """A folder or link that the walk passed, or the file at its end."""

    path: str  # as the walk names it, with earlier links resolved
    status: os.stat_result
    acl: bytes = b""  # system.posix_acl_access, if it has one

    @property
    def mode(self) -> int:
        """``st_mode``."""
        return self.status.st_mode


class Fault(NamedTuple):
    """Why a user other than root could have decided what a path leads to."""

    component: str  # the path of the folder, link or file at fault
    reason: str  # a sentence that begins with the path, without a full stop
    remedy: str  # a command, or ""


class Place:
    """What a path leads to. `fd` is its O_PATH descriptor, valid inside the ``with``."""

    def __init__(
        self,
        fd: int,
        walked: tuple[Component, ...],
        chain: tuple[Component, ...],
        way_fault: Fault | None,
    ) -> None:
        self.fd = fd
        # All components that were passed, in order, with links and folders left again by "..".
        self.walked = walked
        # the folders from the root, or the start, down to the file, and the file itself
        self.chain = chain
        self.way_fault = way_fault  # why another user could have put another file there
        # Why another user could have changed the file itself.
        self.own_fault: Fault | None = None

    @property
    def path(self) -> str:
        """Its real path, relative to the root or the start of the walk."""
        return self.chain[-1].path

    @property
    def status(self) -> os.stat_result:
        """The status of the file that the descriptor is open on."""
        return self.chain[-1].status

    @property
    def fixed_by_root(self) -> bool:
        """Whether only root could put another file at this path. Any user may own its contents."""
        return self.way_fault is None

    @property
    def controlled_by_root(self) -> bool:
        """Whether, in addition, only root owns the file and may write to it."""
        return self.fault is None

    @property
    def fault(self) -> Fault | None:
        """The first component that another user controls."""
        return self.way_fault or self.own_fault

    @property
    def magic(self) -> str:
        """A path by which this process reaches the file, even after its name has changed."""
        return f"/proc/self/fd/{self.fd}"

    @contextmanager
    def reopened(
        self,
        flags: int = os.O_RDONLY,
        *,
        kinds: Collection[int] = (stat.S_IFREG, stat.S_IFDIR),
    ) -> Iterator[int]:
        """Yield a descriptor of this very inode, opened with `flags`.

        `OSError` EINVAL for a file of another kind than those in `kinds`. The kind is checked
        before the open, because opening a device or a FIFO has effects of its own.
        """
        if stat.S_IFMT(self.status.st_mode) not in kinds:
            raise OSError(errno.EINVAL, "not a file of the expected kind", self.path)
        fd = os.open(self.magic, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not os.path.samestat(os.fstat(fd), self.status):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.path)
            yield fd
        finally:
            os.close(fd)


@contextmanager
def opened(
    path: str,
    *,
    root: int | None = None,
    start: int | None = None,
    trusted: Collection[int] = ROOT,
    groups: Collection[int] = (),
    sticky_files: bool = False,
    follow_last: bool = True,
) -> Iterator[Place]:
    """Open what `path` leads to; yield a `Place`.

    `root`: a descriptor of the folder that is "/" for this path; the host's by default. `start`: a
    descriptor of the folder at which a relative path begins; the caller vouches for it, and the
    walk never leaves it by "..". `trusted`: user ids that may own the components. `groups`: group
    ids that may have write permission on them. `sticky_files`: also trust the owner of a file in a
    sticky folder, although another user may have moved or linked it there. `follow_last` False:
    open the last component itself, even if it is a link.

    Raises `UntrustedPath` for a link that may not be followed, `OSError` as open(2) would.
    """
    with _Walk(path, root, start, trusted) as walk:
        walk.groups, walk.sticky_files = groups, sticky_files
        parts = walk.parts(path)
        yield walk.place(parts, follow_last)


@contextmanager
def opened_parent(
    path: str, *, root: int | None = None, start: int | None = None, trusted: Collection[int] = ROOT
) -> Iterator[tuple[Place, str]]:
    """Yield the folder in which `path` lies, or would lie, and the last name of `path`.

    For creating, renaming and unlinking by descriptor. The last component is not looked at.
    `OSError` EINVAL if the path ends in "/", "." or "..".
    """
    folder, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    folder = folder or ("/" if path.startswith("/") else ".")
    with opened(folder, root=root, start=start, trusted=trusted) as place:
        if not stat.S_ISDIR(place.status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        yield place, name


class _Walk:
    """One walk: the descriptors from the root (or the start) down to the current folder."""

    groups: Collection[int] = ()
    sticky_files = False

    def __init__(
        self,
        path: str,
        root: int | None,
        start: int | None,
        trusted: Collection[int],
    ) -> None:
        if not path or "\0" in path:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not path.startswith("/") and start is None:
            raise OSError(errno.EINVAL, "not an absolute path", path)
        self._asked, self._root, self._trusted = path, root, trusted
        self._relative = start if not path.startswith("/") else None
        self._stack: list[tuple[int, Component]] = []  # from the top down to the current folder
        self._faults: list[Fault | None] = []  # for the way to each entry of the stack
        self._walked: list[Component] = []
        # By st_dev: whether a FUSE server that a user runs reports who owns the files.
        self._unbelievable: dict[int, bool] = {}
        self._open = ExitStack()

    def __enter__(self) -> _Walk:
        try:
            self._begin(relative=self._relative is not None)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @staticmethod
    def parts(path: str) -> list[str]:
        """Return the components of `path`, the next one last; a trailing slash means a folder."""
        path = f"{path}." if path.endswith("/") else path
        return [part for part in path.split("/") if part][::-1]

    def _begin(self, *, relative: bool) -> None:
        """Go to the top: the start of a relative path, or the root."""
        self._stack.clear()
        self._faults.clear()
        if relative and self._relative is not None:
            fd, name = os.open(".", _O_PATH | os.O_DIRECTORY, dir_fd=self._relative), "."
        elif self._root is not None:
            fd, name = os.open(".", _O_PATH | os.O_DIRECTORY, dir_fd=self._root), "/"
        else:
            fd, name = os.open("/", _O_PATH | os.O_DIRECTORY), "/"
        self._push(fd, self._component(fd, name), None)

    def _push(self, fd: int, component: Component, fault: Fault | None) -> None:
        self._open.callback(os.close, fd)
        self._stack.append((fd, component))
        self._faults.append(fault)
        self._walked.append(component)

    def _component(self, fd: int, path: str) -> Component:
        status = os.fstat(fd)
        if status.st_dev not in self._unbelievable:
            foreign = fs_type(fd) == _FUSE and _fuse_users(status.st_dev) != {"user_id=0"}
            self._unbelievable[status.st_dev] = foreign
        acl = b""
        if not stat.S_ISLNK(status.st_mode):
            try:
                acl = os.getxattr(f"/proc/self/fd/{fd}", _ACL)
            except OSError:  # the file has no ACL, or its file system has none
                pass
        return Component(path, status, acl)

    def place(self, pending: list[str], follow_last: bool) -> Place:
        """Walk the pending components."""
        links = 0
        while pending:
            name = pending.pop()
            here, folder = self._stack[-1]
            if not stat.S_ISDIR(folder.mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._asked)
            if name == ".":
                continue
            if name == "..":
                if len(self._stack) > 1:
                    self._stack.pop()
                    self._faults.pop()
                elif folder.path == ".":
                    raise UntrustedPath(
                        f"{self._asked} leads out of the folder at which it begins",
                        path=self._asked,
                    )
                continue
            fd = self._open_next(here, name)
            named = name if folder.path == "." else os.path.join(folder.path, name)
            found = self._component(fd, named)
            fault = self._faults[-1] or self._way_fault(folder, found)
            if stat.S_ISLNK(found.mode) and (pending or follow_last):
                try:
                    self._walked.append(found)
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._asked)
                    target = self._target(fd, folder, found, fault)
                finally:
                    os.close(fd)
                pending += self.parts(target)
                if target.startswith("/"):
                    self._begin(relative=False)
                continue
            self._push(fd, found, fault)
        place = Place(
            self._stack[-1][0],
            tuple(self._walked),
            tuple(one for _, one in self._stack),
            self._faults[-1],
        )
        place.own_fault = self._own_fault(place.chain[-1])
        return place

    def _open_next(self, here: int, name: str) -> int:
        try:
            return os.open(name, _O_PATH, dir_fd=here)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._asked) from None

    def _target(self, fd: int, folder: Component, link: Component, fault: Fault | None) -> str:
        """Return the target of a link that may be followed; else raise `UntrustedPath`."""
        if fault is None and link.status.st_uid not in self._trusted:
            owner = f"a link that belongs to user {link.status.st_uid}"
            fault = Fault(link.path, f"{link.path} is {owner}", "")
        if fault is None and fs_type(fd) == _PROC and folder.status.st_ino != _PROC_ROOT:
            decides = "a link of a process, which decides where it leads"
            fault = Fault(link.path, f"{link.path} is {decides}", "")
        if fault is not None:
            via = "" if fault.component == link.path else f", on which the link {link.path} lies"
            raise UntrustedPath(
                f"{self._asked}: {fault.reason}{via}",
                hint=f"Use the path that {link.path} leads to, if that is intended.",
                path=self._asked,
                component=fault.component,
            )
        return os.readlink("", dir_fd=fd)

    def _way_fault(self, folder: Component, found: Component) -> Fault | None:
        """Return why another user could have put `found` into `folder`, or None."""
        if (fault := self._owner_fault(folder)) is not None:
            return fault
        if not self._written_by_others(folder):
            return None
        if not folder.mode & stat.S_ISVTX:
            return _written(folder)
        # No user can move the folder of another user into a sticky folder; any
        # other file may have been moved or linked there.
        kept = stat.S_ISDIR(found.mode) or (self.sticky_files and not stat.S_ISLNK(found.mode))
        if not kept:
            others = "lies in a folder to which others may write"
            return Fault(found.path, f"{found.path} {others}", "")
        return self._owner_fault(found)

    def _own_fault(self, found: Component) -> Fault | None:
        fault = self._owner_fault(found)
        if fault is None and not stat.S_ISLNK(found.mode) and self._written_by_others(found):
            return _written(found)
        return fault

    def _written_by_others(self, found: Component) -> bool:
        ours = not found.acl and found.status.st_gid in self.groups
        return bool(found.mode & (stat.S_IWOTH if ours else stat.S_IWOTH | stat.S_IWGRP))

    def _owner_fault(self, found: Component) -> Fault | None:
        if found.status.st_uid not in self._trusted:
            owner = f"belongs to user {found.status.st_uid}, not to {_users(self._trusted)}"
            return Fault(
                found.path,
                f"{found.path} {owner}",
                f"chown {min(self._trusted)} {shlex.quote(found.path)}",
            )
        if self._unbelievable[found.status.st_dev]:
            provided = "is on a file system that a user provides (FUSE)"
            return Fault(found.path, f"{found.path} {provided}", "")
        return None


def _fuse_users(device: int) -> set[str]:
    """Return the ``user_id=`` options of the FUSE mounts of this device."""
    mounts = [mount for mount in read_mounts() if mount.device == device]
    fuse = [mount for mount in mounts if mount.kind.startswith("fuse")]
    return {one for mount in fuse for one in mount.settings if one.startswith("user_id=")}


def _written(found: Component) -> Fault:
    return Fault(
        found.path,
        f"{found.path} can be written by others than its owner",
        f"chmod go-w {shlex.quote(found.path)}",
    )


def _users(trusted: Collection[int]) -> str:
    return " or ".join("root" if uid == 0 else f"user {uid}" for uid in sorted(trusted))


def fs_type(fd: int) -> int:
    """Return the ``f_type`` of the file system; fstatfs(2) takes an O_PATH descriptor."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fstatfs(fd, buffer) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(ctypes.c_long.from_buffer(buffer).value)


def component(fd: int, path: str) -> Component:
    """Return a file that is open already as a component named `path`, for `file_access`."""
    try:
        acl = os.getxattr(f"/proc/self/fd/{fd}", _ACL)
    except OSError:  # the file has no ACL, or its file system has none
        acl = b""
    return Component(path, os.fstat(fd), acl)
