"""The folder to which a rewind of a workspace moves what is newer than the checkpoint.

It lies next to the workspace, on the same file system, and belongs to the owner of the workspace;
each file keeps its path below it. Both folders may be a user's: every step is by descriptor, no
link is followed, and only a new, empty folder of root's is given away.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..proc import folder_walk


class AsideFolder:
    """The folder of one rewind; it is made when the first file is moved."""

    def __init__(self, workspace: str, mark: str, on_undo: Callable[[Callable[[], None]], None]):
        """`on_undo` records how to undo a step, before it is done."""
        self._workspace = workspace
        self._on_undo = on_undo
        stamp = time.strftime("%Y%m%dT%H%M%S")
        self.path = f"{workspace.rstrip('/')}.newer-{mark}-{stamp}"
        self._made: set[str] = set()

    def has(self, path: str) -> bool:
        """Return whether a path lies below the workspace."""
        return path.startswith(f"{self._workspace.rstrip('/')}/")

    def move(self, path: str, folder: int) -> str:
        """Move a file, whose open folder is `folder`, there; return its new path.

        `OSError` EXDEV where the workspace, or a part of it, is another file system than the folder
        above it.
        """
        name = os.path.basename(path)
        target = os.path.join(self.path, os.path.relpath(path, self._workspace))
        with folder_walk.folder(os.path.dirname(self.path)) as above:
            if os.fstat(above).st_dev != os.fstat(folder).st_dev:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
        with self._place(os.path.dirname(target)) as there:

            def back() -> None:
                above = os.path.dirname
                with (
                    folder_walk.folder(above(target)) as source,
                    folder_walk.folder(above(path)) as home,
                ):
                    os.rename(name, name, src_dir_fd=source, dst_dir_fd=home)

            self._on_undo(back)
            os.rename(name, name, src_dir_fd=folder, dst_dir_fd=there)
        return target

    @contextmanager
    def _place(self, path: str) -> Iterator[int]:
        """Open a folder of the tree that is moved; make what is missing of it."""
        if path not in self._made:
            if path == self.path:
                with folder_walk.folder(os.path.dirname(path)) as above:
                    self._make(path, above)
            else:
                with self._place(os.path.dirname(path)) as above:
                    self._make(path, above)
            self._made.add(path)
        with folder_walk.folder(path) as found:
            yield found

    def _make(self, path: str, above: int) -> None:
        name = os.path.basename(path)

        def back() -> None:
            with folder_walk.folder(os.path.dirname(path)) as there:
                os.rmdir(name, dir_fd=there)

        os.mkdir(name, 0o700, dir_fd=above)
        self._on_undo(back)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=above)
        try:
            now = os.fstat(fd)
            # Its place may be a user's, who can put another folder of root's there.
            if (now.st_uid, stat.S_IMODE(now.st_mode) & 0o777) != (0, 0o700) or os.listdir(fd):
                raise OSError(errno.ESTALE, "another folder is in its place now", path)
            with folder_walk.folder(self._workspace) as top:
                owner = os.fstat(top)
            os.fchown(fd, owner.st_uid, owner.st_gid)
        finally:
            os.close(fd)
