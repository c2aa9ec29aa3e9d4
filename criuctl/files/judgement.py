"""Files at a restore, judged before anything is touched.

`judge` compares each recorded file with what is at its path now and decides, as a pure function of
both:

- ``same``: nothing to do;
- ``grown``: only ever appended to, and what was there at the freeze still is: left as it is, the
  program goes on appending;
- ``moved-on``: opened for reading only and different now, or only its mode is another one: left as
  it is, with a warning if the tree may see other contents than it has read;
- ``deleted-copy``: a script or mapped data that the tree only reads, and that is another one here
  or missing: the tree gets the contents of the dump in a deleted file, as if it had been replaced
  while the tree ran (`deleted_copies`);
- ``put-back``: what was recorded is made again (from the carried contents, or from the unchanged
  beginning of the present file); a newer file is set aside next to it, never overwritten;
- ``overlaid``: a mapped file that came along (``--carry-binaries``) and is missing or another one
  here: the tree gets its own, in a mount namespace of its own (`criuctl.files.carried_binaries`),
  and what is here stays as it is;
- ``beside``: a copy's file that another process writes to now (`criuctl.files.copies`): made again
  under another name;
- ``set-aside``: it did not exist at the dump, in the folder of a database that is put back
  (`database_sets`);
- ``refuse``: it differs and there is nothing to put back, or the policy forbids touching it.

`criuctl.files.put_back` does it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Container, Iterable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord
from ..errors import Damaged
from ..proc import folder_walk
from ..quoting import quoted
from ..report import Finding
from . import carried_binaries, database_sets, mount_points
from .contents import digest

Verdict = Literal[
    "same",
    "grown",
    "moved-on",
    "deleted-copy",
    "put-back",
    "set-aside",
    "overlaid",
    "beside",
    "refuse",
]
Policy = Literal["refuse", "restore", "keep"]
_OTHER_VERSION = (
    "Install the version that the program was started from; next time dump with --carry-binaries."
)


class Judgement(Struct, frozen=True):
    """One recorded file and the decision about it."""

    record: FileRecord
    verdict: Verdict
    why: str = ""
    hint: str = ""
    from_prefix: bool = False  # the recorded contents are the beginning of the present file
    exists: bool = True
    changed: bool = False  # its contents are not those of the dump
    warns: bool = False  # of a file that is left as it is
    whole: str = ""  # the database that is refused as a whole

    def finding(self) -> Finding | None:
        """Return the finding for the user, if any."""
        pid, fd = self.record.holders[0] if self.record.holders else (None, None)
        if self.whole:
            return Finding(
                "error", "database-changed", f"{self.whole}: {self.why}", self.hint, pid, fd
            )
        if self.verdict in ("same", "grown", "moved-on", "overlaid") and not self.warns:
            return (
                Finding("info", f"file-{self.verdict}", f"{self.record.path}: {self.why}")
                if self.why
                else None
            )
        level: Literal["error", "warning"] = "error" if self.verdict == "refuse" else "warning"
        return Finding(
            level, f"file-{self.verdict}", f"{self.record.path}: {self.why}", self.hint, pid, fd
        )


def check_path(path: str) -> str:
    """Check a path from a manifest: absolute, plain, and without a way up."""
    if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path:
        raise Damaged(
            f"{path!r} is not a plain absolute path",
            hint="The checkpoint is damaged or not from criuctl.",
        )
    return path


def judge(record: FileRecord, policy: Policy) -> Judgement:
    """Compare one record with the present file."""
    check_path(record.path)
    try:
        return _compared(record, policy)
    except OSError as error:
        return Judgement(
            record,
            "refuse",
            f"cannot be looked at: {error.strerror}",
            "Check what is there, and each directory of that path.",
        )


def _compared(record: FileRecord, policy: Policy) -> Judgement:
    path = record.path
    if record.kind == "mapped" and record.data is not None:
        return _came_along(record)
    try:
        now = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _missing(record)
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(record.mode):
        if record.kind == "read" and record.data is not None:
            return _replaced(record, policy, "is another kind of file now")
        if record.data is None and record.kind != "carried":
            return Judgement(
                record, "refuse", "is another kind of file now", "Move it away.", changed=True
            )
        return _changed(record, policy, "is another kind of file now")
    if not stat.S_ISREG(record.mode):
        if stat.S_ISLNK(record.mode) and os.readlink(path) != record.target:
            return _changed(record, policy, "points elsewhere now")
        return Judgement(record, "same")
    if record.kind in ("read", "mapped"):
        return _only_read(record, policy, now)
    return _contents(record, policy, path, now)


def unchanged(record: FileRecord, policy: Policy, mode: int) -> Judgement:
    """Return the judgement of a file with unchanged contents.

    Another mode does not affect processes that have it open; CRIU's check of the mode is removed.
    """
    if mode == record.mode:
        return Judgement(record, "same")
    why = (
        f"had mode {stat.S_IMODE(record.mode):04o} at the dump and has {stat.S_IMODE(mode):04o} now"
    )
    if policy == "refuse":
        return Judgement(
            record,
            "refuse",
            why,
            f"`chmod {stat.S_IMODE(record.mode):o}` it, or restore with --files restore.",
        )
    return Judgement(record, "moved-on", f"{why}; left as it is")


def _came_along(record: FileRecord) -> Judgement:
    """Judge a program or library that came along with its contents."""
    try:
        now: os.stat_result | None = os.lstat(record.path)
    except (FileNotFoundError, NotADirectoryError):
        now = None
    if now is not None and stat.S_ISREG(now.st_mode):
        if (now.st_size, now.st_mode) == (record.size, record.mode) and _has_contents(record):
            return Judgement(record, "same")
        return Judgement(
            record,
            "overlaid",
            "is another one here; the tree gets its own, in a mount namespace of its own",
        )
    what = "is missing here" if now is None else "is another kind of file here"
    if (problem := carried_binaries.obstacle(record.path)) is not None:
        return Judgement(
            record, "refuse", f"{what}, and {problem[0]}", problem[1], exists=now is not None
        )
    why = f"{what}; the tree gets its own, in a mount namespace of its own"
    return Judgement(record, "overlaid", why, exists=now is not None)


def _has_contents(record: FileRecord) -> bool:
    fd = folder_walk.regular(record.path)
    try:
        return digest(fd, record.size) == record.digest
    finally:
        os.close(fd)


def _only_read(record: FileRecord, policy: Policy, now: os.stat_result) -> Judgement:
    """Judge a file that the tree reads or has mapped, and does not write to."""
    size = now.st_size
    begins = _begins_so(record, size)
    if begins is None:  # not compared
        if size == record.size:
            # else CRIU compares build-ids
            known = bool(record.mtime_ns) and not (record.kind == "mapped" and not record.role)
            if not known or now.st_mtime_ns == record.mtime_ns:
                return unchanged(record, policy, now.st_mode)
            return _replaced(
                record,
                policy,
                (
                    "was modified since the dump (its time is another one; it was too large to "
                    "compare)"
                ),
            )
        begins = size > record.size and record.kind == "read"
    if size == record.size and begins:
        return unchanged(record, policy, now.st_mode)
    if begins:
        why = f"was {record.size} bytes at the dump and is {size} now; it is only read"
        return Judgement(record, "moved-on", why, changed=True)
    if record.kind == "mapped" and size != record.size:
        why = f"is mapped into memory and was {record.size} bytes at the dump; it is {size} now"
        return Judgement(record, "refuse", why, _OTHER_VERSION, changed=True)
    return _replaced(
        record,
        policy,
        f"has other contents than at the dump ({record.size} bytes then, {size} now)",
    )


def _begins_so(record: FileRecord, size: int) -> bool | None:
    """Return whether the present file, of `size` bytes, begins with the contents of the dump; None
    if that is not known.
    """
    if not record.digest:
        return None
    if size < record.size:
        return False
    # another user redirects the path, or it cannot be read: not what it was
    with suppress(OSError):
        return _has_contents(record)
    return False


def _replaced(record: FileRecord, policy: Policy, why: str) -> Judgement:
    """Judge a file that is only read, and in which the tree would find other data than it has begun
    to read.
    """
    script = record.role == "script"
    if policy == "keep":
        offset = "; the interpreter goes on in it at its old offset" if script else ""
        return Judgement(
            record, "moved-on", f"{why}; left as it is, as asked{offset}", changed=True, warns=True
        )
    if policy == "refuse":
        hint = (
            "Put back the file as it was, or restore with --files restore, which changes no file "
            "that is only read."
        )
        return Judgement(record, "refuse", why, hint, changed=True)
    if record.data is not None:
        why = (
            f"{why}; the tree goes on with the contents of the dump, in a deleted file, and the "
            "file here stays"
        )
        return Judgement(record, "deleted-copy", why, changed=True)
    if script and record.digest:
        why = f"is a script that is being run, {why}, and its contents were not taken along"
        hint = (
            "Put back the script as it was, or restore with --files keep; next time dump with "
            "--with-files."
        )
        return Judgement(record, "refuse", why, hint, changed=True)
    return Judgement(
        record,
        "moved-on",
        f"{why}; the tree only reads it, and finds what is here",
        changed=True,
        warns=True,
    )


def _contents(record: FileRecord, policy: Policy, path: str, now: os.stat_result) -> Judgement:
    size = now.st_size
    fd = folder_walk.regular(path)
    try:
        beginning = size >= record.size and digest(fd, record.size) == record.digest
    finally:
        os.close(fd)
    if beginning and size == record.size:
        return unchanged(record, policy, now.st_mode)
    if beginning and record.append and record.kind == "written":
        why = f"has grown from {record.size} to {size} bytes and is only appended to"
        return Judgement(record, "grown", why, changed=True)
    if beginning:
        return _changed(
            record, policy, f"has grown from {record.size} to {size} bytes", from_prefix=True
        )
    if size < record.size:
        return _changed(record, policy, f"has shrunk from {record.size} to {size} bytes")
    return _changed(
        record,
        policy,
        f"has other contents than at the dump ({record.size} bytes then, {size} now)",
    )


def _changed(record: FileRecord, policy: Policy, why: str, from_prefix: bool = False) -> Judgement:
    if policy == "keep":
        return Judgement(record, "moved-on", f"{why}; left as it is, as asked", changed=True)
    if policy == "refuse":
        hint = "Move it away, or restore with --files restore (keeps the newer copy aside)."
        return Judgement(record, "refuse", why, hint, changed=True)
    if record.kind == "carried" or record.data is not None or from_prefix:
        why = f"{why}; put back as it was, the newer copy kept aside"
        return Judgement(record, "put-back", why, from_prefix=from_prefix, changed=True)
    return Judgement(
        record,
        "refuse",
        f"{why}, and its contents were not taken along",
        "Put back the file as it was, or restore with --files keep; next time dump with "
        "--with-files.",
        changed=True,
    )


def _missing(record: FileRecord) -> Judgement:
    if record.kind == "read" and record.data is not None:
        why = "is missing; the tree goes on with the contents of the dump, in a deleted file"
        return Judgement(record, "deleted-copy", why, exists=False, changed=True)
    if record.kind == "carried" or record.data is not None:
        return Judgement(
            record,
            "put-back",
            "is missing; put back from the checkpoint",
            exists=False,
            changed=True,
        )
    # a lock file, for example
    if record.kind == "written" and not record.size and os.path.isdir(os.path.dirname(record.path)):
        return Judgement(
            record, "put-back", "is missing; put back, empty as it was", exists=False, changed=True
        )
    what = {"mapped": "is mapped into memory", "read": "is open", "written": "is open for writing"}[
        record.kind
    ]
    return Judgement(
        record,
        "refuse",
        f"{what} and does not exist here",
        _OTHER_VERSION
        if record.kind == "mapped"
        else "Bring the file here; next time dump with --with-files.",
        exists=False,
        changed=True,
    )


def judge_all(
    records: Iterable[FileRecord],
    policy: Policy,
    uids: Collection[int] = carried_binaries.ROOTS,
    *,
    at_home: bool = False,
) -> list[Judgement]:
    """Judge every record, parents before what is in them; `uids` are the users of the tree.

    `at_home`: this is the host of the dump, and the tree sees its mounts.
    """
    judged = database_sets.as_sets(
        (judge(record, policy) for record in sorted(records, key=lambda r: r.path)), policy
    )
    if at_home:
        judged = mount_points.judged(judged)
    judged = [_if_allowed(judgement, uids) for judgement in judged]
    restored = {j.record.path for j in judged if j.verdict == "put-back"}
    judged = [_if_reached(j, restored) if j.verdict == "put-back" else j for j in judged]
    if not any(j.verdict == "overlaid" for j in judged):
        return judged
    written = carried_binaries.written_folders(j.record for j in judged)
    return [_refuse_written_folders(j, written) for j in judged]


def _if_allowed(judgement: Judgement, uids: Collection[int]) -> Judgement:
    """Refuse a file that came along if showing it would cover another place than intended, or one
    that is not the tree's.
    """
    if judgement.verdict != "overlaid":
        return judgement
    try:
        problem = carried_binaries.objection(judgement.record, uids)
    except OSError as error:
        problem = (
            f"it cannot be looked at: {error.strerror}",
            "Check what is there, and each directory of that path.",
        )
    if problem is None:
        return judgement
    return replace(
        judgement,
        verdict="refuse",
        why=f"came along and is not shown to the tree: {problem[0]}",
        hint=problem[1],
    )


def _if_reached(judgement: Judgement, restored: Container[str]) -> Judgement:
    """Refuse a file to whose path another user's link leads; not because of what is to be set aside
    itself.
    """
    record = judgement.record
    if any(str(above) in restored for above in PurePath(record.path).parents):
        return judgement
    try:
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            folder_walk.folder(os.path.dirname(record.path)),
        ):
            pass
    except folder_walk.ForeignLink as error:
        hint = f"Find out what the link is for. Once it is gone, {record.path} can be put back."
        return replace(
            judgement, verdict="refuse", why=f"cannot be put back: {error.strerror}", hint=hint
        )
    except OSError as error:
        return replace(
            judgement,
            verdict="refuse",
            why=f"cannot be put back: {error.strerror}",
            hint="Check each directory of that path: one is missing or not accessible.",
        )
    return judgement


def _refuse_written_folders(judgement: Judgement, written: Mapping[str, str]) -> Judgement:
    """Refuse to cover a folder that the tree writes to."""
    record = judgement.record
    if judgement.verdict != "overlaid" or carried_binaries.is_file(record.path):
        return judgement
    folder = carried_binaries.ground_of(record.path).folder
    if folder not in written:
        return judgement
    return Judgement(
        record,
        "refuse",
        f"cannot be laid over {folder}, because {written[folder]} in that folder is written to",
        f"Take it along with --with-files {quoted(record.path)}.",
        exists=judgement.exists,
    )
