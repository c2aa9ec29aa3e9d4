"""The needs of a tree on another host, gathered on the source while the tree runs.

`gather` only reads; its result (`criuctl.ops.moving.needs_format`) goes to the target, where
`criuctl.ops.moving.target_check` judges it. Changes between this look and the freeze are not known
here: the restore checks again, on the files and connections of the checkpoint. Secrets stay on the
source: no arguments, no environment, no answers of peers.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from ...checkpoint.connection_record import ConnectionRecord
from ...checkpoint.manifest import ProcessRecord, SessionRef
from ...config import Config
from ...connections.survey import Survey
from ...criu import binary
from ...dump.checks.scene import Scene, collect
from ...errors import CriuctlError, NoSuchProcess, NotFound
from ...files.carried_binaries import Binaries
from ...files.carried_files import resolve_carried, walk
from ...files.shared_mappings import writes
from ...host.identity import host_info
from ...namespaces.plan import plan_entry
from ...proc import address_choice
from ...proc.elfnotes import build_id
from ...proc.procfs import read_text, reading
from ...proc.syscalls import borrow_socket
from ...report import Reporter
from .needs_format import KERNELS_OWN, LATEST, NeededFile, NeededTerminal, Needs

_MAX_LISTED = 5_000  # files below the carried folders that are named, and
_MAX_NAMES = 1 << 20  # characters of their paths; of the others only the bytes are counted
_UNNAMED = (
    "/SYSV",
    "/memfd:",
    "/anon_hugepage",
    "/secretmem",
    "/dev/zero",
    "/dev/hugepages/",
    "anon_inode:",
    "[",
)
_IP_FREEBIND = 15


def gather(
    config: Config,
    root_pid: int,
    *,
    session: SessionRef,
    incarnation: int = 1,
    with_files: Sequence[str] = (),
    keep_addresses: Sequence[str] = (),
    connections: str | None = None,
    records: Sequence[ConnectionRecord] | None = None,
    written_travel: bool = True,
    carry_binaries: bool = False,
    file_conflicts: str = "",
    pids: str = "auto",
) -> dict[str, Any]:
    """Return the needs of the running tree of `root_pid`, as JSON.

    `records` are its connections with their policies if the caller has read them already; otherwise
    they are read here, with `connections` as the command line's policy. Raise `PreflightRefused`
    for `with_files` and `NotFound` for `keep_addresses` that are not here, `UsageError` for an
    invalid address, `NoSuchProcess`.
    """
    _check_addresses(keep_addresses)
    scene = collect(root_pid, config)
    if records is None:
        records = [
            c.record
            for c in Survey(config, Reporter(), requested=connections).look(root_pid, details=False)
        ]
    carried = _Carried(resolve_carried(with_files, root_pid), root_pid)
    users, groups = _owners(scene)
    criu: tuple[int, ...] = ()
    with suppress(CriuctlError, OSError):  # a source without CRIU finds that out by itself
        criu = binary.find(config).version()
    binaries = Binaries(root_pid, wanted=carry_binaries)
    files = list(_files(scene, config, carried, binaries, written_travel=written_travel))
    return Needs(
        session=session,
        host=host_info(config),
        incarnation=incarnation,
        criu=criu,
        processes=tuple(
            ProcessRecord(
                pid=p.pid,
                ns_pid=p.ns_pid,
                command=p.command,
                exe=p.exe,
                cwd=p.cwd,
                uid=p.uid,
                gid=p.gid,
                threads=p.threads,
            )
            for p in scene.tree
        ),
        namespaces=plan_entry(root_pid).to_dict(),
        ids=tuple(sorted(_ids(scene))),
        users=users,
        groups=groups,
        connections=tuple(
            r.with_use(session={}, options={}, tcp={}, peer_process="") for r in records
        ),
        free_binds=tuple(_free_binds(scene)),
        keep_addresses=tuple(keep_addresses),
        files=(*files, *carried.listed()),
        more_files=carried.more_files,
        more_bytes=carried.more_bytes,
        terminals=tuple(NeededTerminal(t.path, t.kind, t.holders) for t in scene.terminals),
        memory=sum(_memory(p.pid) for p in scene.tree if not p.zombie),
        pids=pids,
        connections_wish=connections or "",
        file_conflicts=file_conflicts,
        carry_binaries=carry_binaries,
        time=time.time(),
        monotonic=time.monotonic(),
    ).to_dict()


def _check_addresses(kept: Sequence[str]) -> None:
    """Raise `NotFound` for an address that is to move along but is not here."""
    for text in kept:
        ip, _device = address_choice.parse(text)
        if address_choice.find(ip, None) is None:
            raise NotFound(
                f"{ip}, which is to move along, is not an address of this host",
                hint="`ip address` shows them.",
            )


class _Carried:
    """The files of ``--with-files``, found again by inode while the open files are read."""

    def __init__(self, paths: Sequence[str], root_pid: int) -> None:
        self._folders: list[str] = []
        self._found: dict[str, NeededFile] = {}
        self.more_files = self.more_bytes = 0
        names = 0
        for path in paths:
            for name, fd in walk(path, root_pid):
                if fd is None:  # removed meanwhile
                    continue
                status = os.fstat(fd)
                if name == path and stat.S_ISDIR(status.st_mode):
                    self._folders.append(path)
                if len(self._found) < _MAX_LISTED and names < _MAX_NAMES:
                    names += len(name)
                    self._found[name] = _needed(name, "carried", status, travels=True)
                else:
                    self.more_files += 1
                    self.more_bytes += status.st_blocks * 512

    def has(self, path: str) -> bool:
        """Return whether the path is carried because it is named, or is in a folder that is."""
        return path in self._found or any(
            path.startswith(f"{folder.rstrip('/')}/") for folder in self._folders
        )

    def listed(self) -> list[NeededFile]:
        """Yield each carried file."""
        return list(self._found.values())


def _needed(path: str, use: str, status: os.stat_result, **more: Any) -> NeededFile:
    return NeededFile(
        path=path,
        use=use,
        size=status.st_size,
        mode=status.st_mode,
        uid=status.st_uid,
        mtime_ns=max(0, min(status.st_mtime_ns, LATEST)),
        rdev=status.st_rdev,
        blocks=status.st_blocks * 512,
        **more,
    )


def _files(
    scene: Scene, config: Config, carried: _Carried, binaries: Binaries, *, written_travel: bool
) -> Iterator[NeededFile]:
    yielded: set[str] = set()
    for path, use, pid in _places(scene):
        yielded |= {path} if use != "folder" else set()
        if not carried.has(path):
            source = f"/proc/{pid}/root{path}" if use == "folder" else f"/proc/{pid}/{use}"
            with suppress(OSError):
                yield _needed(path, use, os.stat(source), holders=((pid, -1),))
    for path, held in _by_path(scene).items():
        if carried.has(path) or path in yielded:
            continue
        status = held.status
        travels = (
            held.use == "written"
            and written_travel
            and status.st_size <= config.files_max_mib << 20
        )
        if (
            held.mapped
            and held.use != "written"
            and binaries.travels(path, status.st_size, executable=held.executable)
        ):
            held.use, travels = "mapped", True
        yield _needed(
            path,
            held.use,
            status,
            build_id=_build_id(held.source) if held.use == "mapped" else "",
            travels=travels,
            append=held.use == "written" and held.append,
            holders=tuple(held.holders[:16]),
        )


class _Held(Struct):
    """One path, merged over all processes that use it."""

    status: os.stat_result
    source: str  # a name under /proc that leads to this very file
    use: str = "read"
    append: bool = True
    holders: list[tuple[int, int]] = field(default_factory=list)
    mapped: bool = False
    executable: bool = False  # mapped as code


def _by_path(scene: Scene) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for process, d in scene.descriptors():
        path = d.target
        if (
            d.deleted
            or d.kind not in ("file", "dir", "device", "symlink", "pipe")
            or not _has_name(path)
        ):
            continue
        source = f"/proc/{process.pid}/fd/{d.fd}"
        held = _hold(found, path, source)
        if held is None:
            continue
        held.holders.append((process.pid, d.fd))
        if d.writable and d.kind == "file":
            held.use, held.append = "written", held.append and bool(d.flags & os.O_APPEND)
    for process, m in scene.mappings():
        if not m.inode or m.deleted or not _has_name(m.path):
            continue
        held = found.get(m.path)
        if held is None:
            held = _hold(found, m.path, f"/proc/{process.pid}/map_files/{m.start:x}-{m.end:x}")
            if held is None or not stat.S_ISREG(held.status.st_mode):
                found.pop(m.path, None)
                continue
            held.use = "mapped"
        if (process.pid, -1) not in held.holders[-1:]:
            held.holders.append((process.pid, -1))
        if stat.S_ISREG(held.status.st_mode) and writes(process.pid, m):
            held.use, held.append = "written", False
        held.mapped = True
        held.executable = held.executable or "x" in m.perms
        if held.use == "read" and "x" in m.perms:
            held.use = "mapped"  # it is open too, but running it matters more
    return found


def _hold(found: dict[str, _Held], path: str, source: str) -> _Held | None:
    if path not in found:
        try:
            found[path] = _Held(os.stat(source), source)
        except OSError:
            return None  # closed meanwhile
    return found[path]


def _has_name(path: str) -> bool:
    return (
        path.startswith("/") and not path.startswith(KERNELS_OWN) and not path.startswith(_UNNAMED)
    )


def _build_id(source: str) -> str:
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return ""
    try:
        return build_id(fd)
    finally:
        os.close(fd)


def _places(scene: Scene) -> Iterator[tuple[str, str, int]]:
    """Yield (path, use, PID) of working and root folders, and of the folders in which unix sockets
    have their names.
    """
    seen: set[tuple[str, str]] = set()
    for process in scene.tree:
        if process.zombie:
            continue
        for use in ("cwd", "root"):
            with suppress(OSError):
                path = os.readlink(f"/proc/{process.pid}/{use}")
                if (
                    path.startswith("/")
                    and not path.endswith(" (deleted)")
                    and not f"{path}/".startswith(KERNELS_OWN)
                ):
                    if (path, use) not in seen:
                        seen.add((path, use))
                        yield path, use, process.pid
    for s in scene.sockets:
        name = s.socket.name
        if (
            s.socket.family == "unix"
            and name.startswith("/")
            and (os.path.dirname(name), "folder") not in seen
        ):
            seen.add((os.path.dirname(name), "folder"))
            yield os.path.dirname(name), "folder", s.pid


def _status(text: str) -> dict[str, list[str]]:
    return {
        key: value.split() for key, _, value in (line.partition(":") for line in text.split("\n"))
    }


def _ids(scene: Scene) -> set[int]:
    """Return every number that a restore in the host's PID namespace would use."""
    found: set[int] = set()
    for process in scene.tree:
        try:
            with reading(process.pid):
                threads = os.listdir(f"/proc/{process.pid}/task")
            for tid in threads:
                status = _status(read_text(process.pid, f"task/{tid}/status"))
                found.update(
                    int(status[key][-1]) for key in ("NSpid", "NSpgid", "NSsid") if status.get(key)
                )
        except NoSuchProcess:
            continue
    return found - {0}


def _owners(scene: Scene) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of all user and group ids of the tree's processes."""
    users = {uid for process in scene.tree for uid in process.uids}
    groups = {gid for process in scene.tree for gid in process.gids}
    for process in scene.tree:
        with suppress(NoSuchProcess):
            groups.update(map(int, _status(read_text(process.pid, "status")).get("Groups", [])))
    user_names, group_names = {}, {}
    for uid in sorted(users):
        user_names[str(uid)] = ""
        with suppress(KeyError):
            user_names[str(uid)] = pwd.getpwuid(uid).pw_name
    for gid in sorted(groups):
        group_names[str(gid)] = ""
        with suppress(KeyError):
            group_names[str(gid)] = grp.getgrgid(gid).gr_name
    return user_names, group_names


def _free_binds(scene: Scene) -> Iterator[str]:
    """Yield the local ends of sockets that are bound with IP_FREEBIND."""
    for s in scene.sockets:
        kernel = s.socket
        if (
            kernel.local is None
            or s.loopback
            or kernel.local.host in ("0.0.0.0", "::", "127.0.0.1", "::1")
        ):
            continue
        if kernel.listening or not kernel.connected:
            with suppress(OSError, NoSuchProcess):
                pidfd = os.pidfd_open(s.pid)
                try:
                    with borrow_socket(pidfd, s.fd) as borrowed:
                        if borrowed.getsockopt(socket.IPPROTO_IP, _IP_FREEBIND):
                            yield str(kernel.local)
                finally:
                    os.close(pidfd)


def _memory(pid: int) -> int:
    """Return the bytes of memory and swap, each page divided among the processes that share it."""
    try:
        rollup = _status(read_text(pid, "smaps_rollup"))
    except (NoSuchProcess, OSError):
        return 0
    return sum(int(rollup[key][0]) for key in ("Pss", "SwapPss") if rollup.get(key)) * 1024
