"""Records of inodes: evidence for a restore that what is at a path is the file of the dump.

At the dump each path that users other than root control, or that not every user may open, is
recorded with its inode, owner and mode; for sockets and deleted files it is their folder's.  At a
restore the record is the evidence that what is at the path is the very file of the dump.  It counts
only on the host that made it (`criuctl.host.key`), because the numbers of another host mean nothing
here and because a writer of the store must not be able to name /etc/shadow with its inode.

An inode number alone is no evidence, because it is reused.  What is compared:

- the time of birth, if both are known: together with the inode number it identifies the file as
  long as it lives, also if the device has another number after a reboot;
- else device and file handle, which contains the generation of the inode;
- else, if the file system has neither, device and inode, within the same boot.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..checkpoint.file_records import InodeRecord, LinkRecord
from ..checkpoint.manifest import Manifest
from ..checkpoint.records import MAX_INT
from ..config import Config
from ..errors import CriuctlError
from ..host import key
from ..host.registry import boot_id
from ..proc import file_access, inodes, socketfiles
from ..proc.descriptors import Descriptor
from ..proc.mappings import Mapping as MappedRange
from ..proc.path_control import PathLookup
from ..proc.tree import Process, mappings

_KERNELS = ("/proc/", "/sys/")
_NO_FILES = ("/SYSV", "/memfd:", "/anon_hugepage", "/dev/zero")
_DELETED = " (deleted)"


def record(
    tree: Sequence[Process],
    opened: Mapping[int, Sequence[Descriptor]],
) -> list[InodeRecord]:
    """Return the inodes at the paths of a frozen tree, except those that root alone controls."""
    found: dict[str, InodeRecord] = {}
    seen: set[tuple[str, int | None]] = set()
    with PathLookup() as lookup:
        for held in _held(tree, opened):
            path, wanted = held.path, held.wanted
            if (path, wanted) in seen or not path.startswith("/") or path.startswith(_KERNELS):
                continue
            seen.add((path, wanted))
            with suppress(OSError), _opened(lookup, path, held.source) as fd:
                status = os.fstat(fd)
                same = held.number in (None, status.st_ino)
                if same and not _is_anybodys(lookup, path, status, wanted):
                    found[path] = _of(path, fd)
    return list(found.values())


@contextmanager
def _opened(lookup: PathLookup, path: str, source: str) -> Iterator[int]:
    """Open what `source` in /proc leads to; without `source` what is at the path.

    The latter is not a link's target: a user cannot have another user's folder there.
    """
    if source:
        fd = os.open(source, os.O_PATH | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
        return
    with lookup.straight(path) as fd:
        yield fd


def of_links(links: Iterable[LinkRecord]) -> list[InodeRecord]:
    """Return the inodes of CRIU's helper links, which are files under deleted names."""
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


def _is_anybodys(lookup: PathLookup, path: str, status: os.stat_result, wanted: int | None) -> bool:
    """Return whether the path is root's alone, leads to this file, and every user may open it."""
    try:
        with lookup.at(path) as there:
            if there.fault is not None or not os.path.samestat(there.status, status):
                return False
            *way, last = [component.mode for component in there.walked]
            passed = all(mode & stat.S_IXOTH for mode in way)
            return wanted is None or (passed and last & wanted == wanted)
    except OSError:  # of another mount namespace
        return False


def _of(path: str, fd: int) -> InodeRecord:
    status = os.fstat(fd)
    return InodeRecord(
        path=path,
        device=status.st_dev,
        inode=status.st_ino,
        uid=status.st_uid,
        gid=status.st_gid,
        mode=status.st_mode,
        born=max(-MAX_INT, min(inodes.born(fd), MAX_INT)),
        handle=inodes.handle(fd),
    )


class _Held(NamedTuple):
    path: str
    # what others than its owner and group must be allowed to do with it; None: it is root's
    wanted: int | None
    source: str = ""  # a path to the very file; "": the path itself
    number: int | None = None  # the inode, if `source` may lead elsewhere


def _held(tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> Iterator[_Held]:
    """Yield each path of each process, with a path to the very file."""
    for process in tree:
        yield from _of_process(process, opened.get(process.pid, ()))


def _of_process(process: Process, descriptors: Sequence[Descriptor]) -> Iterator[_Held]:
    pid = process.pid

    def rights(access: int) -> int | None:
        return access if process.uids[3] else None  # the user of file access

    folder = rights(stat.S_IWOTH | stat.S_IXOTH)
    for d in descriptors:
        if d.kind == "socket":
            with suppress(CriuctlError, OSError):
                bound = socketfiles.bound_file(pid, d.fd, deleted=True)
                if bound:
                    yield _Held(os.path.dirname(bound), folder)
        elif (
            d.target.startswith("/") and d.kind != "memfd" and not d.target.startswith("/dev/pts/")
        ):
            if d.deleted:
                yield _Held(os.path.dirname(d.target), folder)
            else:
                wanted = rights(file_access.access_of(d.flags))  # os.R_OK is stat.S_IROTH
                yield _Held(d.target, wanted, f"/proc/{pid}/fd/{d.fd}")
    if process.zombie:
        return
    for name in ("cwd", "root", "exe"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/{name}")
            if not target.endswith(_DELETED):
                yield _Held(target, rights(stat.S_IXOTH), f"/proc/{pid}/{name}")
    with suppress(CriuctlError):
        for m in mappings(pid):
            if m.inode and m.path.startswith("/") and not m.path.startswith(_NO_FILES):
                if m.deleted:
                    yield _Held(os.path.dirname(m.path), folder)
                else:
                    written = stat.S_IWOTH if m.shared and "w" in m.perms else 0
                    wanted = rights(stat.S_IROTH | written)
                    yield _Held(m.path, wanted, *_mapped(pid, m))


def _mapped(pid: int, m: MappedRange) -> tuple[str, int | None]:
    source = f"/proc/{pid}/map_files/{m.start:x}-{m.end:x}"
    if os.access(source, os.F_OK):
        return source, None
    # Following it needs a capability in the first user namespace.
    return f"/proc/{pid}/root{m.path}", m.inode


# -- at a restore ----------------------------------------------------------------------------------


def _text(session: str, records: Iterable[InodeRecord]) -> str:
    known = [record.to_dict() for record in records]
    for one in known:
        if not one["mode"]:  # of a criuctl that did not record it
            del one["mode"], one["gid"]
    return json.dumps([session, *known], sort_keys=True)


def mac(config: Config, session: str, records: Sequence[InodeRecord]) -> str:
    """Return the MAC by which this host will recognise these records; "" for none."""
    return key.seal(config, _text(session, records)) if records else ""


def known(config: Config, manifest: Manifest) -> dict[str, InodeRecord]:
    """Return path -> the tree's inode there, if this very host has recorded it."""
    text = _text(manifest.session.id, manifest.inodes)
    if not manifest.inodes or not key.is_sealed(config, text, manifest.inodes_mac):
        return {}
    return {record.path: record for record in manifest.inodes}


def is_same(record: InodeRecord, fd: int, manifest: Manifest) -> bool:
    """Return whether an open file is the very one of the record."""
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
