"""Deleted names of files that have other names: CRIU's link remaps, made restorable more than once.

For an open file whose name was deleted while other hard links live on, CRIU makes a helper link
(``link_remap.N``, next to the old name) at the dump and opens that at the restore.  Left alone, the
link stays in the folder until a restore uses it up, a dump that leaves the tree running removes it
again (so that its checkpoint cannot be restored), and a second restore finds nothing.

So each helper link is recorded with another name of the same file, and its contents are kept; the
link is removed when the dump is over, and made again before each restore, as
`criuctl.files.deleted_names` decides: a hard link to the other name if that is still the same file,
else a file with the recorded contents.  CRIU makes one for each time that a file was opened: they
become names of one file again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ..checkpoint.chunks import StreamRef
from ..checkpoint.file_records import LinkRecord
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.writer import CheckpointWriter
from ..criu.images import ImageSet, path_of
from ..errors import DumpFailed, RestoreFailed
from ..host.registry import boot_id
from ..namespaces.plan import NamespacePlan, mount_tops, saved_devices
from ..proc import folder_walk
from ..proc.mounts import read_mounts
from ..proc.procfs import open_entry, read_link
from ..proc.tree import ProcessIdentity
from ..report import Reporter

if TYPE_CHECKING:
    from .deleted_names import DeletedName

_PREFIX = "link_remap."
_FAKE = ".cr_link"  # CRIU's suffix of the deleted name if another file has that name now
# criuctl's links at a restore
_MARKED = re.compile(r"link_remap\.\d+\.([0-9a-f]{8})-(\d{1,10})-(\d{1,20})")
_SCAN_LIMIT = 100_000  # entries of one folder that are searched for another link


def _names(folder: int) -> dict[int, str]:
    """Return a name for each inode in a folder, without helper links, which are removed, too."""
    found: dict[int, str] = {}
    with os.scandir(f"/proc/self/fd/{folder}") as entries:
        for entry in islice(entries, _SCAN_LIMIT):
            if not entry.name.startswith(_PREFIX) and not entry.is_dir(follow_symlinks=False):
                found.setdefault(entry.inode(), entry.name)
    return found


def _store(writer: CheckpointWriter, path: str, fd: int) -> tuple[str, StreamRef]:
    """Store the contents of a link in the checkpoint; return (hash, stream)."""
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        taken = writer.add_file(("link", path), file.fileno(), os.fstat(fd).st_size)
    return taken.digest, writer.stream(("link", path))


class DumpedLinks:
    """The helper links that CRIU makes for one dump.

    Their folders are held open: those of a mount namespace that ends with the tree cannot be found
    any more afterwards.
    """

    def __init__(self, root: int, entry: NamespacePlan, stack: ExitStack) -> None:
        self._root, self._stack = root, stack
        self._inside = "mnt" in entry.entered | entry.dumped
        self._folders: dict[tuple[int, str], int] = {}  # by a process that sees it under this path
        # path -> its folder, and what it is
        self._links: dict[str, tuple[int, os.stat_result]] = {}
        self._views: dict[int, int] = {}  # mount -> a process that sees it

    def collect(self, images: ImageSet, writer: CheckpointWriter) -> list[LinkRecord]:
        """Record those that CRIU has just made, with their contents; not those on file systems that
        it saves itself.
        """
        records = []
        saved = saved_devices(self._root)
        names: dict[int, dict[int, str]] = {}
        for path, mount in images.link_remaps().items():
            name = os.path.basename(path)
            try:
                folder = self._folder(path, mount)
                # Opening a FIFO would wait for a writer; it may be one, or be replaced by one.
                fd = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            # a link was put on the way meanwhile, or the folder was moved
            except OSError as error:
                raise DumpFailed(
                    f"{path}: the deleted file behind it cannot be recorded: {error.strerror}"
                ) from error
            try:
                status = os.fstat(fd)
                if status.st_dev in saved or not (
                    stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)
                ):
                    continue
                hashed, data = (
                    _store(writer, path, fd) if stat.S_ISREG(status.st_mode) else ("", StreamRef())
                )
                handle = folder_walk.handle(fd)
            finally:
                os.close(fd)
            if folder not in names:
                names[folder] = _names(folder)
            sibling = names[folder].get(status.st_ino, "")
            self._links[path] = folder, status
            records.append(
                LinkRecord(
                    path=path,
                    sibling=os.path.join(os.path.dirname(path), sibling) if sibling else "",
                    inode=status.st_ino,
                    device=status.st_dev,
                    mode=status.st_mode,
                    uid=status.st_uid,
                    gid=status.st_gid,
                    data=data,
                    digest=hashed,
                    handle=handle,
                )
            )
        return records

    def clean(self, reporter: Reporter) -> None:
        """Remove them: the dump is over.  A file that has replaced one is left alone."""
        for path, (folder, made) in self._links.items():
            name = os.path.basename(path)
            try:
                if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), made):
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                reporter.warning(
                    (
                        f"{path}, which CRIU has made for the dump, cannot be removed: "
                        f"{error.strerror}"
                    ),
                    "Remove it.",
                )

    def _folder(self, path: str, mount: int) -> int:
        """Return a descriptor of the folder of `path`, in the tree's mount namespace that has the
        mount with this id.
        """
        folder, pid = os.path.dirname(path), self._viewer(mount) if self._inside else 0
        if (pid, folder) not in self._folders:
            with ExitStack() as stack:
                view: int | None = None
                inner = folder
                if pid:
                    view = open_entry(pid, "root")
                    stack.callback(os.close, view)
                    top = read_link(pid, "root")  # the path is at or below it
                    inner = folder if top == "/" else folder.removeprefix(top)
                self._folders[pid, folder] = os.dup(
                    stack.enter_context(folder_walk.folder(inner, view))
                )
                self._stack.callback(os.close, self._folders[pid, folder])
        return self._folders[pid, folder]

    def _viewer(self, mount: int) -> int:
        """Return a process in the mount namespace with this mount; the root for one that is in
        none.
        """
        if not self._views:
            for pid in mount_tops(self._root).values():
                self._views |= {m.id: pid for m in read_mounts(pid)}
        return self._views.get(mount, self._root)


class Provided(Struct, frozen=True):
    """The helper links of one restore."""

    made: Mapping[str, os.stat_result | None]  # path -> what it is
    origins: Mapping[str, str]  # path -> that at the dump
    # device and inode of files that are new, with what was recorded
    created: Container[tuple[int, int]]


@contextmanager
def provided(
    names: Iterable[DeletedName],
    images: ImageSet,
    reader: CheckpointReader,
    moved: Mapping[str, str],
    reporter: Reporter,
) -> Iterator[Provided]:
    """Make the helper links for CRIU, as `names` are judged; remove those that it has not used,
    afterwards.

    They have new names, which are written to the images: the old ones may be those of another
    tree's, whose checkpoints have the same numbers.  `moved`: path -> the tree's own path instead
    (`criuctl.files.put_back`).  After a failure, names that CRIU made from them are removed as
    well.
    """
    links = _Links(images.linked(), reader, reporter)
    try:
        for name in names:
            links.provide(name, moved.get(name.other, name.other))
        if links.names:
            images.edit_files(links.rename_in_images)
        yield Provided(links.made, {own: path for path, own in links.names.items()}, links.created)
    except BaseException:
        links.undo()
        raise
    finally:
        links.remove()


class _Links:
    """The helper links of one restore."""

    def __init__(
        self,
        opened: Mapping[str, Sequence[tuple[int, Any]]],
        reader: CheckpointReader,
        reporter: Reporter,
    ) -> None:
        self.names: dict[str, str] = {}  # path at the dump -> path
        self._opened, self._reader, self._reporter = opened, reader, reporter
        self._helpers = {number: path for path, found in opened.items() for number, _ in found}
        self._deleted = {entry.id: path for path, found in opened.items() for _, entry in found}
        self.made: dict[str, os.stat_result | None] = {}  # path -> what it is, once that is known
        # device and inode of those that are of new files
        self.created: set[tuple[int, int]] = set()
        # a name that CRIU makes, and removes again -> path of the helper link
        self._absent: dict[str, str] = {}
        self._folders: list[str] = []  # that it makes for such names, and removes again
        self._swept: set[str] = set()
        self._mark = _mark()

    def provide(self, name: DeletedName, other: str) -> None:
        """Make those of one file: names of `other`, or of a new file if that is "" or cannot be
        linked to.
        """
        there = name.there
        for link in name.links:
            path = self._path(link.path)
            try:
                with folder_walk.folder(os.path.dirname(path)) as folder:
                    base = os.path.basename(path)
                    if os.path.dirname(path) not in self._swept:
                        self._swept.add(os.path.dirname(path))
                        _sweep(folder)
                    if not self._is_one(name, other, there, base, folder):
                        self.created.add(_make(link, base, folder, self._reader))
                        if name.other:
                            text = (
                                f"{name.name} (deleted): it cannot be one file with its other "
                                "names here"
                            )
                            self._reporter.warning(
                                f"{text}; the process that has it open gets a file of its own, as "
                                "it was"
                            )
                    self.made[path] = os.stat(base, dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                raise RestoreFailed(
                    f"{link.path}: the deleted file behind it cannot be provided: {error.strerror}"
                ) from error
            other, there = path, None

    @staticmethod
    def _is_one(
        name: DeletedName, other: str, there: tuple[int, int] | None, base: str, folder: int
    ) -> bool:
        """Make the helper link `base` one of the file of the other names, if there is one."""
        if other or there is None:
            return bool(other) and _linked(other, there, base, folder)
        # its names are not known
        with folder_walk.by_handle(name.links[0].handle, os.path.dirname(name.links[0].path)) as fd:
            return fd is not None and _linked(f"/proc/self/fd/{fd}", there, base, folder)

    def rename_in_images(self, entry: Any) -> None:
        """Put them into an entry of files.img, so that CRIU uses them."""
        if not entry.HasField("reg"):
            return
        if (path := self.names.get(self._helpers.get(entry.id, ""))) is not None:
            if isinstance(entry.reg.name, str):
                entry.reg.name = path
        elif (path := self.names.get(self._deleted.get(entry.id, ""))) is not None:
            entry.reg.ClearField("size")  # it is judged
            made = self.made[path]
            if made is not None and entry.reg.HasField("mode") and entry.reg.mode != made.st_mode:
                entry.reg.ClearField("mode")

    def undo(self) -> None:
        """Remove the names that CRIU had made when it failed."""
        for name, path in self._absent.items():
            made = self.made.get(path)
            with suppress(OSError):
                if made is not None and os.path.samestat(os.lstat(name), made):
                    _remove(name)
        for path in self._folders:
            with suppress(OSError), folder_walk.folder(os.path.dirname(path)) as folder:
                os.rmdir(os.path.basename(path), dir_fd=folder)

    def remove(self) -> None:
        """Remove them; CRIU has removed those that it has used."""
        for path, made in self.made.items():
            with suppress(OSError):
                if made is None or os.path.samestat(os.lstat(path), made):
                    _remove(path)

    def _path(self, path: str) -> str:
        """Return where the helper link is now that was at `path`; record the name that CRIU will
        make of it.
        """
        if not os.path.basename(path).startswith(_PREFIX):
            raise RestoreFailed(f"{path} is not the name of a helper link")
        own = f"{path}.{self._mark}"
        if not _is_text(path):  # no other name can be put into an image
            if os.path.lexists(path):
                raise RestoreFailed(
                    f"{path} is in the way",
                    hint="It is left over from a restore that was killed: remove it.",
                )
            own = path
        for _, entry in self._opened.get(path, ()):
            name = path_of(entry.reg)
            self._absent |= {n: own for n in (name, name + _FAKE) if not os.path.lexists(n)}
            above = os.path.dirname(name)
            while not os.path.lexists(above):
                self._folders.append(above)
                above = os.path.dirname(above)
        self.names[path] = own
        self.made[own] = None
        return own


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _space() -> str:
    """Return the PID namespace that this process's number belongs to."""
    return hashlib.blake2s(
        f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}".encode(), digest_size=4
    ).hexdigest()


def _mark() -> str:
    """Return the mark in the names of this process's helper links, by which they are found if it is
    killed.
    """
    itself = ProcessIdentity.of(os.getpid())
    return f"{_space()}-{itself.pid}-{itself.start_time}"


def _sweep(folder: int) -> None:
    """Remove helper links of restores that were killed."""
    space = _space()
    with os.scandir(f"/proc/self/fd/{folder}") as entries:
        for entry in islice(entries, _SCAN_LIMIT):
            found = _MARKED.fullmatch(entry.name)
            if (
                found is None
                or found[1] != space
                or ProcessIdentity(int(found[2]), int(found[3])).exists()
            ):
                continue
            with suppress(OSError):
                os.unlink(entry.name, dir_fd=folder)


def _linked(other: str, there: tuple[int, int] | None, name: str, folder: int) -> bool:
    """Make `name` one of the file at `other`.

    Return False if that is gone, is not the expected file, or is on another file system.
    """
    try:
        with _opened(other) as fd:
            status = os.fstat(fd)
            if there is not None and there != (status.st_dev, status.st_ino):
                return False
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                return False
            # this very file
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOENT, errno.ENOTDIR, errno.EMLINK):
            raise
        return False
    return True


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open (``O_PATH``) what is at a path, or what a link of /proc leads to."""
    if path.startswith("/proc/self/fd/"):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    else:
        with folder_walk.folder(os.path.dirname(path)) as folder:
            fd = os.open(os.path.basename(path), folder_walk.PLACE, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with folder_walk.folder(os.path.dirname(path)) as folder:
        os.unlink(os.path.basename(path), dir_fd=folder)


def _make(link: LinkRecord, name: str, folder: int, reader: CheckpointReader) -> tuple[int, int]:
    """Make a new file with what was recorded; return its device and inode."""
    fifo = stat.S_ISFIFO(link.mode)
    if fifo:
        os.mkfifo(name, 0o600, dir_fd=folder)
    flags = os.O_PATH | os.O_NOFOLLOW if fifo else os.O_CREAT | os.O_EXCL | os.O_WRONLY
    fd = os.open(name, flags | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if fifo and not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.ESTALE, "another file is in its place now", link.path)
        if not fifo:
            reader.write_to([(link.data, fd, 0)])
            os.ftruncate(fd, link.data.size)
        itself = f"/proc/self/fd/{fd}"
        os.chown(itself, link.uid, link.gid)
        os.chmod(itself, stat.S_IMODE(link.mode))
        return os.fstat(fd).st_dev, os.fstat(fd).st_ino
    finally:
        os.close(fd)
