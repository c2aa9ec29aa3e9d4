"""What CRIU's metadata images tell of descriptors and mappings, as plain records for people to look at and compare.

Images come from whoever has them, by name (`Images`): out of a store, nothing has to be written anywhere.  PIDs are the
tree's own, as in the images.  What an image does not tell (it is of another CRIU, or absent) is left out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import images

Images = Callable[[str], bytes | None]  # an image's content by its name, None if there is none

_INET = {socket.AF_INET: 4, socket.AF_INET6: 16}  # bytes of an address
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", 136: "udplite"}
_WAYS = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
# CRIU's criu/include/image.h, the first that fits
_AREAS = ((1 << 5, "[heap]"), (1 << 3, "[vdso]"), (1 << 12, "[vvar]"), (1 << 2, "[vsyscall]"))
_FILE_AREAS = 1 << 6 | 1 << 7
_MEMFD, _SYSVIPC, _AIORING, _ANON_SHARED = 1 << 14, 1 << 10, 1 << 13, 1 << 8


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One descriptor: what kind of file, which one, how opened, and where it stands."""

    kind: str  # reg, pipe, inetsk, unixsk, eventfd, tty, ...
    what: str  # a path, addresses, a name; "" where there is none that outlives a restore
    mode: str  # r, w, rw; with a: every write appends
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Area:
    """One mapping of an address space: ``start <= address < end``."""

    start: int
    end: int
    name: str  # a path, [heap], [stack], [anon], ...


def pids(get: Images) -> list[int]:
    """The PIDs of the tree's processes."""
    return [entry.pid for entry in _read(get, "pstree.img", "PSTREE")]


def descriptors(get: Images) -> dict[int, dict[int, OpenFile]]:
    """PID -> descriptor -> what it is."""
    files = {entry.id: entry for entry in _read(get, "files.img", "FILES")}
    found: dict[int, dict[int, OpenFile]] = {}
    for pid in pids(get):
        for ids in _read(get, f"ids-{pid}.img", "IDS"):  # none of a zombie
            entries = _read(get, f"fdinfo-{ids.files_id}.img", "FDINFO")
            found[pid] = {entry.fd: _open_file(entry, files.get(entry.id)) for entry in entries}
    return found


def areas(get: Images) -> dict[int, list[Area]]:
    """PID -> its mappings by address."""
    paths = {entry.id: _path(entry) for entry in _read(get, "files.img", "FILES") if entry.HasField("reg")}
    found: dict[int, list[Area]] = {}
    for pid in pids(get):
        for memory in _read(get, f"mm-{pid}.img", "MM"):
            stack = memory.mm_start_stack
            listed = [Area(vma.start, vma.end, _area_name(vma, paths, stack)) for vma in memory.vmas if vma.start < vma.end]
            found[pid] = sorted(listed, key=lambda area: area.start)
    return found


def _read(get: Images, name: str, kind: str) -> list[Any]:
    data = get(name)
    return [] if data is None else images.parse(data, name, kind)


def _open_file(holder: Any, entry: Any) -> OpenFile:
    kinds = holder.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number
    kind = kinds[holder.type].name.lower() if holder.type in kinds else str(holder.type)
    body = None if entry is None else next(_bodies(entry), None)
    flags = getattr(body, "flags", None)
    mode = "" if flags is None else _WAYS.get(flags & os.O_ACCMODE, "") + ("a" if flags & os.O_APPEND else "")
    what = "" if entry is None else _what(entry)
    return OpenFile(kind, what, mode, getattr(body, "pos", None))


def _bodies(entry: Any) -> Iterator[Any]:
    """The part of a file's entry that tells of its kind."""
    for descriptor, value in entry.ListFields():
        if descriptor.name not in ("type", "id"):
            yield value


def _what(entry: Any) -> str:
    if entry.HasField("reg"):
        return _path(entry)
    if entry.HasField("isk"):
        protocol = _PROTOCOLS.get(entry.isk.proto, str(entry.isk.proto))
        local = _endpoint(entry.isk.family, entry.isk.src_addr, entry.isk.src_port)
        peer = _endpoint(entry.isk.family, entry.isk.dst_addr, entry.isk.dst_port)
        return f"{protocol} {local} -> {peer}" if entry.isk.dst_port else f"{protocol} {local}"
    if entry.HasField("usk"):
        name = bytes(entry.usk.name).rstrip(b"\0")
        return ("@" + name[1:].decode(errors="replace")) if name.startswith(b"\0") else name.decode(errors="replace")
    if entry.HasField("efd"):
        return f"counter {entry.efd.counter}"
    return ""


def _path(entry: Any) -> str:
    return "/" + str(entry.reg.name).lstrip("/")


def _endpoint(family: int, words: Any, port: int) -> str:
    size = _INET.get(family)  # type: ignore[call-overload]  # a number of the images, which may be none of them
    raw = b"".join(word.to_bytes(4, "little") for word in words)
    if size is None or len(raw) < size:
        return f"?:{port}"
    address = socket.inet_ntop(family, raw[:size])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _area_name(vma: Any, paths: dict[int, str], stack: int) -> str:
    if vma.start <= stack < vma.end:
        return "[stack]"
    for bit, name in _AREAS:
        if vma.status & bit:
            return name
    if vma.status & _FILE_AREAS and vma.shmid in paths:
        return paths[vma.shmid]
    if vma.status & _MEMFD:
        return "[memfd]"
    if vma.status & (_SYSVIPC | _ANON_SHARED):
        return "[shared]"
    return "[aio]" if vma.status & _AIORING else "[anon]"
