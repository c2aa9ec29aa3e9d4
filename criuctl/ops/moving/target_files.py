"""Checks of the paths that an arriving tree uses, as a restore and CRIU will see them on this host.

Mapped and read files are judged by the restore's own `criuctl.files.judgement`. For files that
travel, sizes and times are compared now and contents when they arrive. Modes and build-ids, which
only CRIU compares, are checked here too. The paths come from another host and are not trusted: they
are examined with `stat`, and only regular files are opened, for their ELF notes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from ...checkpoint.file_records import FileRecord
from ...files.carried_binaries import ROOTS, objection, obstacle
from ...files.judgement import Policy, judge
from ...proc.elfnotes import build_id
from ...quoting import quoted
from ...report import Finding, Level
from .needs_format import NeededFile

_ANOTHER = "is a different one here"
_ALIKE = 100  # findings of one kind that are listed
_MORE = "The remedy of the others applies to these too."
_PACKAGE = (
    "Install the version that the program was started from, or migrate with --carry-binaries."
)
_SET_ASIDE = "Move it away, or migrate with --files restore (keeps the copy that is here aside)."
_WHAT = {
    "cwd": "the working folder",
    "root": "the root folder",
    "folder": "a folder in which a unix socket has its name",
}


def judge_files(
    files: Iterable[NeededFile],
    policy: Policy,
    uids: Collection[int] = ROOTS,
) -> Iterator[Finding]:
    """Yield what is wrong with these paths here; at most `_ALIKE` findings of one kind.

    `uids`: the users of the tree.
    """
    number: dict[tuple[Level, str], int] = {}
    for needed in files:
        for finding in _judged(needed, policy, uids):
            kind = finding.level, finding.code
            number[kind] = number.get(kind, 0) + 1
            if number[kind] <= _ALIKE:
                yield finding
    for (level, code), count in number.items():
        if count > _ALIKE:
            yield Finding(
                level,
                code,
                f"and {count - _ALIKE} more files with the same finding",
                _MORE,
            )


def _judged(needed: NeededFile, policy: Policy, uids: Collection[int]) -> list[Finding]:
    try:
        return list(_judge(needed, policy, uids))
    except OSError as error:
        return [_finding("warning", needed, "file-unseen", f"cannot be examined: {error.strerror}")]


def _finding(level: Level, needed: NeededFile, code: str, text: str, hint: str = "") -> Finding:
    """Return a finding about this path, with a process that uses it."""
    pid, fd = needed.holders[0] if needed.holders else (None, None)
    return Finding(level, code, f"{needed.path}: {text}", hint, pid, None if fd == -1 else fd)


def _judge(needed: NeededFile, policy: Policy, uids: Collection[int]) -> Iterator[Finding]:
    try:
        now = os.lstat(needed.path) if needed.travels else os.stat(needed.path)
    except (FileNotFoundError, NotADirectoryError):
        if not needed.travels:
            yield _missing(needed)
        elif needed.use == "mapped":
            yield from _covering(needed, "is missing here", uids)
        return
    if needed.use in ("cwd", "root", "folder") or (
        stat.S_ISDIR(needed.mode) and not needed.travels
    ):
        yield from _folder(needed, now)
    elif needed.travels:
        yield from _conflict(needed, now, policy, uids)
    elif needed.use == "written" or not stat.S_ISREG(needed.mode):
        yield from _left_behind(needed, now)
    else:
        judgement = judge(
            FileRecord(path=needed.path, kind=needed.use, size=needed.size, mode=needed.mode),
            policy,
        )
        finding = judgement.finding()
        if finding is not None:
            hint = _PACKAGE if needed.use == "mapped" else judgement.hint
            yield _finding(finding.level, needed, finding.code, judgement.why, hint)
        if judgement.verdict in ("same", "moved-on") and needed.build_id:
            yield from _build(needed)


def _missing(needed: NeededFile) -> Finding:
    if needed.use in _WHAT:
        return _finding(
            "error",
            needed,
            "folder-missing",
            f"{_WHAT[needed.use]} does not exist here",
            _folder_hint(needed),
        )
    what = {"mapped": "is mapped into memory", "read": "is open", "written": "is open for writing"}[
        needed.use
    ]
    hint = (
        _PACKAGE
        if needed.use == "mapped"
        else f"Put it there, or migrate with --with-files {quoted(needed.path)}."
    )
    return _finding("error", needed, "file-missing", f"{what} and does not exist here", hint)


def _covering(needed: NeededFile, what: str, uids: Collection[int]) -> Iterator[Finding]:
    """Yield why a carried program or library cannot cover the present file."""
    record = FileRecord(path=needed.path, kind="mapped", mode=needed.mode, uid=needed.uid)
    missing = what != _ANOTHER
    if (
        problem := objection(record, uids) or (obstacle(needed.path) if missing else None)
    ) is not None:
        yield _finding("error", needed, "file-refuse", f"{what}, and {problem[0]}", problem[1])


def _folder_hint(needed: NeededFile) -> str:
    path = quoted(needed.path)
    make = f"`install -d -m {needed.mode & 0o7777:o} {path}`"
    if needed.use == "cwd":
        return f"Take it along with --with-files {path}, or make it: {make}."
    return f"Make it on the target: {make}."


def _folder(needed: NeededFile, now: os.stat_result) -> Iterator[Finding]:
    if not stat.S_ISDIR(now.st_mode):
        yield _finding(
            "error",
            needed,
            "folder-missing",
            "is no folder here",
            "Move away what is there; then: " + _folder_hint(needed),
        )


def _build(needed: NeededFile) -> Iterator[Finding]:
    fd = _open_plain(needed.path)
    if fd is None:
        return
    try:
        here = build_id(fd)
    finally:
        os.close(fd)
    if here != needed.build_id and here:
        text = (
            f"is another build: its build-id is {here[:12]}... here and {needed.build_id[:12]}... "
            "on the source"
        )
        yield _finding("error", needed, "build-id", text, _PACKAGE)


def _open_plain(path: str) -> int | None:
    """Return a descriptor of a regular file; None for any other kind, whose opening could block or
    have side effects.
    """
    with suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(place).st_mode):
                return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(place)
    return None


def _conflict(
    needed: NeededFile, now: os.stat_result, policy: Policy, uids: Collection[int]
) -> Iterator[Finding]:
    """Yield findings about a file that travels and already exists here.

    Sizes and times are compared now, contents when it arrives.
    """
    if needed.use == "mapped":  # --carry-binaries: what is here stays, the tree does not see it
        if not stat.S_ISREG(now.st_mode):
            yield from _covering(needed, "is another kind of file here", uids)
        elif (now.st_size, now.st_mode) != (needed.size, needed.mode):
            yield from _covering(needed, _ANOTHER, uids)
        return
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(needed.mode):
        why = "is another kind of file here"
    elif stat.S_ISDIR(needed.mode) or not stat.S_ISREG(needed.mode):
        return
    elif now.st_size != needed.size:
        why = f"exists here with {now.st_size} bytes; the source's, {needed.size} bytes, comes"
    elif now.st_mtime_ns != needed.mtime_ns:
        yield _finding(
            "info",
            needed,
            "file-exists",
            "is here with the same size; contents are compared when it comes",
        )
        return
    else:
        return
    if policy == "refuse":
        yield _finding("error", needed, "file-refuse", why, _SET_ASIDE)
    elif policy == "keep":
        yield _finding("info", needed, "file-moved-on", f"{why}; left as it is, as asked")
    else:
        yield _finding("warning", needed, "file-put-back", f"{why}; what is here is kept aside")


def _left_behind(needed: NeededFile, now: os.stat_result) -> Iterator[Finding]:
    """Yield findings about a written file that does not travel, or a device or FIFO: it must exist
    here as on the source.
    """
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(needed.mode):
        yield _finding(
            "error", needed, "file-refuse", "is another kind of file here", "Move it away."
        )
        return
    if stat.S_ISCHR(needed.mode) or stat.S_ISBLK(needed.mode):
        if now.st_rdev != needed.rdev:
            text = (
                f"is device {os.major(now.st_rdev)}:{os.minor(now.st_rdev)} here, another one on "
                "the source"
            )
            yield _finding(
                "error", needed, "device", text, "Make the device node as it is on the source."
            )
    elif stat.S_ISREG(needed.mode) and now.st_size != needed.size:
        text = (
            f"is open for writing, does not travel, and has {now.st_size} bytes here and "
            f"{needed.size} on the source"
        )
        level: Level = "warning" if needed.append and now.st_size > needed.size else "error"
        yield _finding(
            level, needed, "file-refuse", text, f"Migrate with --with-files {quoted(needed.path)}."
        )
