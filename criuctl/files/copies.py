"""Files that another process writes to while a copy is restored. That process is often the
original, which must not be affected.

Putting a file back sets the present one aside, and a process that has the present one open would
continue to write to it under another name. So the present file stays, and the copy gets a separate
file with the contents of the freeze, under a name next to it: verdict ``beside``. CRIU then opens
that one. A file that the copy does not have open is refused, because the copy may open it by its
path later. All names of one file are treated the same: the copy's names are names of one file, too.

A lock has one holder. If another process has a lock that the copy is to have, the copy locks a
separate file, with the contents of the freeze (`separated`). But a lock protects more than its own
file: it keeps two instances of a program from the same data. So every open file that both would
write to is then separated for the copy, except its output; if one cannot be, none is, and the lock
is refused.

Files in memory that a copy has mapped shared (`shared_mappings`) are always separated, even if they
are unchanged and no process uses them now: the original, restored later, must find them unchanged.

A file that no process has open now is put back, though the original may use it by its path: that is
reported. An unchanged file is used by both, as after a fork: it is reported that both write to it
from now on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord
from ..criu.images import ImageSet, path_of
from ..errors import NoSuchProcess, PreflightRefused
from ..proc.procfs import read_text
from ..proc.tree import mappings
from ..report import Finding
from .judgement import Judgement
from .shared_mappings import is_in_memory, shared_paths

_REFUSED_HINT = (
    "End that process first, or restore with --files keep. `criuctl verify --restore` tries a "
    "copy with files of its own."
)
_OWN_HINT = (
    "What the copy opens by its path from now on is not its own: have it use other places, or end "
    "the original. `criuctl verify --restore` tries a copy with files of its own."
)
_SHARED_HINT = (
    "What they write may overwrite each other's. `criuctl verify --restore` tries a copy with "
    "files of its own."
)

_OWN_MEMORY = (
    "is memory of the original's; the copy gets its own next to it, as it was, and does not find "
    "that by the old name"
)

_NAMED = 8  # files that both write to
_LEFT = ("same", "grown", "moved-on")  # verdicts of files that stay as they are
_Inode = tuple[int, int]  # st_dev, st_ino


def spared(
    judged: Iterable[Judgement], images: ImageSet, original: int | None
) -> tuple[tuple[Judgement, ...], list[Finding]]:
    """Return the judgements of a copy's files, changed for those that another process writes to,
    and findings about files that both will use.

    `original` is the PID of the living original, if it runs here.
    """
    # the original may use it
    judged = _own_memory(tuple(j for j in judged if j.verdict != "set-aside"), images)
    sought: dict[_Inode, list[Judgement]] = {}
    for judgement in judged:
        if _disputed(judgement) and (inode := present(judgement)) is not None:
            sought.setdefault(inode, []).append(judgement)
    writers = writers_to({inode: [j.record.path for j in names] for inode, names in sought.items()})
    findings: list[Finding] = []
    both: list[Judgement] = []
    if original is not None:
        left = (names[0] for inode, names in sought.items() if inode not in writers)
        findings = [_taken(j, original) for j in left if j.verdict == "put-back"]
    if not writers:
        return judged, findings
    remapped = images.remapped()
    opened = {
        path_of(e.reg): e.reg.name
        for e in images.files()
        if e.HasField("reg") and e.id not in remapped
    }
    settled: dict[str, Judgement] = {}
    for inode, writer in writers.items():
        names = [opened[j.record.path] for j in sought[inode] if j.record.path in opened]
        # no other name can be put into an image
        movable = bool(names) and all(isinstance(name, str) for name in names)
        settled |= {
            j.record.path: _settled(j, writer, movable=movable)
            for j in sought[inode]
            if j.verdict == "put-back"
        }
        both += [j for j in sought[inode] if j.verdict in _LEFT][:1]
    findings += [
        _shared(j, writers[inode]) for j in both[:_NAMED] if (inode := present(j)) in writers
    ]
    if len(both) > _NAMED:
        text = f"{len(both) - _NAMED} more files are written to by both, the copy and others"
        findings.append(Finding("warning", "file-shared", text, _SHARED_HINT))
    return tuple(settled.get(j.record.path, j) for j in judged), findings


def separated(
    judged: Iterable[Judgement], images: ImageSet, held: Mapping[str, str]
) -> tuple[Judgement, ...]:
    """Return the judgements of a copy that needs locks which others hold: with files of its own
    instead, or unchanged.

    `held`: the paths of the locked files, each with the holder of the lock.
    """
    judged = tuple(judged)
    sought: dict[_Inode, list[Judgement]] = {}
    for judgement in judged:
        if (inode := present(judgement)) is not None:
            sought.setdefault(inode, []).append(judgement)
    written = {
        inode: [j.record.path for j in names]
        for inode, names in sought.items()
        if any(j.record.kind == "written" and not is_output(j.record) for j in names)
    }
    locked = {
        i: held[j.record.path]
        for i, names in sought.items()
        for j in names
        if j.record.path in held
    }
    if not held.keys() <= {j.record.path for inode in locked for j in sought[inode]}:
        return judged  # one is a folder, or was not recorded
    used = {
        **{
            inode: f"PID {pid} ({_name(pid)}) writes to it"
            for inode, pid in writers_to(written).items()
        },
        **{inode: f"{holder} has locked it" for inode, holder in locked.items()},
    }
    remapped = images.remapped()
    regular = [e for e in images.files() if e.HasField("reg") and e.id not in remapped]
    movable = {path_of(e.reg) for e in regular if isinstance(e.reg.name, str)}  # as in `spared`
    own: dict[str, Judgement] = {}
    for inode, use in used.items():
        for judgement in sought[inode]:
            if judgement.record.path not in movable or not _is_known(judgement):
                return judged
            own[judgement.record.path] = _own(judgement, use)
    return tuple(own.get(j.record.path, j) for j in judged)


def is_output(record: FileRecord) -> bool:
    """Return whether it is what the tree prints to (a log, not its data): both append to it."""
    return record.append and all(fd in (1, 2) for _pid, fd in record.holders)


def _is_known(judgement: Judgement) -> bool:
    """Return whether the contents at the freeze are available: carried, the beginning of the
    present file, or none.
    """
    if judgement.verdict not in ("same", "grown", "put-back"):
        return False
    record = judgement.record
    return (
        record.data is not None or judgement.from_prefix or bool(record.digest) or not record.size
    )


def _own(judgement: Judgement, use: str) -> Judgement:
    record = judgement.record
    what = f"{judgement.why.partition(';')[0]}, and " if judgement.verdict == "put-back" else ""
    why = f"{what}{use}; the copy gets its own next to it, as it was"
    # Unless it came along: `judge` has checked that the present file begins with the contents at
    # the freeze.
    prefix = judgement.from_prefix or (record.data is None and judgement.verdict != "put-back")
    return replace(judgement, verdict="beside", why=why, hint=_OWN_HINT, from_prefix=prefix)


def left_behind(judged: Iterable[Judgement], images: ImageSet) -> list[Finding]:
    """Report, for a tree that is no copy, which processes have files open for writing that are set
    aside.

    They go on in them under the new name.  Also report which processes share memory with the tree,
    by intention, or because a copy was left the file when the original was not here.
    """
    judged, memory = tuple(judged), shared_paths(images)
    sought: dict[_Inode, list[Judgement]] = {}
    for judgement in judged:
        if judgement.verdict == "put-back" and (inode := present(judgement)) is not None:
            sought.setdefault(inode, []).append(judgement)
    writers = writers_to({inode: [j.record.path for j in names] for inode, names in sought.items()})
    findings = []
    for inode, writer in writers.items():
        record = sought[inode][0].record
        pid, fd = record.holders[0] if record.holders else (None, None)
        writing = f"PID {writer} ({_name(writer)})"
        text = (
            f"{record.path}: {writing} has the newer copy open, and goes on writing to it where it "
            "is kept aside"
        )
        findings.append(
            Finding(
                "warning",
                "file-left-behind",
                text,
                "With --files keep the newer one stays, for both.",
                pid,
                fd,
            )
        )
    kept: dict[_Inode, Judgement] = {}
    for judgement in judged:
        if judgement.verdict in ("same", "moved-on") and judgement.record.path in memory:
            if (inode := present(judgement)) is not None:
                kept.setdefault(inode, judgement)
    writers = writers_to({inode: [j.record.path] for inode, j in kept.items()})
    findings += [_shared(kept[inode], writer) for inode, writer in writers.items()]
    return findings


def _disputed(judgement: Judgement) -> bool:
    record = judgement.record
    left = judgement.verdict in _LEFT
    return judgement.verdict == "put-back" or (
        left and record.kind == "written" and not is_output(record)
    )


def _own_memory(judged: tuple[Judgement, ...], images: ImageSet) -> tuple[Judgement, ...]:
    """Return those with changed contents that are memory of the tree, under all names, and exist
    here.
    """
    shared = shared_paths(images)
    memory = {
        (j.record.device, j.record.inode)
        for j in judged
        if j.record.path in shared and j.record.data is not None and is_in_memory(j.record.path)
    }
    return tuple(
        replace(j, verdict="beside", from_prefix=False, why=_OWN_MEMORY)
        if (j.record.device, j.record.inode) in memory
        and j.verdict in ("same", "put-back")
        and present(j) is not None
        else j
        for j in judged
    )


def _shared(judgement: Judgement, writer: int) -> Finding:
    path, holders = judgement.record.path, judgement.record.holders
    pid, fd = holders[0] if holders else (None, None)
    return shared(path, writer, pid, fd)


def _taken(judgement: Judgement, original: int) -> Finding:
    path = judgement.record.path
    text = (
        f"{path}: is put back for the copy; the original, PID {original} ({_name(original)}), "
        "will find it so, too"
    )
    return Finding(
        "warning",
        "file-of-original",
        text,
        "The present contents are kept next to it. --files keep leaves it as it is.",
    )


def shared(name: str, writer: int, pid: int | None, fd: int | None) -> Finding:
    """Return the finding that a copy and another process write to the same file."""
    text = f"{name}: PID {writer} ({_name(writer)}) writes to it as well"
    return Finding("warning", "file-shared", text, _SHARED_HINT, pid, fd)


def _settled(judgement: Judgement, writer: int, *, movable: bool) -> Judgement:
    what = judgement.why.partition(";")[0]
    use = f"PID {writer} ({_name(writer)}) writes to it"
    if movable:
        return replace(
            judgement,
            verdict="beside",
            why=f"{what}, and {use}; the copy gets its own next to it, as it was",
        )
    return replace(
        judgement,
        verdict="refuse",
        why=f"{what}, and {use}: it is not set aside for a copy",
        hint=_REFUSED_HINT,
    )


def present(judgement: Judgement) -> _Inode | None:
    """Return the status of the regular file that is there now."""
    with suppress(OSError):
        now = os.lstat(judgement.record.path)
        if stat.S_ISREG(now.st_mode):
            return now.st_dev, now.st_ino
    return None


def writers_to(
    sought: Mapping[_Inode, Sequence[str]], but: Container[int] = ()
) -> dict[_Inode, int]:
    """Return, by path, a process that has the file open, or mapped, for writing, for each file that
    has one.

    Processes in `but` are left out.
    """
    found: dict[_Inode, int] = {}
    if not sought:
        return found
    paths = {
        (inode, path): (device, inode)
        for (device, inode), names in sought.items()
        for path in names
    }
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid in but:
            continue
        with suppress(NoSuchProcess, PreflightRefused, OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                inode = _opened(pid, fd)
                if inode in sought and inode not in found and _writes(pid, fd):
                    found[inode] = pid
            # On overlays and btrfs maps shows another device than stat does.
            shared = [(m.inode, m.path) for m in mappings(pid) if m.shared and "w" in m.perms]
            found |= dict.fromkeys((paths[place] for place in shared if place in paths), pid)
        if len(found) == len(sought):
            break
    return found


def _opened(pid: int, fd: str) -> _Inode:
    try:
        status = os.stat(f"/proc/{pid}/fd/{fd}")
    except OSError:  # closed meanwhile
        return -1, -1
    return status.st_dev, status.st_ino


def _writes(pid: int, fd: str) -> bool:
    flags = next(
        (
            line.split()[1]
            for line in read_text(pid, f"fdinfo/{fd}").splitlines()
            if line.startswith("flags:")
        ),
        "0",
    )
    return bool(int(flags, 8) & (os.O_WRONLY | os.O_RDWR)) and not int(flags, 8) & os.O_PATH


def _name(pid: int) -> str:
    with suppress(NoSuchProcess, OSError):
        return read_text(pid, "comm").strip()
    return "gone by now"
