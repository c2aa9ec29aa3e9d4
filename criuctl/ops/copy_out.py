"""Take files out of a checkpoint: ``cp REF:PATH DEST``, and their list for ``show REF --files``.

A checkpoint holds files of its workspace and files that were carried along. They are written to a
place that the caller names, as new files of the caller's, with the permission bits and times that
they had, without set-user-ID bits, owners and attributes: taking a file out gives no user a right.
Nothing is overwritten. A copy is complete under its name or not there: it is made under another
name first.

No name of a checkpoint leads out of the copy: every part of a path is opened without following
links, below a new folder of the caller's.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from msgspec import Struct

from ..checkpoint.file_records import FileRecord
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..config import Config
from ..errors import Conflict, NotFound, UntrustedPath, UsageError
from ..files import workspace_index
from ..host import rights
from ..host.rights import roles_of
from ..proc import folder_walk
from ..quoting import quoted
from ..report import Reporter
from .inspect import opened

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Copied(Struct, frozen=True):
    """What was taken out; paths are those of the copies' top."""

    source: str
    target: str
    files: int
    bytes: int
    left_out: int = 0  # FIFOs

    def to_dict(self) -> dict[str, str | int]:
        """Return its JSON object."""
        return {
            "source": self.source,
            "target": self.target,
            "files": self.files,
            "bytes": self.bytes,
            "left_out": self.left_out,
        }


def split(argument: str) -> tuple[str, str]:
    """Return REF and PATH of ``REF:PATH``; `UsageError`."""
    ref, colon, path = argument.partition(":")
    if not ref or not colon or not path or "\0" in path:
        raise UsageError(f"{argument!r} is no file of a checkpoint", hint="Write REF:PATH.")
    return ref, path


def held_files(manifest: Manifest, reader: CheckpointReader) -> dict[str, FileRecord]:
    """Return path -> record of every file whose contents, or target, the checkpoint has."""
    found = {
        record.path: record
        for record in manifest.files
        if record.data is not None or record.kind == "carried"
    }
    if manifest.workspace is not None:
        found |= {r.path: r for r in workspace_index.unpack(manifest.workspace, reader)}
    return found


def copy_out(config: Config, argument: str, target: str, *, reporter: Reporter) -> Copied:
    """Write a file or folder of a checkpoint to `target`; return what was written.

    A relative path is one of the workspace. Like cp(1), an existing folder gets the copy under its
    own name. `NotFound` if the checkpoint has no such file, `Conflict` if the target exists,
    `OSError` if it cannot be written.
    """
    ref, path = split(argument)
    with opened(config) as (_, repository):
        manifest = repository.manifest(ref)
        rights.check(config, "cp", manifest.session.name, lambda: roles_of(manifest))
        reader = repository.reader(reporter)
        every = held_files(manifest, reader)
        wanted = _absolute(path, manifest)
        chosen = [r for p, r in every.items() if p == wanted or p.startswith(f"{wanted}/")]
        if not chosen:
            raise _missing(ref, path, wanted, manifest, every)
        place = os.path.abspath(target)
        if os.path.isdir(place):
            place = os.path.join(place, os.path.basename(wanted))
        if os.path.lexists(place):
            raise Conflict(f"{place} exists", hint="Name another target, or move it away.")
        with _target_folder(os.path.dirname(place)) as above:
            return _written(reader, wanted, chosen, place, above)


@contextmanager
def _target_folder(path: str) -> Iterator[int]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(folder_walk.folder(path))
        except folder_walk.ForeignLink as error:
            raise UntrustedPath(
                f"nothing is written to {path}: {error.strerror}",
                hint="Name the folder by a path without that link.",
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no folder {path}", hint="Make it first.") from error
        yield found


def _absolute(path: str, manifest: Manifest) -> str:
    if not path.startswith("/"):
        top = manifest.workspace.path if manifest.workspace is not None else "/"
        path = os.path.join(top, path)
    return os.path.normpath(path)


def _missing(
    ref: str, path: str, wanted: str, manifest: Manifest, every: dict[str, FileRecord]
) -> NotFound:
    if wanted in {record.path for record in manifest.files}:
        what = "recorded size and hash of it only, not its contents"
        return NotFound(f"{ref} has {what}: {wanted}", hint="Dump with --with-files next time.")
    near = sorted(p for p in every if os.path.basename(p) == os.path.basename(path))
    more = f" It has {quoted(near[0])}." if near else ""
    hint = f"`criuctl show {quoted(ref)} --files` lists what it has.{more}"
    return NotFound(f"checkpoint {ref} has no file {wanted}", hint=hint)


def _written(
    reader: CheckpointReader, top: str, records: Sequence[FileRecord], place: str, above: int
) -> Copied:
    """Write the records below a name that is not used, and rename it when all is there."""
    name = os.path.basename(place)
    partial = f".{name[:200]}.criuctl-{os.urandom(4).hex()}"
    root = next((r for r in records if r.path == top), None)
    try:
        if root is not None and not stat.S_ISDIR(root.mode):
            made = _file(reader, root, partial, above)
        else:
            os.mkdir(partial, 0o700, dir_fd=above)
            made = _folder(reader, top, records, partial, above)
        if _exists(name, above):
            raise Conflict(f"{place} exists", hint="Name another target, or move it away.")
        os.rename(partial, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException:
        _remove(partial, above)
        raise
    files, size, left_out = made
    return Copied(top, place, files, size, left_out)


def _folder(
    reader: CheckpointReader, top: str, records: Sequence[FileRecord], name: str, above: int
) -> tuple[int, int, int]:
    files = size = left_out = 0
    folders: list[tuple[tuple[str, ...], FileRecord]] = []
    with folder_walk.place([name], above) as root:
        # Folders come before what is in them; one that no record names is made on the way.
        for record in sorted(records, key=lambda r: r.path):
            way = tuple(filter(None, record.path[len(top) :].split("/")))
            if stat.S_ISDIR(record.mode):
                with _place(way, root):
                    folders.append((way, record))
                continue
            with _place(way[:-1], root) as folder:
                one = _file(reader, record, way[-1], folder)
            files, size, left_out = files + one[0], size + one[1], left_out + one[2]
        for way, record in reversed(folders):  # modes and times last: the copy may be read-only
            with folder_walk.place(way, root) as folder:
                _dress(f"/proc/self/fd/{folder}", record)
    return files, size, left_out


@contextmanager
def _place(way: Sequence[str], root: int) -> Iterator[int]:
    """Open a folder of the copy; make what is missing of it. No link is followed."""
    for n in range(len(way)):
        with folder_walk.place(way[:n], root) as folder:
            if not _exists(way[n], folder):
                os.mkdir(way[n], 0o700, dir_fd=folder)
    with folder_walk.place(way, root) as found:
        yield found


def _file(
    reader: CheckpointReader, record: FileRecord, name: str, folder: int
) -> tuple[int, int, int]:
    """Make one file; return how many files, bytes and files left out that is."""
    if stat.S_ISLNK(record.mode):
        os.symlink(record.target, name, dir_fd=folder)
        return 1, 0, 0
    if not stat.S_ISREG(record.mode):
        return 0, 0, 1
    fd = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        os.truncate(fd, record.size)
        if record.data is not None:
            reader.write_to([(record.data, fd, 0)])
        _dress(f"/proc/self/fd/{fd}", record)
    finally:
        os.close(fd)
    return 1, record.size, 0


def _dress(path: str, record: FileRecord) -> None:
    os.chmod(path, stat.S_IMODE(record.mode) & 0o777)
    os.utime(path, ns=(record.mtime_ns, record.mtime_ns))


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
