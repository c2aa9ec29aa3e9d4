"""The files that a copy writes to: each copy gets its own, so that its original's stay as they are.

A copy shares the past with its original, and writes to nothing that the original writes to, or
would find if it were restored later. So each file that the copy has open, or mapped shared, for
writing is made once more next to the present one, with the contents of the freeze (verdict
``beside``), whether or not a process uses the present one now: several copies are restored at the
same time, and a program that saves by renaming moves its files at any moment. Files that are only
appended to count as written. Output is the exception (`is_output`): original and copy both append
to it.

A database is one set of files, which its program opens again by their names: SQLite removes the
``-wal`` of a name, Redis and PostgreSQL make new files in their folder. If only the open files were
separated, the copy would damage those of the original by their names. So a database is separated
with its folder (``--fork-workspace``), or the copy is refused.

With ``--share-files`` the copy uses the original's files, as long as they are as they were:
`criuctl.files.copies`. A database that has changed since is refused even then: the memory of the
copy does not fit it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord
from ..criu.images import ImageSet, path_of
from ..quoting import quoted
from . import databases
from .copies import is_output, present, writers_to
from .database_sets import stale
from .judgement import Judgement, Policy
from .shared_mappings import shared_paths

_OWN = "is written to by the copy, which gets its own next to it, as it was at the freeze"
_OWN_HINT = (
    "What the copy opens by its path from now on is the original's. --share-files lets both write "
    "to one file; `criuctl fork --fork-workspace` gives each copy a folder of its own."
)
_LOST = (
    "is written to by the copy, and the contents of the freeze, which it needs for a file of its "
    "own, are neither in the checkpoint nor here"
)
_DATABASE = (
    "is a database that the tree has open, which original and copy would damage: its files belong "
    "together, and its program opens and removes them by their names"
)
_DATABASE_HINT = (
    "Have it in the session's workspace (run --workspace FOLDER), which `criuctl fork "
    "--fork-workspace` separates as a whole; or have the program close it before the copy."
)
_SHARED_HINT = (
    " A SQLite database that is as it was at the freeze can be used by both: --share-files."
)
_CHANGED = (
    "is a database that has changed since the freeze: the memory of a copy does not fit it any more"
)
_MOVED = (
    "is a SQLite database with a rollback journal, and another inode for the copy: SQLite refuses "
    "the next write of an open connection (SQLITE_READONLY_DBMOVED)"
)
_MOVED_HINT = "The program must open it again (criuctl.inside.after_fork), or use journal_mode=WAL."
_LEFT = "is another one than at the freeze, and stays so for the original; the copy finds that one"


class _Opened(Struct, frozen=True):
    """The regular files of CRIU's images, by path."""

    paths: frozenset[str]
    written: frozenset[str]  # open, or mapped shared, for writing
    fixed: frozenset[str]  # CRIU cannot be given another name

    @classmethod
    def of(cls, images: ImageSet) -> _Opened:
        remapped, shared = images.remapped(), shared_paths(images)
        entries = {
            path_of(e.reg): e.reg
            for e in images.files()
            if e.HasField("reg") and e.id not in remapped
        }
        written = {
            path_of(e.reg)
            for e in images.files()
            if e.HasField("reg") and e.reg.flags & os.O_ACCMODE != os.O_RDONLY
        }
        return cls(
            frozenset(entries),
            frozenset(written & entries.keys() | shared),
            frozenset(path for path, reg in entries.items() if not isinstance(reg.name, str)),
        )


def separate(
    judged: Iterable[Judgement],
    images: ImageSet,
    policy: Policy,
    *,
    folder: str = "",
    original: int | None = None,
) -> tuple[Judgement, ...]:
    """Return the judgements of a copy's files, with a file of its own for each that it writes to;
    ``refuse`` for what cannot be separated.

    `folder`: the copy's own workspace, whose files are its own already. `original`: the PID of the
    living original, if it runs here.
    """
    judged, opened = tuple(judged), _Opened.of(images)
    inside = f"{folder}/" if folder else "\0"
    outside = [j for j in judged if not j.record.path.startswith(inside)]
    paths = {j.record.path for j in judged}
    settled = {id(j): _as_then(j, paths) for j in judged if j.record.path.startswith(inside)}
    # all names of one file are treated the same
    inodes = {(j.record.device, j.record.inode) for j in outside if _is_written(j.record, opened)}
    settled |= {
        id(j): _separate(j, opened, policy) if (j.record.device, j.record.inode) in inodes else j
        for j in outside
    }
    if original is not None:
        settled |= _left(outside, opened)
    in_use = {
        j.record.database for j in outside if j.record.database and _is_written(j.record, opened)
    }
    settled |= _refused(outside, in_use, _DATABASE, opened)
    return tuple(settled[id(j)] for j in judged)


def cleared(judged: Iterable[Judgement], folder: str) -> list[Judgement]:
    """Return what is to be set aside in the copy's own workspace, which was copied after the
    freeze: files of its databases that were made in between.
    """
    inside = [j for j in judged if folder and j.record.path.startswith(f"{folder}/")]
    known = {j.record.path for j in inside}
    made = [one for j in inside if j.record.database == j.record.path for one in stale(j, known)]
    return [*(j for j in inside if j.verdict == "set-aside"), *made]


def share(judged: Iterable[Judgement], images: ImageSet) -> tuple[Judgement, ...]:
    """Return the judgements of a copy that uses its original's files (``--share-files``):
    databases are refused, except one of SQLite that is as it was at the freeze.
    """
    judged, opened = tuple(judged), _Opened.of(images)
    paths = {j.record.path for j in judged}
    servers = {
        j.record.database
        for j in judged
        if j.record.database
        and databases.is_folder(j.record.database, paths)
        and _is_written(j.record, opened)
    }
    used = {j.record.database for j in judged if _is_written(j.record, opened)}
    changed = {j.record.database for j in judged if j.changed and j.record.database in used}
    changed -= {"", *servers}
    refused = _refused(judged, servers, _DATABASE, opened)
    refused |= _refused(judged, changed, _CHANGED, opened)
    return tuple(refused.get(id(j), j) for j in judged)


def _is_written(record: FileRecord, opened: _Opened) -> bool:
    if record.kind == "carried":  # perhaps only read, or open under a deleted name
        return record.path in opened.written or (
            bool(record.holders) and record.path not in opened.paths
        )
    return record.kind == "written"


def _left(judged: Iterable[Judgement], opened: _Opened) -> dict[int, Judgement]:
    """Return, by `id`, what came along, is not open in the copy, and stays as its living original
    has it; what a process writes to is refused elsewhere (`copies.spared`).
    """
    changed = {
        inode: j
        for j in judged
        if j.verdict == "put-back" and not _is_written(j.record, opened)
        if (inode := present(j)) is not None
    }
    busy = writers_to({inode: [j.record.path] for inode, j in changed.items()})
    return {
        id(j): replace(j, verdict="moved-on", why=_LEFT, warns=True, from_prefix=False)
        for inode, j in changed.items()
        if inode not in busy
    }


def _separate(judgement: Judgement, opened: _Opened, policy: Policy) -> Judgement:
    record = judgement.record
    if not stat.S_ISREG(record.mode) or judgement.verdict == "beside":
        return judgement
    if is_output(record) or (judgement.verdict == "refuse" and policy == "refuse"):
        return judgement
    if record.path in opened.fixed:
        why = "is written to by the copy, and CRIU cannot be given another name for it (no UTF-8)"
        return replace(judgement, verdict="refuse", why=why, hint="Rename it, or --share-files.")
    # the present file begins with the contents of the freeze
    begins = judgement.from_prefix or judgement.verdict in ("same", "grown")
    if record.data is None and record.size and not (begins and record.digest):
        hint = (
            f"Dump with --with-files {quoted(record.path)} and copy that checkpoint, or have both "
            "write to one file with --share-files."
        )
        return replace(judgement, verdict="refuse", why=_LOST, hint=hint)
    prefix = record.data is None and bool(record.size)
    return replace(
        judgement, verdict="beside", why=_OWN, hint=_OWN_HINT, from_prefix=prefix, warns=True
    )


def _as_then(judgement: Judgement, paths: Collection[str]) -> Judgement:
    """Return the judgement of a file in the copy's workspace, which was copied after the freeze:
    what the original appended in between is not the copy's.
    """
    path = judgement.record.path
    if judgement.record.database == path and path in paths and f"{path}-wal" not in paths:
        why = "; ".join(filter(None, (judgement.why, _MOVED)))
        judgement = replace(judgement, why=why, hint=_MOVED_HINT, warns=True)
    if judgement.verdict != "grown":
        return judgement
    why = f"{judgement.why}; the copy's ends as it did at the freeze"
    return replace(
        judgement, verdict="put-back", why=why, from_prefix=judgement.record.data is None
    )


def _refused(
    judged: Iterable[Judgement], refused: Collection[str], why: str, opened: _Opened
) -> dict[int, Judgement]:
    """Return, by `id`, one refusal for each of these databases, and nothing to report of its other
    files.
    """
    settled: dict[int, Judgement] = {}
    named: set[str] = set()
    for judgement in judged:
        if (database := judgement.record.database) not in refused:
            continue
        if database in named:
            quiet = replace(judgement, verdict="moved-on", why="", warns=False, whole="")
            settled[id(judgement)] = quiet
            continue
        named.add(database)
        hint = _DATABASE_HINT + (_SHARED_HINT if database in opened.paths else "")
        settled[id(judgement)] = replace(
            judgement, verdict="refuse", why=why, hint=hint, whole=database
        )
    return settled
