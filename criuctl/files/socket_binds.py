"""Unix sockets with a path, where users other than root control the folder: bound by their own
process.

CRIU binds a socket as root, by its path: it removes a socket that is there, binds, and gives the
file its owner and mode, all by name.  A user who controls a folder on the way can replace it by a
link meanwhile, and a socket appears, or a file vanishes or changes its owner, where only root may
write.  So:

- The folder of each is walked and judged (`criuctl.files.permission`) in the plan and again
  before CRIU begins: the process must be allowed to make files there, or it is the folder of the
  dump, or root alone controls it.
- If root alone does not control it, CRIU makes the socket without a name (`take_out`).  When all is
  in place, and nothing has run, the process itself binds it (`bind`), with its own rights to files
  (CRIU has not given it its credentials yet, and leaves it those of root until then): the kernel
  lets it make a socket only where its user may.  What must be removed or get a mode is reached by
  the descriptor of the folder that was judged.  In the same way their own processes connect again
  the datagram sockets that were connected to it, or to one outside the tree, by such a name, and
  the streams that it had not accepted.
- At the end each is checked by descriptor: the file that the socket is bound to must be the one in
  the folder that was judged (`compare`).
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from msgspec import Struct, field

from ..criu.heldfiles import OwnIds, Use, own_ids
from ..criu.images import ImageSet, text
from ..criu.socketimages import TCP_CLOSE, TCP_LISTEN
from ..errors import CriuctlError, RestoreFailed
from ..proc import inject, socketfiles, trustedpath
from ..proc.path_control import PathLookup
from .deleted_files import nearest_folder
from .permission import HINT, Judge, Objection
from .socket_names import EXTERN, BoundName, bound

_OPENED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ASIDE = ".criuctl-aside"  # suffix for another file that is in place of a deleted name


class _Bound(Struct):
    """A socket with a path."""

    name: BoundName
    holder: tuple[int, int]  # PID in the tree, descriptor
    folder: int  # O_PATH
    raw: bytes = b""  # the address, if the process is to bind it itself
    backlog: int | None = None  # where it listens
    perms: tuple[int, int, int] | None = None  # uid, gid, mode of its file
    # sockets that are connected to it by name
    clients: list[tuple[int, int]] = field(default_factory=list)


def folder_objections(images: ImageSet, judge: Judge, lookup: PathLookup) -> list[Objection]:
    """Report what stands against binding sockets in the folders that their paths lead to now."""
    names = [name for name in bound(images) if not name.abstract]
    holders = images.holders() if names else {}
    found = []
    for name in names:
        held = holders.get(name.id)
        if not held:
            continue
        with ExitStack() as stack:
            folder, there = nearest_folder(lookup, name.path, stack)
            uses = [Use(pid, "descriptor", fd) for pid, fd in held]
            if (objection := judge.folder_objection(folder, there, uses, lookup.root)) is not None:
                found.append(objection)
    return found


def peer_objections(images: ImageSet, judge: Judge, lookup: PathLookup) -> list[Objection]:
    """Report what stands against connecting datagram sockets to their peers outside the tree, by
    their names.
    """
    found = []
    for peer in _peers(images):
        with (
            suppress(OSError),
            lookup.at(peer.name.path) as there,
        ):  # missing: reported elsewhere
            uses = [Use(pid, "descriptor", fd) for pid, fd in peer.clients]
            objection = judge.peer_objection(peer.name.path, there, uses, lookup.root)
            if objection is not None:
                found.append(objection)
    return found


def _peers(images: ImageSet) -> list[_Bound]:
    """Return the sockets outside that CRIU would connect sockets of the tree to, by their paths."""
    entries = [e for e in images.files() if e.HasField("usk")]
    if not any(e.usk.uflags & EXTERN for e in entries):
        return []
    holders = images.holders()
    clients: dict[int, list[tuple[int, int]]] = {}
    for entry in entries:
        # CRIU does not make streams again
        if entry.usk.peer and entry.usk.type == socket.SOCK_DGRAM:
            clients.setdefault(entry.usk.peer, []).extend(holders.get(entry.id, ())[:1])
    return [
        _Bound(
            BoundName(
                entry.id,
                entry.usk.name.rstrip(b"\0"),
                text(entry.usk.name_dir) if entry.usk.HasField("name_dir") else "",
                entry.usk.type,
                False,
            ),
            holder=(0, 0),
            folder=-1,
            raw=bytes(entry.usk.name),
            clients=clients[entry.usk.ino],
        )
        for entry in entries
        if entry.usk.uflags & EXTERN and _is_path(entry.usk.name) and clients.get(entry.usk.ino)
    ]


def _is_path(name: bytes) -> bool:
    return bool(name) and not name.startswith(b"\0")


class OwnBinds:
    """The sockets with paths of one restore."""

    def __init__(self, images: ImageSet, judge: Judge, root: int | None, stack: ExitStack) -> None:
        """Walk to their folders, in the mount namespace with this root folder, and hold them
        open.
        """
        self._sockets: list[_Bound] = []
        self._own: list[_Bound] = []
        self._peers: list[_Bound] = []  # outside, whose clients connect to them themselves
        self._ids: dict[int, OwnIds] = {}
        names = [name for name in bound(images) if not name.abstract]
        holders = images.holders() if names else {}
        with PathLookup(root) as lookup:
            for name in names:
                if name.id not in holders:
                    continue
                folder, there = nearest_folder(lookup, name.path, stack)
                uses = [Use(pid, "descriptor", fd) for pid, fd in holders[name.id]]
                refused = judge.folder_objection(folder, there, uses, root)
                if refused is not None:
                    raise RestoreFailed(str(refused), hint=HINT)
                one = _Bound(name, holders[name.id][0], there.fd)
                if folder != os.path.dirname(name.path):
                    continue  # CRIU makes the folders that are missing, for a deleted name
                self._sockets.append(one)
                if not lookup.is_roots(folder) and platform.machine() == "x86_64":
                    self._own.append(one)
            for peer in _peers(images) if platform.machine() == "x86_64" else ():
                with suppress(OSError), lookup.at(peer.name.path) as there:
                    if there.fault is not None:
                        self._peers.append(peer)
        if self._own or self._peers:
            self._ids = own_ids(images)
        if self._own:
            self._take_out(images)
        if self._peers:
            self._disconnect(images)

    def _take_out(self, images: ImageSet) -> None:
        """Have CRIU make those sockets without names."""
        own = {one.name.id: one for one in self._own}
        entries = images.files()
        by_inode = {e.usk.ino: own[e.id] for e in entries if e.HasField("usk") and e.id in own}
        peers = {e.usk.ino: e.usk.peer for e in entries if e.HasField("usk")}
        holders = images.holders()

        def edit(entry: Any) -> None:
            if not entry.HasField("usk"):
                return
            usk = entry.usk
            itself = usk.peer == usk.ino and usk.type == socket.SOCK_DGRAM
            if usk.peer in by_inode and (itself or peers.get(usk.peer) != usk.ino):
                # A stream whose peer is a listener waits to be accepted; CRIU would wait for that
                # to be bound.
                if usk.type == socket.SOCK_DGRAM or entry.id in holders:
                    by_inode[usk.peer].clients += holders.get(entry.id, ())[:1]
                    usk.peer = 0
                    usk.state = TCP_CLOSE if usk.type != socket.SOCK_DGRAM else usk.state
            if (one := own.get(entry.id)) is None:
                return
            one.raw = bytes(usk.name)
            one.backlog = usk.backlog if usk.state == TCP_LISTEN else None
            if usk.HasField("file_perms"):
                perms = usk.file_perms
                one.perms = perms.uid, perms.gid, perms.mode
            usk.state = TCP_CLOSE if usk.state == TCP_LISTEN else usk.state
            usk.name = b""
            for name in ("name_dir", "file_perms", "deleted", "mnt_id"):
                usk.ClearField(name)

        images.edit_files(edit)

    def _disconnect(self, images: ImageSet) -> None:
        """Have CRIU leave the clients of those peers unconnected."""
        numbers = {peer.name.id for peer in self._peers}
        inodes = {e.usk.ino for e in images.files() if e.HasField("usk") and e.id in numbers}

        def edit(entry: Any) -> None:
            usk = entry.usk
            if usk.peer in inodes and usk.type == socket.SOCK_DGRAM:
                usk.peer = 0

        images.edit_files(edit)

    def bind(self, pids: Mapping[int, int]) -> None:
        """Have the processes bind and connect what CRIU has not; `pids`: PID in the tree -> PID on
        this host.
        """
        for one in self._own:
            try:
                self._bind(one, pids)
            except (OSError, CriuctlError) as error:
                why = error.strerror if isinstance(error, OSError) else error.message
                raise RestoreFailed(
                    f"PID {one.holder[0]}: its unix socket {one.name.path} cannot be bound: {why}",
                    pid=one.holder[0],
                    fd=one.holder[1],
                ) from error

        for peer in self._peers:
            for client in peer.clients:
                try:
                    self._call(peer, inject.CONNECT, client, pids)
                except (OSError, CriuctlError) as error:
                    why = error.strerror if isinstance(error, OSError) else error.message
                    raise RestoreFailed(
                        f"PID {client[0]}: no socket connects to {peer.name.path} again: {why}",
                        hint="--connections hangup goes on without it.",
                        pid=client[0],
                        fd=client[1],
                    ) from error

    def _bind(self, one: _Bound, pids: Mapping[int, int]) -> None:
        base = os.path.basename(one.name.path)
        aside = ""
        with suppress(FileNotFoundError):
            there = os.stat(base, dir_fd=one.folder, follow_symlinks=False)
            if stat.S_ISSOCK(there.st_mode) and not one.name.deleted:
                os.unlink(base, dir_fd=one.folder)
            elif one.name.deleted:
                aside = base + _ASIDE
                os.rename(base, aside, src_dir_fd=one.folder, dst_dir_fd=one.folder)
        try:
            self._call(one, inject.BIND, one.holder, pids)
            self._dress(one, pids, base)
            for client in one.clients:
                self._call(one, inject.CONNECT, client, pids)
            if one.name.deleted and self._is_there(one, pids):
                os.unlink(base, dir_fd=one.folder)
        finally:
            if aside:
                os.rename(aside, base, src_dir_fd=one.folder, dst_dir_fd=one.folder)

    def _call(
        self,
        one: _Bound,
        number: int,
        holder: tuple[int, int],
        pids: Mapping[int, int],
    ) -> None:
        """Have a process bind its socket, or connect it to this one."""
        pid, address = pids[holder[0]], _address(one)
        with inject.stopped(pid), _as_itself(pid, self._ids[holder[0]]):
            with _in_folder(pid, one.name.folder):
                _run(pid, number, (holder[1],), address, (len(address),))
            if number == inject.BIND and one.backlog is not None:
                _run(pid, inject.LISTEN, (holder[1], one.backlog))

    def _dress(self, one: _Bound, pids: Mapping[int, int], base: str) -> None:
        """Give the file its owner and mode: the file that the socket is bound to, not the name."""
        if one.perms is None:
            return
        fd = os.open(base, _OPENED, dir_fd=one.folder)
        try:
            found = socketfiles.bound_inode(pids[one.holder[0]], one.holder[1])
            if found is None or not os.path.samestat(os.fstat(fd), found[1]):
                raise _elsewhere(one, found)
            uid, gid, mode = one.perms
            os.chown(f"/proc/self/fd/{fd}", uid, gid)
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(mode))
        finally:
            os.close(fd)

    def compare(self, pids: Mapping[int, int]) -> None:
        """Raise `RestoreFailed` if one is not bound in the folder that was judged; it is
        removed.
        """
        for one in self._sockets:
            pid = pids.get(one.holder[0])
            if pid is None or one.name.deleted or self._is_there(one, pids):
                continue
            found = socketfiles.bound_inode(pid, one.holder[1])
            if found is not None:
                raise _elsewhere(one, found)

    @staticmethod
    def _is_there(one: _Bound, pids: Mapping[int, int]) -> bool:
        found = socketfiles.bound_inode(pids[one.holder[0]], one.holder[1])
        base = os.path.basename(one.name.path)
        try:
            there = os.stat(base, dir_fd=one.folder, follow_symlinks=False)
        except OSError:
            return False
        return found is not None and os.path.samestat(there, found[1])


def _elsewhere(one: _Bound, found: tuple[str, os.stat_result] | None) -> RestoreFailed:
    """Return the error for a socket that was bound in another folder, where it is removed."""
    where = ""
    if found is not None:
        path, status = found
        where = f" but at {path}"
        with suppress(OSError, CriuctlError), trustedpath.opened_parent(path) as (folder, base):
            there = os.stat(base, dir_fd=folder.fd, follow_symlinks=False)
            if os.path.samestat(there, status):
                os.unlink(base, dir_fd=folder.fd)
    return RestoreFailed(
        f"PID {one.holder[0]} (descriptor {one.holder[1]}): its unix socket is not in the folder of"
        f" {one.name.path} that was judged{where}: something on the way there was changed while the"
        " tree was restored",
        hint="Nothing has run. Find what changes that path, then restore again.",
        pid=one.holder[0],
        fd=one.holder[1],
    )


def _address(one: _Bound) -> bytes:
    return struct.pack("=H", socket.AF_UNIX) + one.raw


@contextmanager
def _as_itself(pid: int, ids: OwnIds) -> Iterator[None]:
    """Give a stopped process, which is still root's, its own rights to files meanwhile."""
    groups = struct.pack(f"={len(ids.groups)}I", *ids.groups)
    with suppress(PermissionError):  # a user namespace in which groups cannot be set
        _run(pid, inject.SETGROUPS, (len(ids.groups),), groups or b"\0")
    gid = _run(pid, inject.SETFSGID, (ids.gid,))
    try:
        uid = _run(pid, inject.SETFSUID, (ids.uid,))
        try:
            if (_run(pid, inject.SETFSUID, (-1,)), _run(pid, inject.SETFSGID, (-1,))) != (
                ids.uid,
                ids.gid,
            ):
                raise OSError(errno.EPERM, "it cannot be given its user's rights")
            yield
        finally:
            _run(pid, inject.SETFSUID, (uid,))
    finally:
        _run(pid, inject.SETFSGID, (gid,))


@contextmanager
def _in_folder(pid: int, folder: str) -> Iterator[None]:
    """Put a stopped process into the folder that a relative name begins in; "" for none."""
    if not folder:
        yield
        return
    before = _run(pid, inject.OPEN, (), b".\0", (os.O_PATH | os.O_DIRECTORY, 0))
    try:
        _run(pid, inject.CHDIR, (), os.fsencode(folder) + b"\0")
        yield
    finally:
        _run(pid, inject.FCHDIR, (before,))
        _run(pid, inject.CLOSE, (before,))


def _run(
    pid: int,
    number: int,
    before: Sequence[int],
    data: bytes = b"",
    behind: Sequence[int] = (),
) -> int:
    """Run a system call with `data` at the address between these arguments."""
    with ExitStack() as stack:
        address = (stack.enter_context(inject.placed(pid, data)),) if data else ()
        result = inject.call(pid, number, *before, *address, *behind)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
