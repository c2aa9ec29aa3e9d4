"""Deleted names of files that have other names: CRIU's link remaps, made restorable more than once.

For an open file whose name was deleted while other hard links live on, CRIU makes a helper link
(``link_remap.N``, beside the old name) at the dump and opens that at the restore.  Left alone, the link
litters the folder until a restore uses it up, a dump that leaves the tree running has it removed again (so
that its checkpoint cannot be restored), and a second restore finds nothing.

So each helper link is recorded with another name of the same file, and its contents are kept; the link is
removed when the dump is over, and made anew before each restore: a hard link to the other name where that
is still the same file, else a file with the recorded contents.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ..checkpoint.manifest import LinkRecord
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.writer import CheckpointWriter
from ..criu.images import ImageSet
from ..errors import RestoreFailed
from ..proc import ways
from ..report import Reporter
from .namespaces import NamespacePlan, saved_devices

_PREFIX = "link_remap."
_SCAN_LIMIT = 100_000  # names of one folder that are looked through for another link


def _in_tree(root: int, path: str) -> str:
    """What leads from here to a path of the tree's mount namespace, at or below its root folder."""
    top = os.readlink(f"/proc/{root}/root")
    return f"/proc/{root}/root{path if top == '/' else path.removeprefix(top)}"


def _other_name(folder: str, name: str, inode: int) -> str:
    """Another name in `folder` of the file `inode`, or ""."""
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count > _SCAN_LIMIT:
                break
            if entry.inode() == inode and entry.name != name and entry.is_file(follow_symlinks=False):
                return entry.name
    return ""


def collect(images: ImageSet, writer: CheckpointWriter, root: int, entry: NamespacePlan) -> list[LinkRecord]:
    """Record the helper links that CRIU has just made for this dump, with their contents; not those in what it saves itself."""
    records = []
    saved = saved_devices(root)
    for path in images.link_remaps():
        real = _in_tree(root, path) if "mnt" in entry.entered | entry.dumped else path
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_dev in saved:
                continue
            writer.add_file(("link", path), fd, status.st_size)
        finally:
            os.close(fd)
        sibling = _other_name(os.path.dirname(real), os.path.basename(path), status.st_ino)
        records.append(
            LinkRecord(
                path=path,
                sibling=os.path.join(os.path.dirname(path), sibling) if sibling else "",
                inode=status.st_ino,
                device=status.st_dev,
                mode=status.st_mode,
                uid=status.st_uid,
                gid=status.st_gid,
                data=writer.stream(("link", path)),
            )
        )
    return records


def clean(links: Iterable[LinkRecord], reporter: Reporter) -> None:
    """Remove the helper links of a dump that is over."""
    for link in links:
        try:
            _remove(link.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            reporter.warning(f"{link.path}, which CRIU has made for the dump, cannot be removed: {error.strerror}", "Remove it.")


@contextmanager
def provided(links: Iterable[LinkRecord], reader: CheckpointReader) -> Iterator[None]:
    """The helper links are there for CRIU; whichever it has not used up are gone afterwards."""
    made: list[str] = []
    try:
        for link in links:
            if not os.path.basename(link.path).startswith(_PREFIX):
                raise RestoreFailed(f"{link.path} is not the name of a helper link")
            if os.path.lexists(link.path):
                continue
            made.append(link.path)
            try:
                with ways.folder(os.path.dirname(link.path)) as folder:
                    _make(link, os.path.basename(link.path), folder, reader)
            except OSError as error:
                raise RestoreFailed(f"{link.path}: the deleted file behind it cannot be provided: {error.strerror}") from error
        yield
    finally:
        for path in made:
            with suppress(OSError):
                _remove(path)


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
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        reader.write_to([(link.data, fd, 0)])
        os.ftruncate(fd, link.data.size)
        os.fchown(fd, link.uid, link.gid)
        os.fchmod(fd, stat.S_IMODE(link.mode))
    finally:
        os.close(fd)
