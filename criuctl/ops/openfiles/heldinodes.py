"""Which file it was: the inodes that a tree holds at paths that others than root decide about.

At the dump each such path is recorded with its inode; for sockets and deleted files it is the
folder that they are in.  At a restore the record is the evidence that what is at the path is the
very file of the dump.  It counts only on the host that made it (`criuctl.ops.hostkey`), because the
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ...checkpoint.manifest import InodeRecord, LinkRecord, Manifest
from ...checkpoint.records import MAX_INT
from ...config import Config
from ...errors import CriuctlError
from ...proc import inodes, socketfiles
from ...proc.controlled import Looks
from ...proc.descriptors import Descriptor
from ...proc.mappings import Mapping as MappedRange
from ...proc.tree import Process, mappings
from .. import hostkey
from ..registry import boot_id

_KERNELS = ("/proc/", "/sys/")
_NO_FILES = ("/SYSV", "/memfd:", "/anon_hugepage", "/dev/zero")
_DELETED = " (deleted)"


def record(tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> list[InodeRecord]:
    """The inodes at the paths of a frozen tree, but for paths that root alone decides about."""
    found: dict[str, InodeRecord] = {}
    seen: set[str] = set()
    with Looks() as looks:
        for path, source, number in _held(tree, opened):
            if path in seen or not path.startswith("/") or path.startswith(_KERNELS):
                continue
            seen.add(path)
            with suppress(OSError), _opened(looks, path, source) as fd:
                status = os.fstat(fd)
                if number in (None, status.st_ino) and not _is_roots(looks, path, status):
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


def _is_roots(looks: Looks, path: str, status: os.stat_result) -> bool:
    """Whether root alone decides what is at the path, and that is this."""
    try:
        with looks.at(path) as there:
            return there.fault is None and os.path.samestat(there.status, status)
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


def _held(tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> Iterator[tuple[str, str, int | None]]:
    """Each path, what leads to the very file ("" for the path itself), and its inode number where
    that may lead elsewhere.
    """
    for process in tree:
        pid = process.pid
        for d in opened.get(pid, ()):
            if d.kind == "socket":
                with suppress(CriuctlError, OSError):
                    bound = socketfiles.bound_file(pid, d.fd, deleted=True)
                    if bound:
                        yield os.path.dirname(bound), "", None
            elif d.target.startswith("/") and d.kind not in ("tty", "memfd"):
                if d.deleted:
                    yield os.path.dirname(d.target), "", None
                else:
                    yield d.target, f"/proc/{pid}/fd/{d.fd}", None
        if process.zombie:
            continue
        for name in ("cwd", "root", "exe"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/{name}")
                if not target.endswith(_DELETED):
                    yield target, f"/proc/{pid}/{name}", None
        with suppress(CriuctlError):
            for m in mappings(pid):
                if m.inode and m.path.startswith("/") and not m.path.startswith(_NO_FILES):
                    if m.deleted:
                        yield os.path.dirname(m.path), "", None
                    else:
                        yield m.path, *_mapped(pid, m)


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
    return hostkey.seal(config, _text(session, records)) if records else ""


def known(config: Config, manifest: Manifest) -> dict[str, InodeRecord]:
    """Path -> what the tree had there, as far as this very host says so."""
    text = _text(manifest.session.id, manifest.inodes)
    if not manifest.inodes or not hostkey.is_sealed(config, text, manifest.inodes_mac):
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
