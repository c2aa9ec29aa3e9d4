"""Files that a tree has mapped shared and can write to through the mapping.

What is written to such a mapping is memory of the tree, but CRIU leaves it in the file and maps the
file again at the restore.  The descriptor is usually closed.  POSIX semaphores and shared memory
(``/dev/shm``) are such files.  So:

- the dump records them wherever they are, as files that are written to;
- on a file system in memory (tmpfs) their contents travel, up to ``shared_memory_max_mib``: no
  disk has them, and they are gone after a reboot;
- a copy (`copies`) gets one of its own of each that is in memory.

On a disk several files belong together (a database and its ``-shm``), so the rules for all written
files apply there: `judgement`.
"""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress

from ..config import Config
from ..criu.images import ImageSet, path_of, read
from ..proc.mappings import Mapping
from ..proc.trustedpath import fs_type

_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)  # tmpfs, ramfs, hugetlbfs; f_type of statfs(2)
_FILE_SHARED = 1 << 7  # bits of a vma's status in CRIU


def writes(pid: int, mapping: Mapping) -> bool:
    """Return whether the process may write to the file through this mapping, if need be after
    mprotect(2).

    For one that it cannot write to now, the kernel may show what was mapped in the same range
    before.
    """
    if not mapping.shared or not mapping.inode:
        return False
    if "w" in mapping.perms:
        return True
    with suppress(OSError):  # the link has the mode in which the file was opened
        link = os.lstat(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}")
        return bool(link.st_mode & stat.S_IWUSR)
    return False


def behind(pid: int, mapping: Mapping) -> str:
    """Return a link to the very mapped file, independent of its path, if the kernel allows it."""
    source = f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    try:
        os.stat(source)
    # needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE in the first user namespace
    except PermissionError:
        return f"/proc/{pid}/root{mapping.path}"
    except OSError:
        pass  # it is gone
    return source


def in_memory(fd: int) -> bool:
    """Return whether an open file (``O_PATH`` suffices) is on a file system in memory."""
    return fs_type(fd) in _IN_MEMORY


def is_in_memory(path: str) -> bool:
    """Return the same for what is at a path; False if nothing is.  A link itself is examined."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return in_memory(fd)
    finally:
        os.close(fd)


def travels(config: Config, size: int) -> bool:
    """Return whether the contents of one that is in memory travel by default."""
    return size <= config.shared_memory_max_mib << 20


def shared_files(images: ImageSet) -> set[int]:
    """Return the ids, in files.img, of the files that a process has mapped so."""
    return {
        vma.shmid
        for name in images.names()
        if name.startswith("mm-")
        for memory in read(images.folder, name, "MM")
        for vma in memory.vmas
        if vma.status & _FILE_SHARED
        and (vma.prot & mmap.PROT_WRITE or vma.fdflags & os.O_ACCMODE == os.O_RDWR)
    }


def shared_paths(images: ImageSet) -> set[str]:
    """Return the paths of the same, except deleted ones."""
    wanted = shared_files(images) - images.remapped()
    files = images.files() if wanted else []
    return {path_of(e.reg) for e in files if e.HasField("reg") and e.id in wanted}
