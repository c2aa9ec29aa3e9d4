"""Deleted names of files that have other names: CRIU's link remaps, made restorable more than once.

For an open file whose name was deleted while other hard links live on, CRIU makes a helper link
(``link_remap.N``, beside the old name) at the dump and opens that at the restore.  Left alone, the link
litters the folder until a restore uses it up, a dump that leaves the tree running has it removed again (so
that its checkpoint cannot be restored), and a second restore finds nothing.

So each helper link is recorded with another name of the same file, and its contents are kept; the link is
removed when the dump is over, and made anew before each restore: a hard link to the other name where that
is still the same file, else a file with the recorded contents.  CRIU makes one for each time that a file was opened:
they are names of one file again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..checkpoint.chunks import StreamRef
from ..checkpoint.manifest import LinkRecord
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.writer import CheckpointWriter
from ..criu.images import ImageSet
from ..errors import DumpFailed, RestoreFailed
from ..proc import ways
from ..report import Reporter
from .namespaces import NamespacePlan, saved_devices

_PREFIX = "link_remap."
_SCAN_LIMIT = 100_000  # names of one folder that are looked through for another link


def _other_name(folder: int, inode: int) -> str:
    """Another name in a folder of the file `inode`, or ""; not of another helper link, which goes, too."""
    with os.scandir(f"/proc/self/fd/{folder}") as entries:
        for count, entry in enumerate(entries):
            if count > _SCAN_LIMIT:
                break
            if entry.inode() == inode and not entry.name.startswith(_PREFIX) and not entry.is_dir(follow_symlinks=False):
                return entry.name
    return ""


def _store(writer: CheckpointWriter, path: str, fd: int) -> StreamRef:
    """Put the contents of a link into the checkpoint."""
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        writer.add_file(("link", path), file.fileno(), os.fstat(fd).st_size)
    return writer.stream(("link", path))


class DumpedLinks:
    """The helper links that CRIU makes for one dump.

    Their folders are held: those of a mount namespace that ends with the tree cannot be found any more by then.
    """

    def __init__(self, root: int, entry: NamespacePlan, stack: ExitStack) -> None:
        self._root, self._stack = root, stack
        self._inside = "mnt" in entry.entered | entry.dumped
        self._folders: dict[str, int] = {}
        self._links: list[str] = []

    def collect(self, images: ImageSet, writer: CheckpointWriter) -> list[LinkRecord]:
        """Record those that it has just made, with their contents; not those in what it saves itself."""
        records = []
        saved = saved_devices(self._root)
        for path in images.link_remaps():
            name = os.path.basename(path)
            try:
                folder = self._folder(os.path.dirname(path))
                # To open a FIFO would wait for somebody who writes; it may be one, or somebody puts one there.
                fd = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:  # somebody has put a link on the way meanwhile, or moved the folder
                raise DumpFailed(f"{path}: the deleted file behind it cannot be recorded: {error.strerror}") from error
            try:
                status = os.fstat(fd)
                if status.st_dev in saved or not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                    continue
                data = _store(writer, path, fd) if stat.S_ISREG(status.st_mode) else StreamRef()
            finally:
                os.close(fd)
            sibling = _other_name(folder, status.st_ino)
            self._links.append(path)
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
                )
            )
        return records

    def clean(self, reporter: Reporter) -> None:
        """Remove them: the dump is over."""
        for path in self._links:
            try:
                os.unlink(os.path.basename(path), dir_fd=self._folders[os.path.dirname(path)])
            except FileNotFoundError:
                continue
            except OSError as error:
                reporter.warning(f"{path}, which CRIU has made for the dump, cannot be removed: {error.strerror}", "Remove it.")

    def _folder(self, path: str) -> int:
        """A descriptor of a folder, which a path of the tree's mount namespace leads to."""
        if path not in self._folders:
            with ExitStack() as stack:
                view: int | None = None
                inner = path
                if self._inside:
                    view = os.open(f"/proc/{self._root}/root", os.O_PATH | os.O_CLOEXEC)
                    stack.callback(os.close, view)
                    top = os.readlink(f"/proc/{self._root}/root")  # the path is at or below it
                    inner = path if top == "/" else path.removeprefix(top)
                self._folders[path] = os.dup(stack.enter_context(ways.folder(inner, view)))
                self._stack.callback(os.close, self._folders[path])
        return self._folders[path]


@contextmanager
def provided(links: Iterable[LinkRecord], reader: CheckpointReader) -> Iterator[None]:
    """The helper links are there for CRIU; whichever it has not used up are gone afterwards."""
    made: dict[str, tuple[int, int]] = {}  # path -> device and inode, at the dump
    try:
        for link in links:
            if not os.path.basename(link.path).startswith(_PREFIX):
                raise RestoreFailed(f"{link.path} is not the name of a helper link")
            if os.path.lexists(link.path):
                continue
            file = (link.device, link.inode)
            same = next((path for path, other in made.items() if other == file), "")  # it was opened more than once
            made[link.path] = file
            try:
                with ways.folder(os.path.dirname(link.path)) as folder:
                    name = os.path.basename(link.path)
                    if not same or not _linked(same, name, folder):
                        _make(link, name, folder, reader)
            except OSError as error:
                raise RestoreFailed(f"{link.path}: the deleted file behind it cannot be provided: {error.strerror}") from error
        yield
    finally:
        for path in made:
            with suppress(OSError):
                _remove(path)


def _linked(path: str, name: str, folder: int) -> bool:
    try:
        os.link(path, name, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False  # its folders are on several file systems here
    return True


def _remove(path: str) -> None:
    with ways.folder(os.path.dirname(path)) as folder:
        os.unlink(os.path.basename(path), dir_fd=folder)


def _make(link: LinkRecord, name: str, folder: int, reader: CheckpointReader) -> None:
    if link.sibling:
        with suppress(FileNotFoundError):
            status = os.lstat(link.sibling)
            if (status.st_ino, status.st_dev) == (link.inode, link.device):
                os.link(link.sibling, name, dst_dir_fd=folder, follow_symlinks=False)
                return
    fifo = stat.S_ISFIFO(link.mode)
    if fifo:
        os.mkfifo(name, 0o600, dir_fd=folder)
    flags = os.O_PATH | os.O_NOFOLLOW if fifo else os.O_CREAT | os.O_EXCL | os.O_WRONLY
    fd = os.open(name, flags | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if fifo and not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.ESTALE, "something else is in its place by now", link.path)
        if not fifo:
            reader.write_to([(link.data, fd, 0)])
            os.ftruncate(fd, link.data.size)
        itself = f"/proc/self/fd/{fd}"
        os.chown(itself, link.uid, link.gid)
        os.chmod(itself, stat.S_IMODE(link.mode))
    finally:
        os.close(fd)
