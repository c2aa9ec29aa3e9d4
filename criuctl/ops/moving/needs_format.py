"""The message in which a source describes to a target what its tree needs.

`Needs` is plain JSON on the wire. Records that a checkpoint's manifest also has (host, processes,
connections) have the same format as there, so the target can use the restore's plan on them. The
target does not trust the message: `read` checks all types, ranges, names and paths. No name is
ever passed to a resolver, no path leads into /proc or upwards, and the length of every list is
bounded.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any

from msgspec import field

from ...checkpoint.connection_record import ConnectionRecord, endpoint
from ...checkpoint.manifest import HostInfo, ProcessRecord, SessionRef
from ...checkpoint.records import Record, check_path, check_pattern, check_range, damaged
from ...errors import Damaged, UnsupportedFormat
from ...namespaces.plan import DUMPED, ENTERED
from ...session.names import valid_name

NEEDS_VERSION = 1
KERNELS_OWN = ("/proc/", "/sys/")  # files that every kernel provides itself
USES = ("mapped", "read", "written", "carried", "cwd", "root", "folder")
_MAX_ENTRIES = 200_000  # in one list: the target checks the entries one by one
_MODES = ("host", "entered", "dumped")
_HEX = re.compile(r"(?:[0-9a-f]{2}){0,64}")
_NET_NAME = re.compile(r"[^/\0]{1,255}")
_NUMBER = re.compile(r"\d{1,10}")
LATEST = (1 << 63) - 1  # ns: in the year 2262


class NeededFile(Record, frozen=True):
    """One path that the tree uses, and what must be there on the target."""

    path: str
    use: str  # one of USES; folder: the tree makes files in it, its mode does not matter
    size: int = 0
    mode: int = 0
    uid: int = 0
    mtime_ns: int = 0
    rdev: int = 0  # of a device
    build_id: str = ""  # hex; of mapped files
    blocks: int = 0  # bytes that it takes on disk
    travels: bool = False  # the source sends it
    append: bool = False  # every writer appends
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor; -1: mapped, or none)

    def check(self, where: str) -> None:
        check_path(self.path, f"{where}.path")
        if self.use not in USES:
            raise damaged(f"{where}.use", f"is none of {', '.join(USES)}")
        if self.use == "carried" and not self.travels:
            raise damaged(f"{where}.travels", "is false for a file that is carried")
        if os.path.normpath(self.path) != self.path or f"{self.path}/".startswith(KERNELS_OWN):
            raise damaged(f"{where}.path", "is not normalised, or is below /proc or /sys")
        check_pattern(_HEX, self.build_id, f"{where}.build_id")
        for name in ("size", "mode", "uid", "mtime_ns", "rdev", "blocks"):
            check_range(getattr(self, name), 0, LATEST, f"{where}.{name}")


class NeededTerminal(Record, frozen=True):
    """A terminal of the tree; a new pseudo-terminal is made for it."""

    path: str
    kind: str  # pts, console, serial, other
    holders: tuple[tuple[int, int], ...] = ()


class Needs(Record, frozen=True):
    """Everything that a tree needs on the host that it moves to."""

    session: SessionRef
    host: HostInfo
    version: int = NEEDS_VERSION
    incarnation: int = 1
    time: float = 0.0  # the source's clock when this was gathered
    monotonic: float = 0.0  # its CLOCK_MONOTONIC at the same moment
    criu: tuple[int, ...] = ()
    processes: tuple[ProcessRecord, ...] = ()
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    ids: tuple[int, ...] = ()  # every PID, thread, group and session, as the tree sees them
    users: dict[str, str] = field(default_factory=dict)  # id -> name, "" without one
    groups: dict[str, str] = field(default_factory=dict)
    connections: tuple[ConnectionRecord, ...] = ()
    # local ends that may be bound without being an address of the host
    free_binds: tuple[str, ...] = ()
    keep_addresses: tuple[str, ...] = ()  # IP or IP@DEVICE
    files: tuple[NeededFile, ...] = ()
    more_files: int = 0  # files that travel and are not listed
    more_bytes: int = 0  # the bytes that those take on disk
    terminals: tuple[NeededTerminal, ...] = ()
    memory: int = 0  # bytes that the tree has in memory and swap, shared ones once
    pids: str = "auto"  # this and the next two: options of `restore`
    connections_wish: str = ""
    file_conflicts: str = ""  # "" leaves it to the target's configuration
    carry_binaries: bool = False  # mapped programs and libraries travel too

    def check(self, where: str) -> None:
        if not valid_name(self.session.name):
            raise damaged(f"{where}.session.name", "cannot be a session's name")
        for name in ("processes", "ids", "users", "groups", "connections", "files", "terminals"):
            if len(getattr(self, name)) > _MAX_ENTRIES:
                raise damaged(f"{where}.{name}", f"has more than {_MAX_ENTRIES} entries")
        for number in self.ids:
            check_range(number, 0, 1 << 31, f"{where}.ids")
        for name in ("memory", "more_files", "more_bytes", "incarnation"):
            check_range(getattr(self, name), 0, (1 << 63) - 1, f"{where}.{name}")
        for name, choices in (
            ("pids", ("auto", "same", "private")),
            ("connections_wish", ("", "keep", "reconnect", "hangup", "refuse")),
            ("file_conflicts", ("", "refuse", "restore", "keep")),
        ):
            if getattr(self, name) not in choices:
                raise damaged(f"{where}.{name}", f"is none of {', '.join(filter(None, choices))}")
        for name in ("users", "groups"):
            for key in getattr(self, name):
                check_pattern(_NUMBER, key, f"{where}.{name}")
        _check_namespaces(self.namespaces, f"{where}.namespaces")
        for number, record in enumerate(self.connections):
            _check_connection(record, f"{where}.connections[{number}]")
        for text in self.keep_addresses:
            _check_address(text.partition("@")[0], f"{where}.keep_addresses")


def _check_namespaces(value: Mapping[str, Mapping[str, Any]], where: str) -> None:
    for kind, entry in value.items():
        if kind not in (*ENTERED, *DUMPED) or entry.get("mode") not in _MODES:
            raise damaged(where, f"has no valid entry for {kind[:20]!r}")
        name, inode, init = entry.get("name"), entry.get("inode", 0), entry.get("init", False)
        cookie = entry.get("cookie", 0)
        if name is not None and not (
            isinstance(name, str) and _NET_NAME.fullmatch(name) and name not in (".", "..")
        ):
            raise damaged(f"{where}.{kind}.name", "is not a valid name")
        if not isinstance(inode, int) or not isinstance(cookie, int) or not isinstance(init, bool):
            raise damaged(f"{where}.{kind}", "is not valid")


def _check_connection(record: ConnectionRecord, where: str) -> None:
    if record.family in ("inet", "inet6"):
        for text in filter(None, (record.local, record.peer)):
            host, port = endpoint(text)
            _check_address(host, where)  # a name would be passed to the resolver
            check_range(port, 0, 65535, where)
    # an abstract name may contain any byte
    elif any("\0" in name and not name.startswith("@") for name in (record.local, record.peer)):
        raise damaged(where, "has a name with a zero byte")


def _check_address(text: str, where: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise damaged(where, f"{text[:60]!r} is not an address") from None


def read(value: Any) -> Needs:
    """Return the needs in decoded JSON, which may be hostile.

    Raise `Damaged` or `UnsupportedFormat`.
    """
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > NEEDS_VERSION:
        raise UnsupportedFormat(
            f"the source describes its tree in version {version}, this host understands "
            f"{NEEDS_VERSION}",
            hint="Install the same criuctl on both hosts.",
        )
    try:
        return Needs.from_dict(value, "needs")
    except Damaged as error:
        text = error.message.removeprefix("the manifest is not valid: ")
        raise Damaged(
            f"the source's description of its tree is not valid: {text}",
            hint="Check that the other host runs criuctl.",
        ) from error
