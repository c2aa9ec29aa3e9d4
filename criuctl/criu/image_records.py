"""Descriptors and mappings from CRIU's metadata images, as plain records to show and compare.

The images are passed by name (`Images`): from a store, nothing has to be written to a file. PIDs
are the tree's own, as in the images. What an image does not contain (it is of another CRIU, or
absent) is left out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from ..errors import Damaged
from . import images

Images = Callable[[str], bytes | None]  # an image's content by its name, None if there is none

_INET: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 16}  # bytes of an address
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", 136: "udplite"}
_MODES = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
# CRIU's criu/include/image.h; the first that matches
_AREAS = ((1 << 5, "[heap]"), (1 << 3, "[vdso]"), (1 << 12, "[vvar]"), (1 << 2, "[vsyscall]"))
_FILE_AREAS = 1 << 6 | 1 << 7
_STATES = {2: "Z", 3: "T", 6: "Z"}  # CRIU's criu/include/task-state: dead, stopped, zombie
_TCP_STATES = {
    1: "established",
    2: "syn-sent",
    3: "syn-recv",
    4: "fin-wait-1",
    5: "fin-wait-2",
    7: "close",
    8: "close-wait",
    10: "listen",
}
_FREE_DESCRIPTORS = 1 << 19  # of all processes together; shared ones count for each process
_DESCRIPTOR = 8  # bytes of an image for each further descriptor
_PRESENT = 4  # a run of pages that this image has
_MEMFD, _SYSVIPC, _AIORING, _ANON_SHARED = 1 << 14, 1 << 10, 1 << 13, 1 << 8


class OpenFile(Struct, frozen=True):
    """One descriptor: the kind of file, which one, how it is open, and its position."""

    kind: str  # reg, pipe, inetsk, unixsk, eventfd, tty, ...
    what: str  # a path, addresses, a name; "" if there is none that stays valid after a restore
    mode: str  # r, w, rw; with a: every write appends
    offset: int | None = None


class Area(Struct, frozen=True):
    """One mapping of an address space: ``start <= address < end``."""

    start: int
    end: int
    name: str  # a path, [heap], [stack], [anon], ...


class Task(Struct, frozen=True):
    """One process."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: int
    command: str
    state: str  # as in /proc/PID/stat: S, T, Z
    uid: int
    gid: int
    exe: str
    cwd: str


class Socket(Struct, frozen=True):
    """An internet socket and the descriptors that hold it."""

    holders: tuple[tuple[int, int], ...]  # (PID, descriptor)
    family: str  # inet, inet6
    type: str  # stream, dgram
    protocol: str
    state: str
    local: str
    peer: str


def pids(get: Images) -> list[int]:
    """Return the PIDs of the tree's processes; `Damaged` if two have the same."""
    return [entry.pid for entry in _processes(get)]


def _processes(get: Images) -> list[Any]:
    entries = _read(get, "pstree.img", "PSTREE")
    if len({entry.pid for entry in entries}) != len(entries):
        raise Damaged("image pstree.img has two processes with one PID")
    return entries


def _held(get: Images) -> Iterator[tuple[int, list[Any]]]:
    """Yield PID -> its descriptors' entries; `Damaged`.

    Processes may share them, so there can be many more than the images contain.
    """
    sizes: dict[int, int] = {}
    count = 0
    for pid in pids(get):
        for ids in _read(get, f"ids-{pid}.img", "IDS"):  # a zombie has none
            name = f"fdinfo-{ids.files_id}.img"
            entries = _read(get, name, "FDINFO")
            sizes[ids.files_id] = len(get(name) or b"")
            count += len(entries)
            if count > _FREE_DESCRIPTORS + sum(sizes.values()) // _DESCRIPTOR:
                raise Damaged(
                    f"the processes share more than {_FREE_DESCRIPTORS} descriptors, more "
                    "than CRIU's images can"
                )
            yield pid, entries


def descriptors(get: Images) -> dict[int, dict[int, OpenFile]]:
    """Return PID -> descriptor -> its file."""
    files = {entry.id: entry for entry in _read(get, "files.img", "FILES")}
    found: dict[int, dict[int, OpenFile]] = {}
    known: dict[tuple[int, int], OpenFile] = {}  # many descriptors may refer to one file
    for pid, entries in _held(get):
        held = found[pid] = {}
        for entry in entries:
            key = entry.type, entry.id
            if key not in known:
                known[key] = _open_file(entry, files.get(entry.id))
            held[entry.fd] = known[key]
    return found


def areas(get: Images) -> dict[int, list[Area]]:
    """Return PID -> its mappings by address."""
    paths = {
        entry.id: _path(entry)
        for entry in _read(get, "files.img", "FILES")
        if entry.HasField("reg")
    }
    found: dict[int, list[Area]] = {}
    for pid in pids(get):
        for memory in _read(get, f"mm-{pid}.img", "MM"):
            stack = memory.mm_start_stack
            listed = [
                Area(vma.start, vma.end, _area_name(vma, paths, stack))
                for vma in memory.vmas
                if vma.start < vma.end
            ]
            found[pid] = sorted(listed, key=lambda area: area.start)
    return found


def environments(get: Images) -> dict[int, tuple[int, int]]:
    """Return PID -> the addresses of its initial environment: ``start <= address < end``."""
    return {
        pid: (m.mm_env_start, m.mm_env_end)
        for pid in pids(get)
        for m in _read(get, f"mm-{pid}.img", "MM")
    }


def tasks(get: Images) -> list[Task]:
    """Return the processes, the root first."""
    files = {
        entry.id: _path(entry)
        for entry in _read(get, "files.img", "FILES")
        if entry.HasField("reg")
    }
    return [_task(get, entry, files) for entry in _processes(get)]


def _task(get: Images, entry: Any, files: dict[int, str]) -> Task:
    core = next(iter(_read(get, f"core-{entry.pid}.img", "CORE")), None)
    memory = next(iter(_read(get, f"mm-{entry.pid}.img", "MM")), None)
    places = next(iter(_read(get, f"fs-{entry.pid}.img", "FS")), None)
    has_creds = (
        core is not None and core.HasField("thread_core") and core.thread_core.HasField("creds")
    )
    return Task(
        pid=entry.pid,
        ppid=entry.ppid,
        pgid=entry.pgid,
        sid=entry.sid,
        threads=max(len(entry.threads), 1),
        command=images.text(core.tc.comm) if core is not None else "",
        state=_STATES.get(core.tc.task_state, "S") if core is not None else "",
        uid=core.thread_core.creds.uid if core is not None and has_creds else 0,
        gid=core.thread_core.creds.gid if core is not None and has_creds else 0,
        exe=files.get(memory.exe_file_id, "") if memory is not None else "",
        cwd=files.get(places.cwd_id, "") if places is not None else "",
    )


def sockets(get: Images) -> list[Socket]:
    """Return the internet sockets."""
    entries = [entry for entry in _read(get, "files.img", "FILES") if entry.HasField("isk")]
    held: dict[int, list[tuple[int, int]]] = {entry.id: [] for entry in entries}
    for pid, descriptors in _held(get) if entries else ():
        for entry in descriptors:
            if entry.id in held:
                held[entry.id].append((pid, entry.fd))
    found = []
    for entry in entries:
        s = entry.isk
        found.append(
            Socket(
                holders=tuple(held.get(entry.id, ())),
                family={socket.AF_INET: "inet", socket.AF_INET6: "inet6"}.get(
                    s.family, str(s.family)
                ),
                type={1: "stream", 2: "dgram"}.get(s.type, str(s.type)),
                protocol=_PROTOCOLS.get(s.proto, str(s.proto)),
                state=_TCP_STATES.get(s.state, str(s.state))
                if s.type == 1
                else "established"
                if s.dst_port
                else "bound",
                local=_endpoint(s.family, s.src_addr, s.src_port),
                peer=_endpoint(s.family, s.dst_addr, s.dst_port) if s.dst_port else "",
            )
        )
    return found


def page_runs(get: Images, name: str) -> list[tuple[int, int, int]]:
    """Return (address, pages, flags) of each run in the pagemap image `name`.

    Pages in older images are not counted.
    """
    data = get(name)
    runs = [] if data is None else images.parse(data, name, "PAGEMAP", first="PAGEMAP_HEAD")[1:]
    found = [
        (
            run.vaddr,
            run.nr_pages or run.compat_nr_pages,
            run.flags if run.HasField("flags") else _PRESENT,
        )
        for run in runs
    ]
    return [run for run in found if run[2] & _PRESENT]


def _read(get: Images, name: str, kind: str) -> list[Any]:
    data = get(name)
    return [] if data is None else images.parse(data, name, kind)


def _open_file(holder: Any, entry: Any) -> OpenFile:
    kinds = holder.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number
    kind = kinds[holder.type].name.lower() if holder.type in kinds else str(holder.type)
    body = None if entry is None else next(_bodies(entry), None)
    flags = getattr(body, "flags", None)
    mode = (
        ""
        if flags is None
        else _MODES.get(flags & os.O_ACCMODE, "") + ("a" if flags & os.O_APPEND else "")
    )
    what = "" if entry is None else _what(entry)
    return OpenFile(kind, what, mode, getattr(body, "pos", None))


def _bodies(entry: Any) -> Iterator[Any]:
    """Yield the parts of a file's entry that are specific to its kind."""
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
        return (
            ("@" + name[1:].decode(errors="replace"))
            if name.startswith(b"\0")
            else name.decode(errors="replace")
        )
    if entry.HasField("efd"):
        return f"counter {entry.efd.counter}"
    return ""


def _path(entry: Any) -> str:
    return images.path_of(entry.reg)


def _endpoint(family: int, words: Any, port: int) -> str:
    size = _INET.get(family)  # a number from the image, which may be any
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
