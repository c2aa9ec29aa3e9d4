"""Files at paths, and whether root alone decides which file is there.

`trustedpath` walks each path component by component. Most paths of a tree lie in folders that only
root can change, often hundreds in one folder. `PathLookup` walks each folder once, and opens the
files in it in one step that follows no link. Only a path that lies elsewhere, or behind a link, is
walked itself.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..errors import UntrustedPath
from . import inodes, trustedpath
from .trustedpath import Component, Fault


class Found(NamedTuple):
    """The file at a path."""

    fd: int  # O_PATH
    status: os.stat_result
    fault: Fault | None  # why another user than root could have put another file there
    walked: tuple[Component, ...] = ()  # all components that were passed, where known


class PathLookup:
    """Look up many paths below one root folder; a context manager."""

    def __init__(self, root: int | None = None) -> None:
        """Open the root; `root` is a descriptor of the folder that is "/"; None for our own."""
        self.root = root
        self._top = os.open("/", os.O_PATH | os.O_CLOEXEC) if root is None else os.dup(root)
        # The components of each folder's path, if root alone decides what is in the folder.
        self._folders: dict[str, tuple[Component, ...] | None] = {}

    def __enter__(self) -> PathLookup:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._top)

    @contextmanager
    def at(self, path: str, flags: int = 0) -> Iterator[Found]:
        """Yield the file at `path`; links are followed whichever user made them. `OSError`.

        `flags`: those of an open file. With O_PATH and O_NOFOLLOW the open file may be a link at
        the end.
        """
        last = os.O_NOFOLLOW if flags & os.O_PATH and flags & os.O_NOFOLLOW else 0
        try:
            fd, straight = inodes.open_below(self._top, path, inodes.NO_LINKS, last), True
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            fd, straight = inodes.open_below(self._top, path, 0, last), False
        try:
            status = os.fstat(fd)
            way = self._root_only_path(os.path.dirname(path)) if straight else None
            if way is not None:
                yield Found(fd, status, None, (*way, trustedpath.component(fd, path)))
            else:
                yield Found(fd, status, *self._judged(path, status))
        finally:
            os.close(fd)

    @contextmanager
    def straight(self, path: str) -> Iterator[int]:
        """Yield an O_PATH descriptor of the file at `path`, if no link leads there; `OSError`."""
        fd = inodes.open_below(self._top, path, inodes.NO_LINKS)
        try:
            yield fd
        finally:
            os.close(fd)

    def is_roots(self, folder: str) -> bool:
        """Return whether root alone decides what is in a folder."""
        return self._root_only_path(folder) is not None

    def _root_only_path(self, folder: str) -> tuple[Component, ...] | None:
        if folder not in self._folders:
            self._folders[folder] = None
            walk = trustedpath.opened(folder, root=self.root)
            with suppress(UntrustedPath, OSError), walk as place:
                if place.controlled_by_root:
                    self._folders[folder] = place.walked
        return self._folders[folder]

    def _judged(
        self,
        path: str,
        status: os.stat_result,
    ) -> tuple[Fault | None, tuple[Component, ...]]:
        try:
            # only the link's text can be read through it: its folder decides
            if stat.S_ISLNK(status.st_mode):
                with trustedpath.opened(os.path.dirname(path), root=self.root) as folder:
                    return folder.way_fault, folder.walked
            with trustedpath.opened(path, root=self.root) as place:
                if not os.path.samestat(place.status, status):
                    return Fault(path, f"{path} changes while it is read", ""), ()
                return place.way_fault, place.walked
        except UntrustedPath as error:
            component = str(error.details.get("component", path))
            return Fault(component, error.message, error.hint), ()
        except OSError as error:
            return Fault(path, f"{path}: {error.strerror}", ""), ()
