"""Programs and libraries that came along (``--carry-binaries``), laid over this host's for one tree alone.

A carried file that is missing here, or is another one here, must be at its old path for the restored tree and for nobody
else.  The restore writes those files into a detached tmpfs (`laid`) and hands it to PID 1 of the tree's namespaces
(`criuctl.proc.nsinit`), which shows each at its path:

- the folder that it is in, or the nearest on the way there that exists, is covered with a read-only overlay of the carried files
  and the folder itself.  Its sub-folders are bound back in, so that only what lies directly in it is read-only;
- where a folder cannot be covered, or is on an overlay itself, the carried file is bind-mounted over the one that is there.

Covering comes first, because the kernel takes a mount away from a file that somebody replaces, as an upgrade of a package does,
but not from the folder.  Read-only, because what were written there would vanish with the tree.  So a folder that the tree,
or everybody, writes to is not covered (`obstacle`, `written_folders`); what helps where a file is missing is told.
A file that is mapped through one overlay from another cannot be dumped (the kernel tells a path that leads nowhere): so what came
along is in the upper layer even where it is the same, and folders on overlays are covered only for what is missing in them.
Nothing on this host's disk is touched, and all of it ends with the namespace.

The mounts are known by their source (`SOURCE`): what a later dump finds mapped from them travels again, asked or not.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...checkpoint.chunks import StreamRef
from ...checkpoint.manifest import FileRecord
from ...checkpoint.reader import CheckpointReader
from ...errors import RestoreFailed
from ...proc.mounts import read_mounts
from ...proc.scratch import Scratch
from ...quoting import quoted

if TYPE_CHECKING:
    from .judgement import Judgement

SOURCE = "criuctl-carried"
FEATURE = "carried-binaries"  # of a manifest: mapped files with contents, which are not to be put on the disk
_DATA_LIMIT = 64 << 20  # bytes; larger files that are mapped as data only do not count as part of a program
_NEVER = ("/dev", "/proc", "/sys")


class Binaries:
    """Which of a tree's mapped files travel; `any`: some may."""

    def __init__(self, root_pid: int, *, wanted: bool) -> None:
        """`wanted`: all of them, else only those that came along themselves."""
        self._wanted = wanted
        self._mounts = [(mount.point, mount.source == SOURCE) for mount in read_mounts(root_pid)]
        self.any = wanted or any(ours for _, ours in self._mounts)

    def travels(self, path: str, size: int, *, executable: bool) -> bool:
        """Whether this one does; `executable`: somebody maps it as code."""
        if not self.any or path.startswith("/dev/"):
            return False
        if self._wanted and (executable or size <= _DATA_LIMIT):
            return True
        holds = [(len(point), number, ours) for number, (point, ours) in enumerate(self._mounts) if _below(path, point)]
        return max(holds, default=(0, 0, False))[2]


def _below(path: str, point: str) -> bool:
    return path == point or path.startswith(f"{point.rstrip('/')}/")


def folder_of(path: str) -> str:
    """The nearest folder on the way to `path` that exists here, named as in `path`."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def obstacle(path: str) -> tuple[str, str] | None:
    """Why the folder in which `path` is missing cannot be covered, and what helps."""
    folder = folder_of(path)
    real = os.path.realpath(folder)
    below = path[len(folder.rstrip("/")) + 1 :].split("/")
    make = f"Make the folder on the host that it comes to: `mkdir {quoted(os.path.join(folder, below[0]))}`."
    along = f"Take it along with --with-files {quoted(os.path.join(folder, below[0]))}."
    if real == "/":
        return "the root folder cannot be covered", make if len(below) > 1 else along
    if any(_below(real, never) for never in _NEVER):
        return f"nothing can be laid over {real}", along
    if os.stat(real).st_mode & stat.S_IWOTH:
        return f"everybody writes to {folder}, so it cannot be covered", make if len(below) > 1 else along
    return None


def written_folders(records: Iterable[FileRecord]) -> dict[str, str]:
    """The folders in which files of the tree lie that are written to, each with one of those."""
    found: dict[str, str] = {}
    for record in records:
        if record.kind in ("written", "carried") and stat.S_ISREG(record.mode):
            found.setdefault(os.path.dirname(record.path), record.path)
    return {os.path.realpath(folder): path for folder, path in found.items()}


def is_file(path: str) -> bool:
    """Whether there is a regular file, over which another one can be shown."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def laid(judgements: Sequence[Judgement], reader: CheckpointReader) -> Iterator[int | None]:
    """The carried files that are wanted here, in a tmpfs, with a list of what goes where; None when there are none."""
    if not any(j.verdict == "overlaid" for j in judgements):
        yield None
        return
    with Scratch(source=SOURCE, executable=True) as scratch:
        try:
            _fill(scratch, judgements, reader)
        except OSError as error:
            raise RestoreFailed(f"the carried programs and libraries cannot be provided: {error.strerror}") from error
        yield scratch.fd


def _fill(scratch: Scratch, judgements: Sequence[Judgement], reader: CheckpointReader) -> None:
    written = written_folders(j.record for j in judgements)
    wanted = [j.record for j in judgements if j.verdict == "overlaid"]
    same = [j.record for j in judgements if j.verdict == "same" and j.record.kind == "mapped" and j.record.data is not None]
    on_overlays = _overlay_devices()
    covers: dict[str, str] = {}  # folder -> name in the tmpfs
    for record in wanted:
        folder = os.path.realpath(folder_of(record.path))
        possible = obstacle(record.path) is None and folder not in written and os.stat(folder).st_dev not in on_overlays
        if possible or not is_file(record.path):
            covers.setdefault(folder, f"cover-{len(covers)}")
    for name in covers.values():
        os.mkdir(f"{scratch.path}/{name}", 0o755)
    binds: list[tuple[str, str]] = []
    places: dict[str, FileRecord] = {}  # name in the tmpfs -> what goes there
    for number, record in enumerate([*wanted, *same]):
        folder = folder_of(record.path)
        cover = covers.get(os.path.realpath(folder))
        if cover is not None:
            name = f"{cover}/{os.path.relpath(record.path, folder)}"
            os.makedirs(f"{scratch.path}/{os.path.dirname(name)}", 0o755, exist_ok=True)
        elif number >= len(wanted):
            continue
        else:
            name = f"file-{number}"
            binds.append((name, record.path))
        places[name] = record
    _write(scratch.path, places, reader)
    for folder, name in covers.items():  # the overlay's root is like its uppermost layer
        like = os.stat(folder)
        os.chown(f"{scratch.path}/{name}", like.st_uid, like.st_gid)
        os.chmod(f"{scratch.path}/{name}", stat.S_IMODE(like.st_mode))
    deepest_first = sorted(((name, folder) for folder, name in covers.items()), key=lambda cover: -cover[1].count("/"))
    with open(f"{scratch.path}/list", "w") as file:
        json.dump({"source": SOURCE, "binds": binds, "covers": deepest_first}, file)


def _overlay_devices() -> set[int]:
    """``st_dev`` of every overlay that is mounted here."""
    return {mount.device for mount in read_mounts() if mount.kind == "overlay"}


def _write(folder: str, places: dict[str, FileRecord], reader: CheckpointReader) -> None:
    from .putback import dress  # which judges by this module

    placements: list[tuple[StreamRef, int, int]] = []
    try:
        for name, record in places.items():
            fd = os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if record.data is None:
                raise RestoreFailed(f"{record.path} did not come along")
            placements.append((record.data, fd, 0))
            os.ftruncate(fd, record.size)
        reader.write_to(placements)
    finally:
        for _data, fd, _offset in placements:
            os.close(fd)
    for name, record in places.items():
        dress(f"{folder}/{name}", record)
