"""Files that would be put back for a copy while somebody here writes to them: the original, which must not notice.

To put a file back sets the present one aside, and whoever has that open would go on in it under a name that nobody looks for.
So the present file stays, and the copy gets one of its own, as it was at the freeze, under a name beside it: ``beside``.
CRIU opens that one then.  What the copy has not open it will open by its path, some day: such a file is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from ..criu.images import ImageSet, path_of
from ..errors import NoSuchProcess, PreflightRefused
from ..proc.descriptors import descriptors
from ..proc.procfs import read_text
from ..proc.tree import mappings
from .judgement import Judgement

_HINT = "End that process first, or restore with --files keep. `criuctl verify --restore` tries a copy with files of its own."

_Inode = tuple[int, int]  # st_dev, st_ino


def spared(judged: Iterable[Judgement], images: ImageSet) -> tuple[Judgement, ...]:
    """The judgements of a copy's files, with those changed that somebody writes to."""
    judged = tuple(judged)
    disputed = {inode: j for j in judged if j.verdict == "put-back" and (inode := _present(j)) is not None}
    writers = _writers(disputed) if disputed else {}
    if not writers:
        return judged
    remapped = images.remapped()
    files = [e for e in images.files() if e.HasField("reg") and e.id not in remapped]
    opened = {path_of(e.reg) for e in files if isinstance(e.reg.name, str)}  # no other name can be put into an image
    settled = {j.record.path: _settled(j, writers[inode], opened) for inode, j in disputed.items() if inode in writers}
    return tuple(settled.get(j.record.path, j) for j in judged)


def _settled(judgement: Judgement, writer: int, opened: set[str]) -> Judgement:
    what = judgement.why.partition(";")[0]
    who = f"PID {writer} ({_name(writer)}) writes to it"
    if judgement.record.path in opened:
        return replace(judgement, verdict="beside", why=f"{what}, and {who}; the copy gets its own beside it, as it was")
    return replace(judgement, verdict="refuse", why=f"{what}, and {who}: it is not set aside for a copy", hint=_HINT)


def _present(judgement: Judgement) -> _Inode | None:
    """The regular file that is there now."""
    with suppress(OSError):
        now = os.lstat(judgement.record.path)
        if stat.S_ISREG(now.st_mode):
            return now.st_dev, now.st_ino
    return None


def _writers(sought: Mapping[_Inode, Judgement]) -> dict[_Inode, int]:
    """A process for each of these files that has it open, or mapped, for writing; none where there is none."""
    found: dict[_Inode, int] = {}
    paths = {(inode, judgement.record.path): (device, inode) for (device, inode), judgement in sought.items()}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(NoSuchProcess, PreflightRefused, OSError):
            held = [(d.device, d.inode) for d in descriptors(pid) if d.kind == "file" and d.writable]
            # On overlays and btrfs maps tells another device than stat does.
            held += [paths[m.inode, m.path] for m in mappings(pid) if m.shared and "w" in m.perms and (m.inode, m.path) in paths]
            found.update(dict.fromkeys(sought.keys() & set(held), pid))
    return found


def _name(pid: int) -> str:
    with suppress(NoSuchProcess, OSError):
        return read_text(pid, "comm").strip()
    return "gone by now"
