"""Programs and libraries that came along (``--carry-binaries``), laid over this host's for one tree
alone.

A carried file that is missing here, or is another one here, must be at its old path for the
restored tree and for no other process.  The restore writes those files into a detached tmpfs
(`laid`) and hands it to PID 1 of the tree's namespaces (`criuctl.proc.nsinit`), which shows each at
its path:

- the folder that it is in, or the nearest existing one on the way there, is covered with a
  read-only overlay of the carried files and the folder itself.  Its sub-folders are bound back in,
  so that only what lies directly in it is read-only;
- where a folder cannot be covered, or is on an overlay itself, the carried file is bind-mounted
  over the one that is there.

Covering comes first, because the kernel removes a mount from a file that is replaced, as an upgrade
of a package does, but not from the folder.  The overlay is read-only because what is written there
would vanish with the tree.  So a folder that the tree, or every user, writes to is not covered
(`obstacle`, `written_folders`); for a file that is missing there a hint says what helps.  A file
that is mapped through one overlay from another cannot be dumped (the kernel reports a path that
leads nowhere): so what came along is in the upper layer even where it is the same, and folders on
overlays are covered only for what is missing in them.  Nothing on this host's disk is touched, and
all of it ends with the namespace.

The mounts are known by their source (`SOURCE`): what a later dump finds mapped from them travels
again, asked or not.

The user who controls the path decides where it lies, and that may be the tree's own user.  So the
path is walked without links that a user could have made (`criuctl.proc.trustedpath`), the list
names the real folder and its inode, and PID 1 covers that inode or nothing.  A folder that root
alone controls takes only files that were root's, unless all of the tree is root's (`objection`):
else a set-uid program would run what the user put there.  In a tree that is not root's alone
nothing is set-uid, on any mount: otherwise an old library with a hole, kept mapped until root had
replaced it, would be as useful to an attacker as one of their own.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint.chunks import StreamRef
from ..checkpoint.file_records import FileRecord
from ..checkpoint.reader import CheckpointReader
from ..errors import RestoreFailed, UntrustedPath
from ..proc.mounts import read_mounts
from ..proc.scratch import Scratch
from ..proc.trustedpath import Fault, opened
from ..quoting import quoted

if TYPE_CHECKING:
    from .judgement import Judgement

SOURCE = "criuctl-carried"
# role of a manifest's record: mapped files with contents, which are not put on the disk
FEATURE = "carried-binaries"
# bytes; larger files that are mapped as data only do not count as part of a program
_DATA_LIMIT = 64 << 20
_NEVER = ("/dev", "/proc", "/sys")
ROOTS = frozenset({0})  # the user IDs of a tree that is root's alone
Identity = tuple[int, int]  # st_dev, st_ino


class Binaries:
    """Decides which of a tree's mapped files travel; `any`: some may."""

    def __init__(self, root_pid: int, *, wanted: bool) -> None:
        """`wanted`: all of them, else only those that came along themselves."""
        self._wanted = wanted
        self._mounts = [(mount.point, mount.source == SOURCE) for mount in read_mounts(root_pid)]
        self.any = wanted or any(carried for _, carried in self._mounts)

    def travels(self, path: str, size: int, *, executable: bool) -> bool:
        """Return whether this file travels; `executable`: it is mapped as code."""
        if not self.any or path.startswith("/dev/"):
            return False
        if self._wanted and (executable or size <= _DATA_LIMIT):
            return True
        holds = [
            (len(point), number, carried)
            for number, (point, carried) in enumerate(self._mounts)
            if _below(path, point)
        ]
        return max(holds, default=(0, 0, False))[2]


def _below(path: str, point: str) -> bool:
    return path == point or path.startswith(f"{point.rstrip('/')}/")


class Ground(NamedTuple):
    """The nearest existing folder on the way to a file, and the file if it is in there."""

    named: str  # as in the file's path
    folder: str  # without links
    status: os.stat_result
    fault: Fault | None  # why another user than root controls it
    file: os.stat_result | None = None  # the regular file, over which another one can be shown

    @property
    def identity(self) -> Identity:
        """Return the folder's device and inode."""
        return (self.status.st_dev, self.status.st_ino)


def ground_of(path: str) -> Ground:
    """Walk the way to `path` as far as it exists; `UntrustedPath`, `OSError`."""
    named = os.path.dirname(path)
    while True:
        try:
            with opened(named) as place:
                if stat.S_ISDIR(place.status.st_mode):
                    found = Ground(named, place.path, place.status, place.fault)
                    if os.path.dirname(path) == named:
                        with suppress(FileNotFoundError):
                            file = os.stat(
                                os.path.basename(path), dir_fd=place.fd, follow_symlinks=False
                            )
                            found = found._replace(
                                file=file if stat.S_ISREG(file.st_mode) else None
                            )
                    return found
        except (FileNotFoundError, NotADirectoryError):
            pass
        named = os.path.dirname(named)


def objection(record: FileRecord, uids: Collection[int]) -> tuple[str, str] | None:
    """Return why a carried file may not be shown to a tree of these users at its path, and what
    helps.
    """
    try:
        ground = ground_of(record.path)
    except UntrustedPath as error:
        return (
            f"the way there is not safe: {error.message}",
            f"Find out what the link is for. {_along(record.path)}",
        )
    if ROOTS.issuperset(uids):
        return None
    if ground.fault is None:
        others = stat.S_IWGRP | stat.S_IWOTH
        if record.uid == 0 and not record.mode & others:
            return None
        reason = (
            f"belongs to user {record.uid}"
            if record.uid
            else "could be written by others than root"
        )
        missing = os.path.join(
            ground.folder, os.path.relpath(record.path, ground.named).split("/")[0]
        )
        make = f"Make the folder as that user's: `install -d -o {record.uid:d} {quoted(missing)}`. "
        hint = _along(record.path) if ground.file is not None else make + _along(record.path)
        return f"it {reason}, and would lie in {ground.folder}, which is root's", hint
    users = set(uids) - ROOTS
    if ground.status.st_uid in users or (ground.file is not None and ground.file.st_uid in users):
        return None  # who can write there anyway
    return f"it would lie in {ground.folder}, and {ground.fault.reason}", _along(record.path)


def _along(path: str) -> str:
    return f"Take it along with --with-files {quoted(path)}."


def obstacle(path: str) -> tuple[str, str] | None:
    """Return why the folder in which `path` is missing cannot be covered, and what helps."""
    try:
        ground = ground_of(path)
    except UntrustedPath as error:
        return f"the way there is not safe: {error.message}", _along(path)
    folder, real = ground.named, ground.folder
    below = path[len(folder.rstrip("/")) + 1 :].split("/")
    make = (
        "Make the folder on the host that it comes to: `mkdir "
        f"{quoted(os.path.join(folder, below[0]))}`."
    )
    along = _along(os.path.join(folder, below[0]))
    if real == "/":
        return "the root folder cannot be covered", make if len(below) > 1 else along
    if any(_below(real, never) for never in _NEVER):
        return f"nothing can be laid over {real}", along
    if ground.status.st_mode & stat.S_IWOTH:
        return f"every user can write to {folder}, so it cannot be covered", make if len(
            below
        ) > 1 else along
    return None


def written_folders(records: Iterable[FileRecord]) -> dict[str, str]:
    """Return the folders with files that the tree writes to, each with one of those."""
    found: dict[str, str] = {}
    for record in records:
        if record.kind in ("written", "carried") and stat.S_ISREG(record.mode):
            found.setdefault(os.path.dirname(record.path), record.path)
    return {os.path.realpath(folder): path for folder, path in found.items()}


def is_file(path: str) -> bool:
    """Return whether it is a regular file, over which another one can be shown."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def laid(
    judgements: Sequence[Judgement], reader: CheckpointReader, uids: Collection[int] = ROOTS
) -> Iterator[int | None]:
    """Yield the carried files that are needed here, in a tmpfs, with a list of their places; None
    if there are none.

    `uids`: the users of the tree.
    """
    if not any(j.verdict == "overlaid" for j in judgements):
        yield None
        return
    set_uid = ROOTS.issuperset(uids)
    with Scratch(source=SOURCE, executable=True, set_uid=set_uid) as scratch:
        try:
            _fill(scratch, judgements, reader, uids)
        except UntrustedPath as error:
            raise RestoreFailed(error.message, hint=error.hint) from error
        except OSError as error:
            raise RestoreFailed(
                f"the carried programs and libraries cannot be provided: {error.strerror}"
            ) from error
        yield scratch.fd


def _fill(
    scratch: Scratch,
    judgements: Sequence[Judgement],
    reader: CheckpointReader,
    uids: Collection[int],
) -> None:
    written = written_folders(j.record for j in judgements)
    wanted = [j.record for j in judgements if j.verdict == "overlaid"]
    same = [
        j.record
        for j in judgements
        if j.verdict == "same" and j.record.kind == "mapped" and j.record.data is not None
    ]
    on_overlays = _overlay_devices()
    grounds: dict[str, Ground] = {}  # as they are now; PID 1 compares the inodes
    covers: dict[str, tuple[str, Ground]] = {}  # folder -> name in the tmpfs, and the folder
    for record in wanted:
        # judged before, but a folder may have been moved since
        if (problem := objection(record, uids)) is not None:
            raise RestoreFailed(
                f"{record.path} cannot be shown to the tree: {problem[0]}", hint=problem[1]
            )
        ground = grounds[record.path] = ground_of(record.path)
        possible = (
            obstacle(record.path) is None
            and ground.folder not in written
            and ground.status.st_dev not in on_overlays
        )
        if possible or ground.file is None:
            covers.setdefault(ground.folder, (f"cover-{len(covers)}", ground))
    for name, _ground in covers.values():
        os.mkdir(f"{scratch.path}/{name}", 0o755)
    binds: list[tuple[str, str, Identity]] = []
    places: dict[str, FileRecord] = {}  # name in the tmpfs -> what goes there
    for number, record in enumerate([*wanted, *same]):
        if number >= len(wanted) and objection(record, uids) is not None:
            continue  # it is the same here, and need not come along
        ground = grounds.get(record.path) or ground_of(record.path)
        if ground.folder in covers:
            name = f"{covers[ground.folder][0]}/{os.path.relpath(record.path, ground.named)}"
            os.makedirs(f"{scratch.path}/{os.path.dirname(name)}", 0o755, exist_ok=True)
        elif number >= len(wanted) or ground.file is None:
            continue
        else:
            name = f"file-{number}"
            here = (ground.file.st_dev, ground.file.st_ino)
            binds.append((name, os.path.join(ground.folder, os.path.basename(record.path)), here))
        places[name] = record
    _write(scratch.path, places, reader)
    # the overlay's root gets the attributes of its uppermost layer
    for name, ground in covers.values():
        os.chown(f"{scratch.path}/{name}", ground.status.st_uid, ground.status.st_gid)
        os.chmod(f"{scratch.path}/{name}", stat.S_IMODE(ground.status.st_mode))
    deepest_first = sorted(
        ((name, folder, ground.identity) for folder, (name, ground) in covers.items()),
        key=lambda cover: -cover[1].count("/"),
    )
    order = {
        "source": SOURCE,
        "set_uid": ROOTS.issuperset(uids),
        "binds": binds,
        "covers": deepest_first,
    }
    with open(f"{scratch.path}/list", "w") as file:
        json.dump(order, file)


def _overlay_devices() -> set[int]:
    """Return ``st_dev`` of every overlay that is mounted here."""
    return {mount.device for mount in read_mounts() if mount.kind == "overlay"}


def _write(folder: str, places: dict[str, FileRecord], reader: CheckpointReader) -> None:
    from .put_back import dress  # this module is its base

    placements: list[tuple[StreamRef, int, int]] = []
    try:
        for name, record in places.items():
            fd = os.open(
                f"{folder}/{name}",
                os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
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
