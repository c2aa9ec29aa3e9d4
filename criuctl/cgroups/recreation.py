"""Control groups that are gone, made again by CRIU as they were at the dump: with their settings,
and those below them.

CRIU needs a *yard*: a folder with one entry for each hierarchy.  By default it mounts them in its
images folder, which criuctl's detached tmpfs does not allow, and those mounts would outlive a
``kill -9``.  The yard of criuctl is made of symbolic links: to where a hierarchy is mounted here,
or to a detached mount of one that is mounted nowhere, which ends with its descriptor.

This is done only for groups that the tree made: on the host and in the boot of the dump, for a tree
that comes back as itself, and not below systemd or criuctl, which make their groups themselves.
Otherwise the tree stays in criuctl's own, which is reported in that boot (`membership.put_back`).

A ``kill -9`` of criuctl in the middle leaves what was made, groups without processes, which the
next restore would take for those of another program, with wrong settings.  So a file lists those
that are being made, and the next command removes them (`sweep`).

In the same way a tree gets its cgroup namespace back, whose root is the group that its root process
was in when it was made, and threads come back into groups that their process is not in: without a
yard CRIU would try that anyway, and fail.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ..config import Config
from ..criu.images import ImageSet, read, text, write
from ..errors import PlatformError
from ..host.registry import boot_id, run_folder
from ..proc import locks
from ..proc.scratch import detached_mount
from ..session.holder.cgroup import SessionGroup
from . import membership

_IMAGE = "cgroup.img"
_YARD = "yard"
_NOTES = "groups"  # the folder of the files that list groups which are being made
_OURS = "/proc/"  # a private mount cannot be reached by another command afterwards
_BUSY = 2.0  # seconds


class GroupYard:
    """What CRIU needs to make groups again; `undo` removes those that it made."""

    def __init__(self, images: ImageSet) -> None:
        self._folder = images.folder
        self._new: list[str] = []  # groups that do not exist yet, each after those that hold it

    @property
    def path(self) -> str:
        """Return the yard's path, as CRIU can use it."""
        return _YARD

    @property
    def made(self) -> list[str]:
        """Return the groups that did not exist."""
        return list(self._new)

    def lay_out(self, stack: ExitStack) -> bool:
        """Make the yard; False if one of the tree's hierarchies cannot be reached."""
        if _IMAGE not in os.listdir(self._folder):
            return False
        mounted = {
            frozenset(name.split(",")): place
            for name, place in membership.mount_points(whole=True).items()
        }
        os.mkdir(_YARD, 0o700, dir_fd=self._folder)
        for controller in read(self._folder, _IMAGE, "CGROUP")[0].controllers:
            names = frozenset(controller.cnames)
            place = mounted.get(names) or _mount(names, stack)
            if place is None:
                return False
            entry = ",".join(name.removeprefix("name=") or "unified" for name in controller.cnames)
            os.symlink(place, f"{_YARD}/{entry}", dir_fd=self._folder)
            self._new += _absent(place, controller.dirs)
        return True

    def undo(self) -> None:
        """Remove what has been made; a process that has just ended keeps a group busy for a
        moment.
        """
        deadline = time.monotonic() + _BUSY
        for group in reversed(self._new):
            while True:
                try:
                    os.rmdir(group)
                except OSError as error:  # it was not made, or another program uses it now
                    if error.errno == errno.EBUSY and time.monotonic() < deadline:
                        time.sleep(0.01)
                        continue
                break


@contextmanager
def remade(
    config: Config, images: ImageSet, groups: Iterable[Mapping[str, str]]
) -> Iterator[GroupYard | None]:
    """Yield what lets CRIU make those of the tree's groups (hierarchy -> path, of each process)
    that are gone; None: nothing to do.

    Leaving with an exception removes them again, and so does the next command if this one is
    killed.
    """
    gone = membership.gone(
        {(hierarchy, path) for held in groups for hierarchy, path in held.items()}
    )
    with ExitStack() as stack:
        yard = GroupYard(images)
        if (
            not (gone or _has_namespace(images) or threads_apart(images))
            or any(map(membership.has_owner, gone))
            or not yard.lay_out(stack)
        ):
            yield None
            return
        if yard.made:
            stack.enter_context(_noted(config, yard.made))
        try:
            yield yard
        except BaseException:
            yard.undo()
            raise


@contextmanager
def _noted(config: Config, groups: list[str]) -> Iterator[None]:
    """Record that these groups are being made, until they are complete or removed."""
    path = run_folder(config, _NOTES) / os.urandom(8).hex()
    with locks.held(path):
        with suppress(OSError):  # no room: then it is not recorded
            path.write_text(
                json.dumps([boot_id(), *(group for group in groups if not group.startswith(_OURS))])
            )
        yield


def sweep(config: Config) -> None:
    """Remove the groups that killed restores were making; those of a tree that runs stay as long as
    it does.
    """
    now = boot_id()
    for path in locks.left(run_folder(config, _NOTES)):
        with suppress(OSError):
            try:
                boot, *groups = json.loads(path.read_text())
            except ValueError:  # killed before it could record any: it has made none
                boot, groups = now, []
            if boot != now:  # they have gone with their kernel
                groups = []
            if not any(map(_lived_in, groups)):
                for group in reversed(groups):
                    with suppress(OSError):  # it was not made
                        os.rmdir(group)
                path.unlink()


def _lived_in(group: str) -> bool:
    """Return whether a process is in the group, or in one below that was made since."""
    return any(SessionGroup(folder, 2).pids() for folder, _folders, _files in os.walk(group))


def _sets(images: ImageSet) -> Sequence[Any]:
    """Return the combinations of groups that tasks of the tree are in, other than that of the CRIU
    which dumped it.
    """
    return read(images.folder, _IMAGE, "CGROUP")[0].sets if _IMAGE in images.names() else ()


def _has_namespace(images: ImageSet) -> bool:
    """Return whether the tree was in a cgroup namespace of its own."""
    return any(member.HasField("cgns_prefix") for held in _sets(images) for member in held.ctls)


def threads_apart(images: ImageSet) -> dict[int, list[int]]:
    """Return, for each process, the threads that are in other groups than itself, by the numbers of
    the images.
    """
    found: dict[int, list[int]] = {}
    if not _sets(images):
        return found
    for entry in read(images.folder, "pstree.img", "PSTREE"):
        if len(entry.threads) < 2:
            continue
        own = read(images.folder, f"core-{entry.pid}.img", "CORE")[0]
        usual = own.thread_core.cg_set if own.thread_core.HasField("cg_set") else own.tc.cg_set
        for thread in entry.threads:
            core = (
                own if thread == entry.pid else read(images.folder, f"core-{thread}.img", "CORE")[0]
            )
            if core.thread_core.HasField("cg_set") and core.thread_core.cg_set != usual:
                found.setdefault(entry.pid, []).append(thread)
    return found


def rejoin_threads(images: ImageSet) -> list[int]:
    """Have threads come back into the groups of their process, without a yard; return those for
    which that is a change.
    """
    found = [thread for threads in threads_apart(images).values() for thread in threads]
    for thread in found:
        cores = read(images.folder, f"core-{thread}.img", "CORE")
        cores[0].thread_core.ClearField("cg_set")
        write(images.folder, f"core-{thread}.img", "CORE", cores)
    return found


def _mount(names: frozenset[str], stack: ExitStack) -> str | None:
    """Return a private mount of a hierarchy that is mounted nowhere, as a path in criuctl's
    ``/proc``; None: it does not exist.
    """
    settings: list[tuple[str, str | None]] = []
    for name in sorted(names):
        key, equals, value = name.partition("=")
        settings += [("none", None), (key, value)] if equals else [(key, None)]
    try:
        fd = detached_mount("cgroup" if any(names) else "cgroup2", settings if any(names) else [])
    except PlatformError:
        return None
    stack.callback(os.close, fd)
    return f"/proc/{os.getpid()}/fd/{fd}"


def _absent(place: str, entries: Iterable[Any]) -> list[str]:
    """Return the groups among these of CRIU's, and those below them, that are not in the hierarchy
    at `place`.
    """
    found = []
    for entry in entries:
        path = os.path.join(place, text(entry.dir_name).lstrip("/"))
        if not os.path.isdir(path):
            found.append(path)
        found += _absent(path, entry.children)
    return found
