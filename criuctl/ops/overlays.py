"""Programs and libraries that came along (``--carry-binaries``), laid over this host's for one tree alone.

A carried file that is missing here, or is another one here, must be at its old path for the restored tree and for nobody
else.  The restore writes those files into a detached tmpfs (`laid`) and hands it to PID 1 of the tree's namespaces
(`criuctl.proc.nsinit`), which shows each at its path:

- a regular file is there: the carried one is bind-mounted over it;
- nothing is there, or something else: the nearest folder that exists is covered with a read-only overlay of the carried
  files and the folder itself.  Its sub-folders are bound back in, so that only what lies directly in it is read-only.

Read-only, because what were written there would vanish with the tree.  So a folder that the tree, or everybody, writes to is
not covered (`obstacle`); what helps is told.  Nothing on this host's disk is touched, and all of it ends with the namespace.

The mounts are known by their source (`SOURCE`): what a later dump finds mapped from them travels again, asked or not.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..checkpoint.chunks import StreamRef
from ..checkpoint.manifest import FileRecord
from ..checkpoint.reader import CheckpointReader
from ..errors import RestoreFailed
from ..proc.procfs import read_text
from ..proc.scratch import Scratch

if TYPE_CHECKING:
    from .putback import Judgement

SOURCE = "criuctl-carried"
FEATURE = "carried-binaries"  # of a manifest: mapped files with contents, which are not to be put on the disk
_DATA_LIMIT = 64 << 20  # bytes; larger files that are mapped as data only do not count as part of a program
_NEVER = ("/dev", "/proc", "/sys")


class Binaries:
    """Which of a tree's mapped files travel; `any`: some may."""

    def __init__(self, root_pid: int, *, wanted: bool) -> None:
        """`wanted`: all of them, else only those that came along themselves."""
        self._wanted = wanted
        self._mounts = [
            (_unescaped(head.split()[4]), tail.split()[1] == SOURCE)
            for head, _, tail in (line.partition(" - ") for line in read_text(root_pid, "mountinfo").splitlines())
        ]
        self.any = wanted or any(ours for _, ours in self._mounts)

    def travels(self, path: str, size: int, *, executable: bool) -> bool:
        """Whether this one does; `executable`: somebody maps it as code."""
        if not self.any or path.startswith("/dev/"):
            return False
        if self._wanted and (executable or size <= _DATA_LIMIT):
            return True
        holds = [(len(point), number, ours) for number, (point, ours) in enumerate(self._mounts) if _below(path, point)]
        return max(holds, default=(0, 0, False))[2]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


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
    make = f"Make the folder on the host that it comes to: `mkdir {os.path.join(folder, below[0])}`."
    along = f"Take it along with --with-files {os.path.join(folder, below[0])}."
    if real == "/":
        return "the root folder cannot be covered", make if len(below) > 1 else along
    if any(_below(real, never) for never in _NEVER):
        return f"nothing can be laid over {real}", along
    if os.stat(real).st_mode & stat.S_IWOTH:
        return f"everybody writes to {folder}, so it cannot be covered", make if len(below) > 1 else along
    return None


def written_into(path: str, records: Sequence[FileRecord]) -> str:
    """A file of the tree that lies directly in the folder that would be covered, and is written to; "" for none."""
    folder = os.path.realpath(folder_of(path))
    for record in records:
        if record.kind in ("written", "carried") and stat.S_ISREG(record.mode):
            if os.path.realpath(os.path.dirname(record.path)) == folder:
                return record.path
    return ""


@contextmanager
def laid(judgements: Sequence[Judgement], reader: CheckpointReader) -> Iterator[int | None]:
    """The carried files that are wanted here, in a tmpfs, with a list of what goes where; None when there are none."""
    records = [j.record for j in judgements if j.verdict == "overlaid"]
    if not records:
        yield None
        return
    with Scratch(source=SOURCE, executable=True) as scratch:
        try:
            _fill(scratch, records, reader)
        except OSError as error:
            raise RestoreFailed(f"the carried programs and libraries cannot be provided: {error.strerror}") from error
        yield scratch.fd


def _fill(scratch: Scratch, records: Sequence[FileRecord], reader: CheckpointReader) -> None:
    covers: dict[str, str] = {}  # folder -> name in the tmpfs
    for record in records:
        if needs_cover(record.path):
            covers.setdefault(os.path.realpath(folder_of(record.path)), f"cover-{len(covers)}")
    for name in covers.values():
        os.mkdir(f"{scratch.path}/{name}", 0o755)
    binds: list[tuple[str, str]] = []
    places: dict[str, FileRecord] = {}  # name in the tmpfs -> what goes there
    for number, record in enumerate(records):
        folder = folder_of(record.path)
        cover = covers.get(os.path.realpath(folder))
        if cover is not None:
            name = f"{cover}/{os.path.relpath(record.path, folder)}"
            os.makedirs(f"{scratch.path}/{os.path.dirname(name)}", 0o755, exist_ok=True)
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


def needs_cover(path: str) -> bool:
    """Whether there is no regular file at `path` over which another one can be shown."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


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
