"""Which file it was: the inodes of a tree, where a restore will want evidence.

At the dump each path that others than root decide about, or that the process could not open itself,
is recorded with its inode; for sockets and deleted files it is the folder that they are in.
At a restore the record is the evidence that what is at the path is the
very file of the dump.  It counts only on the host that made it (`criuctl.host.key`), because the
numbers of another host say nothing here and because who writes to a store must not be able to name
/etc/shadow with its inode.

An inode number alone is no evidence, as it is given again.  What is compared:

- the time of birth, where both are known: together with the inode number it holds for as long as
  the file lives, also where the device has another number after the host was started again;
- else device and file handle, which has the generation of the inode in it;
- else, where the file system has neither, device and inode, within the same boot.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..checkpoint.manifest import InodeRecord, LinkRecord, Manifest
from ..checkpoint.records import MAX_INT
from ..config import Config
from ..errors import CriuctlError
from ..host import key
from ..host.registry import boot_id
from ..proc import inodes, socketfiles, trustedpath
from ..proc.descriptors import Descriptor
from ..proc.mappings import Mapping as MappedRange
from ..proc.path_control import Looks
from ..proc.tree import Process, mappings

_KERNELS = ("/proc/", "/sys/")
_NO_FILES = ("/SYSV", "/memfd:", "/anon_hugepage", "/dev/zero")
_DELETED = " (deleted)"


def record(
    tree: Sequence[Process],
    opened: Mapping[int, Sequence[Descriptor]],
) -> list[InodeRecord]:
    """The inodes at the paths of a frozen tree, but for paths that root alone decides about."""
    found: dict[str, InodeRecord] = {}
    seen: set[tuple[str, int]] = set()
    with Looks() as looks:
        for held in _held(tree, opened):
            path, wanted = held.path, held.wanted
            if (path, wanted) in seen or not path.startswith("/") or path.startswith(_KERNELS):
                continue
            seen.add((path, wanted))
            with suppress(OSError), _opened(looks, path, held.source) as fd:
                status = os.fstat(fd)
                same = held.number in (None, status.st_ino)
                if same and not _is_anybodys(looks, path, status, wanted):
                    found[path] = _of(path, fd)
    return list(found.values())


@contextmanager
def _opened(looks: Looks, path: str, source: str) -> Iterator[int]:
    """A descriptor of what `source` in /proc leads to; without one of what is at the path, to which
    no link leads: a user cannot have a folder of somebody else's there.
    """
    if source:
        fd = os.open(source, os.O_PATH | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
        return
    with looks.straight(path) as fd:
        yield fd


def of_links(links: Iterable[LinkRecord]) -> list[InodeRecord]:
    """The inodes of CRIU's helper links, which are files under deleted names."""
    return [
        InodeRecord(
            path=link.path,
            device=link.device,
            inode=link.inode,
            uid=link.uid,
            handle=link.handle,
        )
        for link in links
    ]


def _is_anybodys(looks: Looks, path: str, status: os.stat_result, wanted: int) -> bool:
    """Whether root alone decides what is there, that is this, and everybody may open it so."""
    try:
        with looks.at(path) as there:
            if there.fault is not None or not os.path.samestat(there.status, status):
                return False
            *way, last = [component.mode for component in there.walked]
            passed = all(mode & stat.S_IXOTH for mode in way)
            return not wanted or (passed and last & wanted == wanted)
    except OSError:  # of another mount namespace
        return False


def _of(path: str, fd: int) -> InodeRecord:
    status = os.fstat(fd)
    return InodeRecord(
        path=path,
        device=status.st_dev,
        inode=status.st_ino,
        uid=status.st_uid,
        born=max(-MAX_INT, min(inodes.born(fd), MAX_INT)),
        handle=inodes.handle(fd),
    )


class _Held(NamedTuple):
    path: str
    wanted: int  # what others than its owner and group must be allowed to do with it; 0 for root
    source: str = ""  # what leads to the very file; "": the path itself
    number: int | None = None  # the inode, where `source` may lead elsewhere


def _held(tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> Iterator[_Held]:
    """Each path of each process, with what leads to the file."""
    for process in tree:
        yield from _of_process(process, opened.get(process.pid, ()))


def _of_process(process: Process, descriptors: Sequence[Descriptor]) -> Iterator[_Held]:
    pid, any_uid = process.pid, -1 if process.uid else 0  # root needs no rights
    folder = (stat.S_IWOTH | stat.S_IXOTH) & any_uid
    for d in descriptors:
        if d.kind == "socket":
            with suppress(CriuctlError, OSError):
                bound = socketfiles.bound_file(pid, d.fd, deleted=True)
                if bound:
                    yield _Held(os.path.dirname(bound), folder)
        elif d.target.startswith("/") and d.kind not in ("tty", "memfd"):
            if d.deleted:
                yield _Held(os.path.dirname(d.target), folder)
            else:
                wanted = trustedpath.access_of(d.flags) & any_uid  # os.R_OK is stat.S_IROTH
                yield _Held(d.target, wanted, f"/proc/{pid}/fd/{d.fd}")
    if process.zombie:
        return
    for name in ("cwd", "root", "exe"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/{name}")
            if not target.endswith(_DELETED):
                yield _Held(target, stat.S_IXOTH & any_uid, f"/proc/{pid}/{name}")
    with suppress(CriuctlError):
        for m in mappings(pid):
            if m.inode and m.path.startswith("/") and not m.path.startswith(_NO_FILES):
                if m.deleted:
                    yield _Held(os.path.dirname(m.path), folder)
                else:
                    written = stat.S_IWOTH if m.shared and "w" in m.perms else 0
                    wanted = (stat.S_IROTH | written) & any_uid
                    yield _Held(m.path, wanted, *_mapped(pid, m))


def _mapped(pid: int, m: MappedRange) -> tuple[str, int | None]:
    source = f"/proc/{pid}/map_files/{m.start:x}-{m.end:x}"
    if os.access(source, os.F_OK):
        return source, None
    # To follow that takes a capability in the first user namespace.
    return f"/proc/{pid}/root{m.path}", m.inode


# -- at a restore ----------------------------------------------------------------------------------


def _text(session: str, records: Iterable[InodeRecord]) -> str:
    return json.dumps([session, *(record.to_dict() for record in records)], sort_keys=True)


def mac(config: Config, session: str, records: Sequence[InodeRecord]) -> str:
    """By what this host will know these records again; "" for none."""
    return key.seal(config, _text(session, records)) if records else ""


def known(config: Config, manifest: Manifest) -> dict[str, InodeRecord]:
    """Path -> what the tree had there, as far as this very host says so."""
    text = _text(manifest.session.id, manifest.inodes)
    if not manifest.inodes or not key.is_sealed(config, text, manifest.inodes_mac):
        return {}
    return {record.path: record for record in manifest.inodes}


def is_same(record: InodeRecord, fd: int, manifest: Manifest) -> bool:
    """Whether an open file is the very one of the record."""
    status = os.fstat(fd)
    if status.st_ino != record.inode:
        return False
    born = inodes.born(fd)
    if born and record.born:
        return born == record.born
    if status.st_dev != record.device:
        return False
    handle = inodes.handle(fd)
    if handle and record.handle:
        return handle == record.handle
    return not handle and not record.handle and manifest.host.boot_id == boot_id()
