"""A restore whose tree finds a folder, its workspace, at another place.

Everything in the manifest and in CRIU's images that names a path in the folder is made to name the
same path in the other one: open, mapped and deleted files, working folders, unix sockets. So the
restore judges, opens and compares the files there, and a later dump records them there.

Paths that the program keeps in its memory still name the old place. So the folder is shown there,
too, in the mount namespace of the tree alone (`Moves`), from when all is restored. What the program
opens by such a path later is recorded by it at the next dump, together with where the folder is
shown, and moved to the folder's real place by the restore after that. Not moved are watches
(inotify), which are of inodes.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.manifest import Manifest
from ..criu.images import ImageSet, path_of
from ..errors import Damaged, PreflightRefused

_LONGEST = 107  # bytes of a unix socket's path


class Relocation(Struct, frozen=True):
    """From where to where; both absolute and plain."""

    old: str
    new: str

    def path(self, path: str) -> str:
        """Return where this path is then."""
        if path == self.old or path.startswith(f"{self.old}/"):
            return self.new + path[len(self.old) :]
        return path

    def manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the paths changed.

        `Manifest.inodes` is left as it is: the files at the new place are other inodes.
        """
        holder = manifest.holder
        return replace(
            manifest,
            root=self._process(manifest.root) if manifest.root is not None else None,
            processes=tuple(self._process(one) for one in manifest.processes),
            holder=replace(holder, workspace=self.path(holder.workspace)) if holder else None,
            connections=tuple(self._socket(one) for one in manifest.connections),
            files=tuple(
                replace(one, path=self.path(one.path), database=self.path(one.database))
                for one in manifest.files
            ),
            links=tuple(
                replace(one, path=self.path(one.path), sibling=self.path(one.sibling), handle="")
                if self.path(one.path) != one.path
                else one
                for one in manifest.links
            ),
            fifos=tuple(replace(one, path=self.path(one.path)) for one in manifest.fifos),
            external=tuple(replace(one, path=self.path(one.path)) for one in manifest.external),
        )

    def images(self, images: ImageSet) -> None:
        """Change CRIU's images; `PreflightRefused` for a path that cannot be changed."""
        entries = images.files()
        for entry in entries:
            if entry.HasField("reg"):
                self._file(entry.reg)
            elif entry.HasField("usk"):
                self._bound(entry.usk)
        images.write_files(entries)

    def _process(self, process: Any) -> Any:
        return replace(process, cwd=self.path(process.cwd), exe=self.path(process.exe))

    def _socket(self, record: Any) -> Any:
        if record.family != "unix":
            return record
        return replace(record, local=self.path(record.local))

    def _file(self, reg: Any) -> None:
        path = path_of(reg)
        if (new := self.path(path)) == path:
            return
        if not isinstance(reg.name, str):  # other names cannot be put into an image
            raise PreflightRefused(
                f"{path}: its name is not UTF-8, so the copy cannot have it elsewhere",
                hint="Fork without --fork-workspace, or rename it.",
            )
        reg.name = new if reg.name.startswith("/") else new.lstrip("/")

    def _bound(self, usk: Any) -> None:
        """Change the path that a unix socket of the tree is bound to; a peer keeps its own."""
        if usk.HasField("name_dir"):
            usk.name_dir = self.path(usk.name_dir)
        name = os.fsdecode(usk.name.rstrip(b"\0"))
        if not name.startswith("/") or (new := self.path(name)) == name:
            return
        nul = usk.name[len(usk.name.rstrip(b"\0")) :]
        if len(os.fsencode(new)) > _LONGEST:
            raise PreflightRefused(
                f"{new}: is too long for the path of a unix socket",
                hint="Fork with names that are shorter (--prefix), or without --fork-workspace.",
            )
        usk.name = os.fsencode(new) + nul


class Moves(Struct, frozen=True):
    """What one restore moves, one after the other, and shows: (the folder, where)."""

    relocations: tuple[Relocation, ...] = ()
    shown: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, asked: Relocation | None) -> Moves:
        """Return those of a checkpoint, and `asked`, which comes last."""
        holder = manifest.holder
        folder, points = (holder.workspace, holder.shown) if holder is not None else ("", ())
        for point in points:
            _check_shown(folder, point)
        moves = tuple(Relocation(point, folder) for point in points)
        if asked is not None:
            points, folder = (*points, asked.old), asked.new
            moves = (*moves, asked)
        return cls(moves, tuple((folder, point) for point in points))


def _check_shown(folder: str, point: str) -> None:
    """Raise unless a fork may have made one folder for the other: a manifest must not cover any
    folder of the host, which set-user-ID programs read, with another one.
    """
    if not folder.startswith(f"{point}.") or "/" in folder[len(point) :]:
        raise Damaged(f"{folder!r} is not the workspace of a copy of {point!r}")
    for path in (folder, point):
        try:
            status = os.lstat(path)
        except OSError as error:
            raise PreflightRefused(
                f"{path}: the workspace of the copy, or that of its original: {error.strerror}",
                hint="Bring it here: `mkdir -p`, or `criuctl migrate` with the workspace.",
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.lstat(folder).st_uid:
            raise PreflightRefused(
                f"{path} is no folder of the user of {folder}, which the copy finds there",
                hint="Move it away, and make a folder of that user.",
            )
