"""Arrange deleted folders in CRIU's images so that CRIU can make and remove all of them.

A deleted file or folder that was open is a *ghost*: CRIU makes it before it opens anything, and
removes it when all processes have it. It does both in the order of ``remap-fpath.img``, which is
that of the dump, and for folders it is wrong in four ways:

- It removes a folder with rmdir(2): a ghost that it made inside is still there if it comes later.
- It makes a folder under its own name, even if the name is taken: a folder of that name that was
  made since gets the deleted one's owner and mode, and is removed if it is empty; of two deleted
  folders of one name there is only one.
- It makes missing parent folders, and leaves them behind.
- It fails where a file now has the name of a parent folder.

So before a restore the images are edited: files come first and then folders, the innermost first,
so that the content of a folder is removed before it. A name that is taken gets the suffix that CRIU
itself has for taken names of files, and the missing parent folders become deleted ones, too, which
no process has open. The program sees a deleted folder of that name either way.

Where CRIU makes the tree's mounts (`own_mounts`), what is at a path then is unknown here: there the
host's folders only show which names to avoid.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from .ghostimages import Ghost
from .images import REMAP_GHOST, ImageSet, path_of, read, write

_IMAGE, _KIND = "remap-fpath.img", "REMAP_FPATH"
_DEEPEST = 4096  # no path has so many folders
_SUFFIX = ".cr_link"  # CRIU's own, for a name that another file has


def arrange(images: ImageSet, *, own_mounts: bool) -> list[str]:
    """Edit the images; return the folders that CRIU will make, the innermost first.

    They must be removed when the restore has failed.
    """
    remaps = read(images.folder, _IMAGE, _KIND) if images.size(_IMAGE) else []
    files = images.files() if remaps else []
    regular = {entry.id: entry for entry in files if entry.HasField("reg")}
    ghosts = [e for e in remaps if e.remap_type == REMAP_GHOST and e.orig_id in regular]
    if not ghosts:
        return []
    heads = {number: _head(images, number) for number in {entry.remap_id for entry in ghosts}}
    folders: dict[int, str] = {}  # number of the ghost -> where CRIU makes it
    for ghost in ghosts:
        reg = regular[ghost.orig_id].reg
        path = path_of(reg) if own_mounts else _past_files(path_of(reg))
        if stat.S_ISDIR(heads[ghost.remap_id].mode):
            path = folders.setdefault(ghost.remap_id, _free(path, folders.values()))
        # other names have no place in images
        if path != path_of(reg) and isinstance(reg.name, str):
            reg.name = _as(path, reg.name)
    if not own_mounts:
        origins = {folders[g.remap_id]: g for g in ghosts if g.remap_id in folders}
        for path, ghost in _between(origins).items():
            number = max(heads) + 1
            entry = _copy(regular[ghost.orig_id])
            entry.id = max(e.id for e in files) + 1
            entry.reg.id, entry.reg.name = entry.id, _as(path, entry.reg.name)
            files.append(entry)
            heads[number], folders[number] = heads[ghost.remap_id], path
            write(images.folder, f"ghost-file-{number:x}.img", "GHOST_FILE", [heads[number]])
            remaps.append(_copy(ghost))
            remaps[-1].orig_id, remaps[-1].remap_id = entry.id, number
    images.write_files(files)

    def place(remap: Any) -> int:
        """Sort files first, then folders, the innermost first."""
        folder = folders.get(remap.remap_id) if remap.remap_type == REMAP_GHOST else None
        return -folder.count("/") if folder is not None else -_DEEPEST

    write(images.folder, _IMAGE, _KIND, sorted(remaps, key=place))
    return sorted(folders.values(), key=lambda path: -path.count("/"))


def _as(path: str, name: str) -> str:
    """Return a path in the images' form: with a slash at its beginning, or without."""
    return path if name.startswith("/") else path[1:]


def _past_files(path: str) -> str:
    """Return the path, with other names for parent folders whose names are taken by other files."""
    place = ""
    *above, name = path[1:].split("/")
    for part in above:
        place += f"/{part}"
        while os.path.lexists(place) and not os.path.isdir(place):
            place += _SUFFIX
    return f"{place}/{name}"


def _free(path: str, taken: Iterable[str]) -> str:
    """Return a name for a folder that neither exists nor is taken."""
    while path in taken or os.path.lexists(path):
        path += _SUFFIX
    return path


def _between(origins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the missing parent folders of these -> the ghost of one below.

    Without those that are ghosts themselves.
    """
    found: dict[str, Any] = {}
    for path, ghost in origins.items():
        while not os.path.lexists(path := os.path.dirname(path)):
            if path not in origins:
                found[path] = ghost
    return found


def _head(images: ImageSet, number: int) -> Any:
    """Return the description of a ghost."""
    with Ghost(images, number) as ghost:
        return ghost.entry


def _copy(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())
