"""The names of the tree's unix sockets, and the processes that have them at the time of the
restore.

CRIU removes the file of a socket at every name that a socket of the images has, whichever process
owns it, and binds there: clients would no longer find a living server.  So the owner of each name
is looked up first, and before CRIU starts again:

- a path that leads to a living socket: refused.  A copy's socket gets a name of its own next to it,
  and in the mount namespace of the copy, and nowhere else, that is shown at the path: its programs
  find it there, and cannot remove what is below, as many do when they end.  A copy that comes back
  later keeps that name, and is shown at the path again;
- the same for a socket whose file is deleted, which only has the name: it gets another one;
- a path to anything else, a symlink too: refused, because CRIU cannot bind there;
- an abstract name that is taken: refused, and a copy gets a network of its own, as with ports.

An accepted connection has its listener's name, which CRIU would remove, too, and then not bind: it
is restored without (`disown`).  Files that a failed restore has left at the paths are removed
again.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct

from ..checkpoint.file_records import FileRecord
from ..checkpoint.manifest import Manifest
from ..criu.images import ImageSet, read, text
from ..criu.socketimages import TCP_ESTABLISHED
from ..errors import CriuctlError, NoSuchProcess, RestoreFailed
from ..namespaces.network_choice import Place, is_new, opened
from ..proc import folder_walk, socketfiles
from ..proc.descriptors import descriptors
from ..proc.namespaces import in_mount_namespace
from ..proc.procfs import read_text
from ..proc.syscalls import bind_mount
from ..proc.tree import read_tree
from ..quoting import quoted
from ..report import Finding
from .put_back import dress

EXTERN = 1  # bit of a socket's uflags: the name is its peer's, outside the tree
_LONGEST = 107  # bytes of a path that bind(2) takes, without the NUL
_OWN = re.compile(r"(.+)\.copy-[0-9a-f]{8}x*", re.DOTALL)
_PATIENCE, _PAUSE = 1.0, 0.05  # seconds in which a process that is ending releases a name
_END_IT = "End that process first"


class BoundName(Struct, frozen=True):
    """A socket of the images that CRIU will bind."""

    id: int  # in files.img
    name: bytes  # as it is bound, without the NUL behind a path
    folder: str  # the folder of a relative name
    type: int
    deleted: bool  # no process finds it by its name

    @property
    def abstract(self) -> bool:
        """Return whether it is a name in a net namespace, not a path."""
        return self.name.startswith(b"\0")

    @property
    def path(self) -> str:
        """Return where it is bound, in readable form if that is no path."""
        if self.abstract:
            return "@" + os.fsdecode(self.name[1:]).replace("\0", "@")
        return os.path.join(self.folder or "/", os.fsdecode(self.name))


class TakenName(Struct, frozen=True):
    """A name that the tree's socket cannot have."""

    path: str
    # copys: the tree's socket has its own name already
    what: Literal["socket", "deleted", "copys", "other", "abstract"]
    by: str  # its owner, or what it is; "" if it has no owner
    own: str = ""  # the name that the tree's socket can have instead; "" for none
    pid: int | None = None  # the tree's process and descriptor
    fd: int | None = None
    exists: bool = True  # there is something at the path


# -- names that are taken -------------------------------------------------------------------------


def bound(images: ImageSet) -> list[BoundName]:
    """Return every socket that CRIU binds to a name, except paths on mounts that are the tree's
    own.
    """
    found, own_mounts = [], _own_mounts(images)
    for entry in images.files():
        usk = entry.usk
        if not entry.HasField("usk") or not usk.name or usk.uflags & EXTERN or _is_connected(usk):
            continue
        if usk.HasField("mnt_id") and usk.mnt_id in own_mounts:
            continue
        name = usk.name if usk.name.startswith(b"\0") else usk.name.rstrip(b"\0")
        folder = text(usk.name_dir) if usk.HasField("name_dir") else ""
        found.append(BoundName(entry.id, name, folder, usk.type, usk.deleted))
    return found


def _is_connected(usk: Any) -> bool:
    """Return whether it is a stream that only has a name: it is not bound again."""
    return bool(usk.type != socket.SOCK_DGRAM and usk.state == TCP_ESTABLISHED)


def _own_mounts(images: ImageSet) -> set[int]:
    """Return the mounts of a saved mount namespace that are made again; all others are this host's,
    by the same paths.
    """
    names = [name for name in images.names() if name.startswith("mountpoints-")]
    mounts = [mount for name in names for mount in read(images.folder, name, "MNTS")]
    return {m.mnt_id for m in mounts if not m.ext_mount and m.mountpoint not in ("/", "./")}


def taken(images: ImageSet, manifest: Manifest, net: Place, *, copy: bool) -> tuple[TakenName, ...]:
    """Return the names of the images that are taken here; `net`: how, and from where, the tree
    gets its net namespace.
    """
    with opened(net) as namespace:
        names = bound(images)
        asked = [n for n in names if not n.abstract or not is_new(net.mode)]
        deadline = time.monotonic() + (0 if copy else _PATIENCE)  # the original does not end
        while (
            kinds := [(n, kind) for n in asked if (kind := _look(n, namespace))]
        ) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        known = {n.path for n in names}
        copys = {n: base for n in names if (base := _copy_of(n)) and base not in known}
        if not kinds and not copys:
            return ()
        held = images.holders()
        found = []
        owners = socketfiles.owners(
            {n.path for n, kind in kinds if kind in ("socket", "deleted")} | set(copys.values())
        )
        for n, kind in kinds:
            own = _own_name(n, manifest.id[:8]) if kind in ("socket", "deleted") else ""
            found.append(
                TakenName(
                    n.path,
                    kind,
                    _by(n, kind, namespace, owners),
                    own,
                    *next(iter(held.get(n.id, ())), ()),
                )
            )
        for n, base in copys.items():
            state = socketfiles.at(base)
            if state == "other":
                continue
            by = _process(owners.get(base)) if state == "alive" else ""
            pid, fd = next(iter(held.get(n.id, ())), (None, None))
            found.append(TakenName(base, "copys", by, n.path, pid, fd, state != "none"))
        return tuple(found)


def _look(
    n: BoundName, namespace: int | None
) -> Literal["", "socket", "deleted", "other", "abstract"]:
    if n.abstract:
        return "abstract" if socketfiles.abstract_taken(n.name, n.type, namespace) else ""
    state = socketfiles.at(n.path)
    if state == "other":
        return "" if n.deleted else "other"  # CRIU moves it aside until that socket is bound
    return "" if state != "alive" else "deleted" if n.deleted else "socket"


def _copy_of(n: BoundName) -> str:
    """Return the path that the programs know of a socket that has a copy's own name; "" for any
    other.
    """
    own = None if n.abstract or n.deleted else _OWN.fullmatch(n.path)
    return own[1] if own is not None else ""


def copys_files(root: int) -> set[str]:
    """Return the files of this tree's unix sockets that have a copy's own names, as far as they may
    be examined.
    """
    found: set[str] = set()
    with suppress(CriuctlError):
        for process in read_tree(root):
            with suppress(CriuctlError):
                fds = [d.fd for d in descriptors(process.pid) if d.kind == "socket"]
                paths = {socketfiles.bound_file(process.pid, fd) for fd in fds}
                found |= {path for path in paths if path and _OWN.fullmatch(path)}
    return found


def is_shown(root: str, point: str) -> bool:
    """Return whether a mount shows a copy's own name at the path that its socket is known by: it
    will be shown again.
    """
    own = _OWN.fullmatch(os.path.basename(root))
    return own is not None and own[1] == os.path.basename(point)


def _own_name(n: BoundName, mark: str) -> str:
    """Return a free path in the same folder; "" if it would be too long to be bound."""
    folder, base = os.path.split(os.fsdecode(n.name))
    suffix = f".copy-{mark}"
    while True:
        own = os.path.join(folder, base + suffix)
        if len(os.fsencode(own)) > _LONGEST:
            return ""
        path = os.path.join(n.folder or "/", own)
        if socketfiles.at(path) in ("none", "dead"):  # a process that has ended may have left it
            return path
        suffix += "x"


def _by(
    n: BoundName, kind: str, namespace: int | None, owners: Mapping[str, tuple[int, int]]
) -> str:
    if kind == "abstract":
        return _process(socketfiles.abstract_owner(n.name, n.type, namespace))
    if kind == "other":
        with suppress(OSError):
            mode = os.lstat(n.path).st_mode
            return next((what for is_it, what in _KINDS if is_it(mode)), "another kind of file")
        return "another kind of file"
    return _process(owners.get(n.path))


_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
)


def _process(owner: tuple[int, int] | None) -> str:
    if owner is None:
        return "another process"
    name = "gone by now"
    with suppress(NoSuchProcess, OSError):
        name = read_text(owner[0], "comm").strip()
    return f"PID {owner[0]} ({name}) fd {owner[1]}"


# -- what is to be done ---------------------------------------------------------------------------


def settle(
    names: Iterable[TakenName],
    findings: list[Finding],
    *,
    copy: bool,
    init: bool,
    pids: str,
    grouped: bool = False,
) -> tuple[TakenName, ...]:
    """Return the sockets that get names of their own; for all others of `names` an error is added
    to `findings`.

    `init`: the root was PID 1, so CRIU makes its mount namespace; `pids`: as requested; `grouped`:
    it is restored with other members of its group, which find the sockets, too.  Abstract names are
    not judged here.
    """
    settled: list[TakenName] = []
    private = not init and pids != "same"
    finders = "the processes of its group" if grouped else "its own processes"
    for n in names:
        level: Literal["error", "warning", "info"] = "error"
        hint = f"{_END_IT}, then restore."
        if n.what == "abstract":
            continue
        if n.what == "other":
            text, hint = (
                f"{n.path} is the name of a unix socket, and {n.by} is there",
                "Move it away.",
            )
        elif n.what == "deleted" and n.own:
            level, hint = "warning", ""
            text = (
                f"the unix socket {n.path}, whose file is deleted, comes back bound to {n.own}: "
                f"{n.by} has that path"
            )
        elif n.what == "copys" or (n.what == "socket" and copy and n.own and private):
            shown = private and n.exists
            level = "warning" if n.by or not shown else "info"
            its = f"the {'copy' if copy else 'tree'}'s unix socket is {n.own}"
            text = (
                f"{n.path} leads to {n.by}; {its}" if n.by else f"{its}, because {n.path} was taken"
            )
            text += (
                f", and only {finders} find it there"
                if shown
                else f", and {finders} do not find it there"
            )
            hint = "" if n.exists else f"`ln -s {quoted(n.own)} {quoted(n.path)}` lets them."
        else:
            text = f"{n.path} is the name of a unix socket of the tree, and {n.by} has it"
            if n.what == "deleted" or (copy and not n.own):
                text += "; the path is too long for another name next to it"
            if copy:
                how = "`criuctl verify --restore` tries a copy with files of its own."
                hint = (
                    f"Restore with --pids auto. {how}"
                    if pids == "same" and not init and n.own
                    else f"{_END_IT}. {how}"
                )
            elif n.own and not init:
                hint = (
                    f"{_END_IT}, or restore a copy with --as NAME, whose socket gets a name of "
                    "its own."
                )
        findings.append(
            Finding(
                level,
                "socket-taken" if level == "error" else "socket-own-name",
                text,
                hint,
                n.pid,
                n.fd,
            )
        )
        if level != "error":
            settled.append(n)
    return tuple(settled)


def covering(names: Iterable[TakenName]) -> list[TakenName]:
    """Return those that are shown to the tree at their old paths, which needs a mount namespace of
    its own.
    """
    return [n for n in names if n.what in ("socket", "copys") and n.exists]


# -- doing it -------------------------------------------------------------------------------------


class Bindings:
    """The names of one restore: put into the images, watched, shown, and undone."""

    def __init__(self, images: ImageSet, names: Sequence[TakenName]) -> None:
        self._images = images
        self._names = names
        self._paths: list[str] = []  # of all sockets of the tree
        self._before: dict[str, os.stat_result | None] = {}
        # path -> the tree's own path instead
        self.own = {n.path: n.own for n in names if n.what == "socket"}

    def put(self) -> None:
        """Change the names in the images."""
        own = {n.path: n.own for n in self._names if n.what in ("socket", "deleted")}
        new = {b.id: own[b.path] for b in bound(self._images) if b.path in own}
        disown(self._images)

        def edit(entry: Any) -> None:
            if entry.id in new and entry.HasField("usk"):
                name = entry.usk.name
                folder = os.path.dirname(name)
                base = os.fsencode(os.path.basename(new[entry.id]))
                nul = name[len(name.rstrip(b"\0")) :]  # which the kernel usually counts
                entry.usk.name = os.path.join(folder, base) + nul

        if new:
            self._images.edit_files(edit)
        self._paths = list(dict.fromkeys(b.path for b in bound(self._images) if not b.abstract))

    def begin(self) -> None:
        """Record what is at the paths before CRIU starts; `RestoreFailed` if one is taken now."""
        for path in self._paths:
            if socketfiles.at(path) == "alive":
                raise RestoreFailed(
                    f"{path} is the name of a unix socket of the tree, and "
                    f"{_process(socketfiles.owner(path))} has it by now",
                    hint=f"{_END_IT}, then restore.",
                )
            try:
                self._before[path] = os.lstat(path)
            except OSError:
                self._before[path] = None

    @property
    def shown(self) -> list[tuple[str, str]]:
        """Return the tree's own sockets that are shown to it, and the paths that it knows."""
        return [(n.own, n.path) for n in covering(self._names)]

    def show(self, pid: int, shown: Sequence[tuple[str, str]] | None = None) -> None:
        """Show the tree's own sockets at the paths that it knows, in the mount namespace of `pid`
        alone; or what is `shown` instead: sockets of other members of its group, folders.
        """
        pairs = self.shown if shown is None else shown

        def mount() -> None:
            for own, path in pairs:
                bind_mount(own, path)

        try:
            if pairs:
                in_mount_namespace(pid, mount)
        except OSError as error:
            raise RestoreFailed(
                f"the tree's own cannot be shown where the tree knows it: {error}"
            ) from error

    def undo(self) -> None:
        """Undo a failed restore: put back what was at each path before."""
        for path, before in self._before.items():
            with suppress(OSError), folder_walk.folder(os.path.dirname(path)) as folder:
                _put_back(os.path.basename(path), path, before, folder)


def _put_back(name: str, path: str, before: os.stat_result | None, folder: int) -> None:
    try:
        now: os.stat_result | None = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        now = None
    if now is not None:
        if socketfiles.at(path) != "dead":
            return  # another process's now
        if before is None:
            os.unlink(name, dir_fd=folder)
            return
    if before is None or not stat.S_ISSOCK(before.st_mode):
        return
    if now is None:
        os.mknod(name, stat.S_IFSOCK | 0o600, dir_fd=folder)
    record = FileRecord(
        path=path,
        kind="carried",
        mode=before.st_mode,
        uid=before.st_uid,
        gid=before.st_gid,
        mtime_ns=before.st_mtime_ns,
    )
    dress(name, record, folder)


def disown(images: ImageSet) -> None:
    """Take the names from connected streams, which CRIU does not bind: it would only remove what is
    there.
    """

    def edit(entry: Any) -> None:
        usk = entry.usk
        if entry.HasField("usk") and usk.name and not usk.uflags & EXTERN and _is_connected(usk):
            usk.name = b""
            for field in ("name_dir", "file_perms", "deleted", "mnt_id"):
                usk.ClearField(field)

    if any(e.HasField("usk") and e.usk.name and _is_connected(e.usk) for e in images.files()):
        images.edit_files(edit)
