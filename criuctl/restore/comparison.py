"""Compare what the restored processes hold with what was judged, before anything runs.

In CRIU's post-restore notification all descriptors, mappings and folders are in place, and nothing
has executed.  Each file that CRIU opened by a path is read here through the process that holds it
(/proc/PID/fd, map_files, cwd, root, exe), and its device and inode are compared with those of
`criuctl.files.inherited_files`.  A difference is a veto: CRIU kills what it has restored.

What could not be judged beforehand (the tree's own mounts, what comes with its processes) is judged
here by the same rule: what its path leads to in the tree's own view must be what the process holds,
and what it may have.  A tree with several mount namespaces has a view for each (`mount_views`), and
a path is looked up in that of its file's mount.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from msgspec.structs import replace

from ..criu.heldfiles import HeldFile, Role, Use
from ..criu.procfiles import LateFile, OwnFile, about
from ..errors import NoSuchProcess, RestoreFailed
from ..files.inherited_files import Expected, Inode
from ..files.kernel_files import is_harmless, is_kernels
from ..files.permission import HINT, Judge
from ..proc import file_access
from ..proc.descriptors import open_file
from ..proc.procfs import read_text
from ..proc.reopen import reopen
from ..repairs import eventfd_semaphores
from .mount_views import Views

_ENDED = (errno.ENOENT, errno.ESRCH)  # errors of a file of /proc whose process is gone
_LINKS: Mapping[Role, str] = {"program": "exe", "working folder": "cwd", "root folder": "root"}


def compare(expected: Expected, judge: Judge, pids: Mapping[int, int], views: Views) -> None:
    """Compare what the processes hold with what is expected.

    `pids`: PID in the tree -> PID on this host.  `RestoreFailed` names the first difference.
    """
    held = _Held(pids)
    unknown: list[tuple[HeldFile, Use, Inode]] = []
    for one in expected.files:
        if eventfd_semaphores.represents_semaphore(one.path):
            continue
        wanted = expected.inodes.get(one.id)
        if wanted is None and (one.deleted or one.external):
            continue
        judged_now = wanted is None or one.path.startswith("/proc/")
        for use in one.uses:
            if use.pid not in pids:
                continue
            try:
                inode = held.by(use)
            except (OSError, NoSuchProcess):  # it is being ended; CRIU reports that
                continue
            if judged_now:
                unknown.append((one, use, inode))
            elif inode != wanted:
                raise _differs(one, use)
    if unknown:
        _judge_now(unknown, judge, views)


def take_back(expected: Expected, judge: Judge, pids: Mapping[int, int]) -> Iterator[OwnFile]:
    """Close the files of the kernel's that CRIU has opened with root's rights for processes that
    have fewer, and yield them: what is open may act with the rights of its opener.

    The process opens it again later.  Until then it has ``/`` there: once it has its credentials,
    other processes of its user may take its descriptors.  `OSError`.
    """
    for one in expected.files:
        access = file_access.access_of(one.flags)
        uses = [use for use in one.uses if use.role == "descriptor" and use.pid in pids]
        users = [judge.holders[use.pid] for use in uses if use.pid in judge.holders]
        if not access or about(one.path) or one.external or all(user.opens_all for user in users):
            continue
        with suppress(FileNotFoundError, ProcessLookupError, NoSuchProcess):  # it is being ended
            fd = os.open(f"/proc/{pids[uses[0].pid]}/fd/{uses[0].number}", os.O_PATH | os.O_CLOEXEC)
            try:
                if not is_kernels(fd) or is_harmless(one.path, fd, access):
                    continue
            finally:
                os.close(fd)
            position = open_file(pids[uses[0].pid], uses[0].number)[0]
            for use in uses:
                cloexec = bool(open_file(pids[use.pid], use.number)[1] & os.O_CLOEXEC)
                reopen(pids[use.pid], "/", os.O_RDONLY, [(use.number, cloexec)])
            yield OwnFile(one.path, one.flags, position, tuple(uses))


def compare_late(
    files: Iterable[LateFile], judge: Judge, pids: Mapping[int, int], views: Views
) -> None:
    """Judge the files of /proc that the processes have opened themselves, with root's rights; as
    `compare`.
    """
    held = _Held(pids)
    opened = []
    for file in files:
        for pid, fd, _ in file.holders:
            use = Use(pid, "descriptor", fd, file.flags)
            opened.append((HeldFile(0, file.path, 0, file.flags, (use,)), use, held.by(use)))
    if opened:
        _judge_now(opened, judge, views)


def _differs(one: HeldFile, use: Use) -> RestoreFailed:
    return RestoreFailed(
        f"PID {use.pid} ({use}) does not have the file that was at {one.path} when it was judged:"
        " something on the way there was changed while the tree was restored",
        hint="Nothing has run. Find what changes that path, then restore again.",
        pid=use.pid,
    )


def _judge_now(unknown: list[tuple[HeldFile, Use, Inode]], judge: Judge, views: Views) -> None:
    """Judge what the processes hold by what its path leads to in the tree's own view."""
    with views.opened() as opened:
        for one, use, inode in unknown:
            view, looks = opened.of(one, use)
            try:
                with looks.at(one.path, one.flags) as found:
                    if (found.status.st_dev, found.status.st_ino) != inode:
                        raise _differs(one, use)
                    objection = judge.objection(replace(one, uses=(use,)), found, view)
            except OSError as error:
                # its process has ended; outside /proc its name leads nowhere
                if error.errno in _ENDED and about(one.path):
                    continue
                raise _differs(one, use) from error
            if objection is not None:
                raise RestoreFailed(str(objection), hint=HINT, pid=use.pid)


class _Held:
    """The inodes that the processes hold, by their use."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._mapped: dict[int, tuple[list[int], list[tuple[str, str]]]] = {}
        self._seen: dict[str, Inode] = {}  # by device, inode and path, as in /proc/PID/maps

    def by(self, use: Use) -> Inode:
        """Return the inode; `OSError`, `NoSuchProcess`."""
        pid = self._pids[use.pid]
        if use.role == "mapping":
            return self._mapping(pid, use.number)
        name = f"fd/{use.number}" if use.role == "descriptor" else _LINKS[use.role]
        return _inode(f"/proc/{pid}/{name}")

    def _mapping(self, pid: int, address: int) -> Inode:
        if pid not in self._mapped:
            lines = [line.split(None, 3) for line in read_text(pid, "maps").splitlines()]
            starts = [int(line[0].partition("-")[0], 16) for line in lines]
            self._mapped[pid] = starts, [(line[0], line[3]) for line in lines]
        starts, areas = self._mapped[pid]
        span, what = areas[max(bisect_right(starts, address) - 1, 0)]
        if what not in self._seen:  # what many processes have mapped is read once
            self._seen[what] = _mapped_inode(f"/proc/{pid}/map_files/{span}", what)
        return self._seen[what]


def _mapped_inode(source: str, what: str) -> Inode:
    try:
        return _inode(source)
    except PermissionError:  # it needs a capability in the first user namespace
        device, number = what.split(None, 2)[:2]
        major, _, minor = device.partition(":")
        return os.makedev(int(major, 16), int(minor, 16)), int(number)


def _inode(source: str) -> Inode:
    status = os.stat(source)
    return status.st_dev, status.st_ino
