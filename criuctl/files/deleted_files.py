"""Deleted files in folders that users other than root control: made here, by descriptor, not by
CRIU.

CRIU makes a deleted file again under a name next to its old one, links it to the old name, opens
that, and removes both; all of it by paths, as root.  A user who controls the folder can replace it
meanwhile by a link, and have files of their own appear where only root may write.  So if root alone
does not control the folder, the file is made in the folder that was judged (`permission`), opened,
and its name removed again, all relative to one descriptor; CRIU gets the descriptor
(`inherited_files`).

So is a deleted file that inotify or fanotify watches, where CRIU sees criuctl's /proc
(`ghostimages.point_watches`): CRIU watches the name next to the old one, and the kernel drops the
watch with the last name of a file, if nothing has opened that very name.

A device is made so only for processes that could make it themselves (CAP_MKNOD): its owner and
mode would say nothing, because this restore sets them.

It is the same file for the program: its name, deleted, is the old one, or one next to it if another
file has that name now.

Old contents of a file that has been replaced (`deleted_copies`) never have a name, not even for a
moment: they are made with O_TMPFILE, so it does not matter who controls the folder, nor whether the
process could make a file there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from ..criu.ghostimages import Ghost, Remap, is_nameless, remaps, watched_ghosts
from ..criu.heldfiles import HeldFile
from ..criu.images import ImageSet
from ..errors import RestoreFailed
from ..proc.credentials import CAP_MKNOD
from ..proc.path_control import Found, PathLookup
from .link_remaps import Provided
from .permission import HINT, Judge, Objection

_ELSEWHERE = ("/var/tmp", "/tmp")  # for contents whose own file system has no O_TMPFILE
_OPENED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_SUFFIX = ".cr_link"  # CRIU's suffix for one whose old name is another file's


def folder_objections(
    images: ImageSet,
    files: Iterable[HeldFile],
    judge: Judge,
    lookup: PathLookup,
) -> list[Objection]:
    """Report what stands against making the deleted files again in their folders."""
    by_id = {held.id: held for held in files}
    found = []
    named = (
        remap for remap in remaps(images) if remap.id in by_id and not is_nameless(images, remap)
    )
    for held in (by_id[remap.id] for remap in named):
        with ExitStack() as stack:
            folder, there = nearest_folder(lookup, held.path, stack)
            objection = judge.folder_objection(folder, there, held.uses, lookup.root)
            if objection is not None:
                found.append(objection)
    return found


def made(
    images: ImageSet,
    files: Iterable[HeldFile],
    judge: Judge,
    lookup: PathLookup,
    links: Provided,
    stack: ExitStack,
) -> dict[int, int]:
    """Make the deleted files whose folders others control; return id in files.img -> descriptor
    (O_PATH).

    `links`: the helper links that exist, which `linked` has judged.  `RestoreFailed`.
    """
    by_id = {held.id: held for held in files}
    ghosts: dict[int, int] = {}
    descriptors: dict[int, int] = {}
    watched = watched_ghosts(images) if lookup.root is None else set()
    for remap in remaps(images):
        held = by_id.get(remap.id)
        if held is None:
            continue
        with ExitStack() as now:
            folder, there = nearest_folder(lookup, held.path, now)
            nameless, roots = is_nameless(images, remap), lookup.is_roots(folder)
            if roots and not nameless and remap.id not in watched:
                continue
            objection = None
            if not nameless and not roots:
                objection = judge.folder_objection(folder, there, held.uses, lookup.root)
            if objection is not None:
                raise RestoreFailed(str(objection), hint=HINT)
            try:
                if remap.ghost and remap.target in ghosts:
                    fd = ghosts[remap.target]
                elif nameless:
                    fd = _nameless(images, remap, there.fd)
                    stack.callback(os.close, fd)
                else:
                    name = os.path.basename(held.path)
                    may_mknod = roots or _may_mknod(held, judge)
                    fd = _made(images, remap, name, there.fd, by_id, links.made, may_mknod)
                    stack.callback(os.close, fd)
            except OSError as error:
                text = f"{held.path} (deleted) cannot be made again: {error.strerror}"
                raise RestoreFailed(text) from error
        if remap.ghost:
            ghosts[remap.target] = fd
        descriptors[remap.id] = fd
    return descriptors


def linked(
    images: ImageSet,
    files: Iterable[HeldFile],
    judge: Judge,
    lookup: PathLookup,
    links: Provided,
) -> dict[int, tuple[int, int]]:
    """Judge the targets of the helper links; return id in files.img -> device and inode.
    `RestoreFailed`.
    """
    by_id = {held.id: held for held in files}
    found = {}
    for remap in remaps(images):
        helper = by_id.get(remap.target)
        if remap.ghost or helper is None or remap.id not in by_id:
            continue
        wanted = links.made.get(helper.path)
        if wanted is None:
            continue
        inode = (wanted.st_dev, wanted.st_ino)
        if inode not in links.created:
            try:
                with lookup.straight(helper.path) as fd:
                    if not os.path.samestat(os.fstat(fd), wanted):
                        raise OSError(errno.ESTALE, "another file is in its place now")
                    origin = links.origins.get(helper.path, helper.path)
                    objection = judge.link_objection(by_id[remap.id], origin, fd)
            except OSError as error:
                text = f"{by_id[remap.id].path} (deleted): {helper.path}: {error.strerror}"
                raise RestoreFailed(text) from error
            if objection is not None:
                raise RestoreFailed(str(objection), hint=HINT)
        found[remap.id] = inode
    return found


def nearest_folder(lookup: PathLookup, path: str, stack: ExitStack) -> tuple[str, Found]:
    """Return the nearest existing folder on the way to `path`."""
    folder = os.path.dirname(path)
    while True:
        try:
            return folder, stack.enter_context(lookup.at(folder))
        except OSError as error:
            if folder == "/" or error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise RestoreFailed(f"{folder}: {error.strerror}") from error
            folder = os.path.dirname(folder)


def _may_mknod(held: HeldFile, judge: Judge) -> bool:
    users = [judge.holders.get(use.pid) for use in held.uses]
    return bool(users) and all(user is not None and user.has(CAP_MKNOD) for user in users)


def _made(
    images: ImageSet,
    remap: Remap,
    name: str,
    folder: int,
    by_id: Mapping[int, HeldFile],
    links: Mapping[str, os.stat_result | None],
    may_mknod: bool,
) -> int:
    if not remap.ghost:
        return _linked(by_id[remap.target].path, name, folder, links)
    with Ghost(images, remap.target) as ghost:
        if stat.S_IFMT(ghost.entry.mode) in (stat.S_IFCHR, stat.S_IFBLK) and not may_mknod:
            text = "a device in a folder that others than root control, for a process without"
            raise OSError(errno.EPERM, f"{text} CAP_MKNOD")
        return _ghost(ghost, name, folder)


def _linked(helper: str, name: str, folder: int, links: Mapping[str, os.stat_result | None]) -> int:
    """Open the file of a helper link in this folder under the old name, which is removed again."""
    wanted = links.get(helper)
    base = os.path.basename(helper)
    for free in (name, name + _SUFFIX):
        try:
            os.link(base, free, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            continue
        fd = os.open(free, _OPENED, dir_fd=folder)
        if wanted is None or not os.path.samestat(os.fstat(fd), wanted):
            os.close(fd)
            os.unlink(free, dir_fd=folder)
            raise OSError(errno.ESTALE, "another file is in its place now", helper)
        os.unlink(free, dir_fd=folder)
        return fd
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _nameless(images: ImageSet, remap: Remap, folder: int) -> int:
    """Open a file without a name, on the file system of this folder or, if it has no O_TMPFILE, of
    another; O_PATH.
    """
    places = (f"/proc/self/fd/{folder}", *_ELSEWHERE)
    for place in places:
        try:
            contents = os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:  # read-only, or a file system without such files
            if place == places[-1]:
                raise
            continue
        try:
            with Ghost(images, remap.target) as ghost:
                ghost.write_to(contents)
                _dress(contents, ghost.entry)
            return os.open(f"/proc/self/fd/{contents}", os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(contents)
    raise AssertionError("there is always a last place")


def _ghost(ghost: Ghost, name: str, folder: int) -> int:
    """Return a descriptor (O_PATH) of a deleted file, folder, FIFO or link as it was."""
    entry = ghost.entry
    kind = stat.S_IFMT(entry.mode)
    for free in (name, name + _SUFFIX):
        try:
            contents = _make(entry, kind, free, folder)
        except FileExistsError:
            continue
        with ExitStack() as stack, ExitStack() as failed:
            if contents is not None:
                stack.callback(os.close, contents)
            fd = os.open(free, _OPENED, dir_fd=folder)
            failed.callback(os.close, fd)
            _check_made(fd, entry, contents, free)
            (os.rmdir if kind == stat.S_IFDIR else os.unlink)(free, dir_fd=folder)
            if contents is not None:  # only now: no other process can open it any more
                ghost.write_to(contents)
            if kind != stat.S_IFLNK:
                _dress(fd, entry)
            failed.pop_all()
            return fd
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _check_made(fd: int, entry: Any, contents: int | None, name: str) -> None:
    """Raise `OSError` unless it is what was just made: the folder's owner can rename files
    there.
    """
    status, kind = os.fstat(fd), stat.S_IFMT(entry.mode)
    if contents is not None:
        made_here = os.path.samestat(status, os.fstat(contents))
    else:
        made_here = status.st_uid == os.geteuid() and stat.S_IFMT(status.st_mode) == kind
        made_here = made_here and (kind == stat.S_IFDIR or status.st_nlink == 1)
        made_here = made_here and (kind == stat.S_IFLNK or not status.st_mode & 0o077)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            made_here = made_here and status.st_rdev == entry.rdev
    if not made_here:
        raise OSError(errno.ESTALE, "another file is in its place now", name)


def _make(entry: Any, kind: int, name: str, folder: int) -> int | None:
    """Make it, accessible to no other user; return a regular file's descriptor for its contents."""
    if kind == stat.S_IFREG:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=folder)
    if kind == stat.S_IFDIR:
        os.mkdir(name, 0o700, dir_fd=folder)
    elif kind == stat.S_IFIFO:
        os.mkfifo(name, 0o600, dir_fd=folder)
    elif kind == stat.S_IFLNK:
        os.symlink(entry.symlnk_target, name, dir_fd=folder)
    else:
        os.mknod(name, kind | 0o600, entry.rdev, dir_fd=folder)
    return None


def _dress(fd: int, entry: Any) -> None:
    itself = f"/proc/self/fd/{fd}"
    os.chown(itself, entry.uid, entry.gid)
    os.chmod(itself, stat.S_IMODE(entry.mode))
    if entry.HasField("atim"):
        with suppress(OSError):
            os.utime(itself, ns=(_nanoseconds(entry.atim), _nanoseconds(entry.mtim)))


def _nanoseconds(time: Any) -> int:
    return int(time.tv_sec) * 10**9 + int(time.tv_usec) * 1000
