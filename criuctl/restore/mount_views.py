"""The mount namespaces of a restored tree, each seen from its root folder.

A path in the images belongs to one mount namespace.  If a tree has several (`MountSpaces`), the
same path means another file in each.  The view of a namespace is the root folder of a process that
is in it and in no chroot: `check` refuses nested namespaces without such a process
(`criuctl.dump.checks.namespaces`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from ..criu.heldfiles import HeldFile, Use
from ..criu.mountspaces import MountSpaces
from ..errors import RestoreFailed
from ..proc.path_control import PathLookup


class Views:
    """Finds the view in which a file's path is to be looked up."""

    def __init__(self, spaces: MountSpaces, pids: Mapping[int, int], root: int) -> None:
        """`pids`: PID in the tree -> PID on this host; `root`: PID of its root on this host."""
        self._spaces, self._pids, self._root = spaces, pids, root

    @contextmanager
    def opened(self) -> Iterator[OpenedViews]:
        """Yield the views; they stay open inside."""
        with ExitStack() as stack:
            yield OpenedViews(self, stack)

    def space_of(self, one: HeldFile, use: Use) -> int:
        """Return the mount namespace, by its number in the images, in which the path of a held file
        is looked up.
        """
        return self._spaces.of(one.mount, use.pid)

    def top(self, space: int) -> int:
        """Return a process of a namespace that is in no chroot; `RestoreFailed` if there is
        none.
        """
        inside = [
            self._pids[pid]
            for pid, number in self._spaces.by_task.items()
            if number == space and pid in self._pids
        ]
        # with one mount namespace, the root process's view counts
        if self._root in inside or not inside:
            return self._root
        for pid in inside:
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/root") == "/":
                    return pid
        raise RestoreFailed(
            f"PID {inside[0]}: the files of its mount namespace cannot be checked, as each "
            "process in it is in a chroot",
            hint="Dump the tree again, with a process in that namespace that is in no chroot.",
            pid=inside[0],
        )


class OpenedViews:
    """An open root folder for each mount namespace, and the lookup of paths below it."""

    def __init__(self, views: Views, stack: ExitStack) -> None:
        self._views, self._stack = views, stack
        self._open: dict[int, tuple[int, PathLookup]] = {}

    def of(self, one: HeldFile, use: Use) -> tuple[int, PathLookup]:
        """Return the view for this file; `RestoreFailed` if there is none."""
        space = self._views.space_of(one, use)
        if space not in self._open:
            view = os.open(f"/proc/{self._views.top(space)}/root", os.O_PATH | os.O_CLOEXEC)
            self._stack.callback(os.close, view)
            self._open[space] = view, self._stack.enter_context(PathLookup(view))
        return self._open[space]
