"""Files of /proc about a process or thread, in CRIU's images: which of them CRIU cannot open.

CRIU opens all files by the paths of the dump, when all processes exist and before any thread does.
Processes outside the tree may have ended by then, or have other PIDs. So a restore sorts the files
(`sort`):

- of a process of the tree: CRIU opens them;
- of a thread of the tree, or of something that a process has open (``fdinfo``, ``map_files``):
  *late*.  CRIU gets ``/`` to open; when everything is restored the process opens the file under the
  same number (`criuctl.restore.late_proc_files`);
- of a process outside that is still the same: CRIU opens them;
- of one that has ended, or is not visible at the restore's place, or of a thread that has ended:
  *ended*.  CRIU supports files of dead processes: it makes such a process while it opens files.
  Reading from the file then fails as it would have (ESRCH).  If another process has the PID by now,
  a free one is used;
- of something that outlives a process once it is open, its network (``net/``) and its mounts: those
  of the process that has it open.

CRIU opens with root's rights.  Many of these files have their permission checked only when they are
opened (``mem``, ``environ``, ``maps``), and what was the user's own process at the dump may have
executed a set-uid program since.  So where a process that holds a file could not open everything
itself, all but the harmless files (`_PUBLIC`) are *own*: CRIU makes them those of an ended process,
and the process opens them itself, at the last moment, when each has its own credentials
(`criuctl.restore.own_files`).  What the kernel refuses it then stays as of an ended process.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ..errors import Damaged
from ..proc.credentials import Credentials
from . import schema
from .heldfiles import Use, held_files
from .images import ImageSet, path_of, read, write

_IMAGE, _KIND = "remap-fpath.img", "REMAP_FPATH"
_ENDED = 2  # RemapType PROCFS
_PATH = re.compile(r"/proc/(\d+)(?:/task/(\d+))?(/.*)?")
_OF_OPEN = re.compile(r"/(fd|fdinfo|map_files|ns)/.*")
# Links into the resources of a process: the kernel shows the name of the file at their end, never a
# path through them.
_THROUGH_LINK = re.compile(r"/(root|cwd|exe|(fd|map_files|ns)/[^/]+)(/.*)?")
_OWN_LINKS = ("self", "thread-self")
# Files that the kernel shows to every user, or whose reads it judges by their reader.
_PUBLIC = re.compile(
    r"(/(mounts|mountinfo|stat|statm|status|cmdline|comm|cgroup|limits|oom_score|oom_adj"
    r"|oom_score_adj|sched|schedstat|cpuset|sessionid|wchan|children|timers|coredump_filter"
    r"|task|net))?"
)
_OUTLIVES = re.compile(r"/(net(/.*)?|mounts|mountinfo|mountstats)")
_CLOEXEC = 1  # FD_CLOEXEC, among the flags of a descriptor in the images
_HIGHEST = 32768  # PID that every kernel allows


class About(Struct, frozen=True):
    """The process or thread of a /proc path."""

    pid: int
    tid: int  # 0: the process itself
    rest: str  # the rest of the path, with a slash; "" for the folder itself


class LateFile(Struct, frozen=True):
    """A file that a process opens itself when everything is restored."""

    path: str
    flags: int
    position: int
    holders: tuple[tuple[int, int, bool], ...]  # PID, descriptor, close-on-exec


class OwnFile(Struct, frozen=True):
    """A file that its holders open themselves, with their own credentials."""

    path: str
    flags: int
    position: int
    uses: tuple[Use, ...]  # descriptors and working folders


class Sorted(Struct, frozen=True):
    """The result of `sort`."""

    late: tuple[LateFile, ...] = ()
    own: tuple[OwnFile, ...] = ()
    # path of a file of a process outside, PID, descriptor
    ended: tuple[tuple[str, int, int], ...] = ()
    numbers: frozenset[int] = frozenset()  # PIDs of processes that CRIU makes temporarily


def about(path: str) -> About | None:
    """Return the process or thread of a path; None unless it is a file of /proc about a process."""
    found = _PATH.fullmatch(path)
    return About(int(found[1]), int(found[2] or 0), found[3] or "") if found else None


def check_name(path: str) -> None:
    """Raise `Damaged` for a name below /proc that the kernel gives to no open file.

    By a link, it would lead to any file.
    """
    if not path.startswith("/proc/"):
        return
    what = about(path)
    parts = path.removesuffix("/").split("/")[2:]  # CRIU ends some folder names with a slash
    dots = any(part in ("", ".", "..") for part in parts)
    if dots or parts[0] in _OWN_LINKS or (what and _THROUGH_LINK.fullmatch(what.rest)):
        raise Damaged(
            f"the images name the file {path}, which is not the name of an open file",
            hint="Do not restore this checkpoint; check which users can write to the store.",
        )


def outlives(what: About) -> bool:
    """Return whether the open file stays readable after the process has ended.

    These are its network and mounts.
    """
    return _OUTLIVES.fullmatch(what.rest) is not None


def is_public(what: About, mode: int, flags: int) -> bool:
    """Return whether an open file of a process says nothing that another one is refused."""
    readable = bool(mode & stat.S_IROTH) and flags & os.O_ACCMODE == os.O_RDONLY
    harmless = readable or flags & os.O_PATH
    return bool(harmless and _PUBLIC.fullmatch(what.rest))


def sort(
    images: ImageSet,
    same: Callable[[int], bool],
    taken: Callable[[int], bool],
    users: Mapping[int, Credentials],
) -> Sorted:
    """Edit the images, and return what the restore has to do and report.

    `same`: whether the process outside the tree with this PID is that of the dump. `taken`: whether
    a PID is in use at the restore's place. `users`: the credentials of the tree's processes.
    `Damaged`: see `check_name`.
    """
    entries = images.files()
    for entry in entries:
        if entry.HasField("reg"):
            check_name(path_of(entry.reg))
    found = [(e, what) for e in entries if e.HasField("reg") and (what := about(path_of(e.reg)))]
    if not found:
        return Sorted()
    tree = {entry.pid: set(entry.threads) for entry in read(images.folder, "pstree.img", "PSTREE")}
    threads = {tid: pid for pid, tids in tree.items() for tid in tids}
    remaps = read(images.folder, _IMAGE, _KIND) if images.size(_IMAGE) else []
    dead = {e.orig_id: e for e in remaps if e.remap_type == _ENDED}
    # CRIU records one file of each process that it found ended
    gone = {e.remap_id for e in dead.values()}
    holders = _holders(images)
    uses = {one.id: one.uses for one in held_files(images)}
    reserved = images.reserved_ids()
    numbers: dict[int, int] = {}  # PID of an ended process -> PID of the one made in its place
    late, ended, own = [], [], []

    def free(number: int) -> int:
        """Return a PID for a process that CRIU makes temporarily."""
        if number not in numbers:
            numbers[number] = next(n for n in _candidates(number, reserved) if not taken(n))
            reserved.add(numbers[number])
        return numbers[number]

    for entry, what in found:
        reg, held, was = entry.reg, holders.get(entry.id, []), path_of(entry.reg)
        alive = entry.id not in dead and (
            what.tid in tree[what.pid] | {0} if what.pid in tree else what.pid in threads
        )
        outside = what.pid not in tree and what.pid not in gone
        exists = alive or (outside and same(what.pid))
        stays = bool(held) and outlives(what)
        if _is_private(what, reg, uses.get(entry.id, ()), users):
            path = was if exists else f"/proc/{held[0][0]}{what.rest}" if stays else ""
            if path:
                own.append(OwnFile(path, reg.flags, reg.pos, uses.get(entry.id, ())))
            alive = exists = stays = outside = False
            reg.pos = 0
        if alive:
            if what.tid in (0, what.pid) and what.pid in tree and not _OF_OPEN.fullmatch(what.rest):
                continue
            if held:
                late.append(LateFile(was, reg.flags, reg.pos, tuple(held)))
                _open(reg, "/")
                reg.flags, reg.pos = os.O_RDONLY, 0
            continue
        if exists:
            continue
        if stays:
            _open(reg, f"/proc/{held[0][0]}{what.rest}")
            remaps = [e for e in remaps if e.orig_id != entry.id]
            continue
        number = free(what.tid or what.pid)
        rest = "/stat" if _OF_OPEN.fullmatch(what.rest) else what.rest
        _open(reg, f"/proc/{number}{f'/task/{number}' if what.tid else ''}{rest}")
        if entry.id in dead:
            dead[entry.id].remap_id = number
            continue
        if outside:
            ended.append((was, *(held[0][:2] if held else (0, 0))))
        remaps.append(_remap(entry.id, number))
    images.write_files(entries)
    if remaps or images.size(_IMAGE):
        write(images.folder, _IMAGE, _KIND, remaps)
    return Sorted(tuple(late), tuple(own), tuple(ended), frozenset(numbers.values()))


def _is_private(
    what: About, reg: Any, uses: Iterable[Use], users: Mapping[int, Credentials]
) -> bool:
    """Return whether a process that has the file could be refused it; for a file in a message on a
    socket, any process of the tree.
    """
    by = {use.pid for use in uses} or set(users)
    return not is_public(what, reg.mode, reg.flags) and not all(
        users[pid].opens_all for pid in by if pid in users
    )


def _open(reg: Any, path: str) -> None:
    reg.name = path
    reg.ClearField("mode")
    reg.ClearField("size")


def _remap(number: int, pid: int) -> Any:
    entry = schema.message(_KIND)()
    entry.orig_id, entry.remap_id, entry.remap_type = number, pid, _ENDED
    return entry


def _candidates(number: int, reserved: set[int]) -> Iterator[int]:
    if number not in reserved:
        yield number
    yield from (n for n in range(_HIGHEST - 1, 300, -1) if n not in reserved)


def _holders(images: ImageSet) -> dict[int, list[tuple[int, int, bool]]]:
    """Return file id -> (PID, descriptor, close-on-exec) of all that refer to it."""
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for pid in images.pids():
        if not images.size(f"ids-{pid}.img"):
            continue  # it has ended
        name = f"fdinfo-{read(images.folder, f'ids-{pid}.img', 'IDS')[0].files_id}.img"
        if images.size(name):
            for held in read(images.folder, name, "FDINFO"):
                found.setdefault(held.id, []).append((pid, held.fd, bool(held.flags & _CLOEXEC)))
    return found
