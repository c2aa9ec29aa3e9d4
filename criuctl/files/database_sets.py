"""Files of one database, judged together: all come back as they were, or none does.

A database without changes is left as it is. If files have changed, all changed files are put back,
including logs that have only grown, because the server's memory does not know the appended data. If
the contents of one of them are not in the checkpoint, the restore is refused, once for the whole
database, with a remedy for the next dump.

In a folder that was stored as a whole (``--with-files``), files made since the dump are set aside,
too (``set-aside``): PostgreSQL, for example, would use a newer map of free space as its own. RULE:
that is done only in a folder that is already a data folder on this host, because a manifest can
name any folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord
from ..errors import CriuctlError
from . import databases
from .carried_files import walk

if TYPE_CHECKING:
    from .judgement import Judgement, Policy

_NAMED = 3  # files


def as_sets(judged: Iterable[Judgement], policy: Policy) -> list[Judgement]:
    """Return the judgements, with those of files of one database made to agree."""
    judged = list(judged)
    sets: dict[str, list[Judgement]] = {}
    for judgement in judged:
        if judgement.record.database:
            sets.setdefault(judgement.record.database, []).append(judgement)
    settled: dict[int, Judgement] = {}
    for database, members in sets.items():
        changed = [j for j in members if j.changed]
        # SQLite checks its files before each transaction
        lone = not databases.is_folder(database, [j.record.path for j in members])
        if changed and not (policy == "keep" and lone):
            settled |= {
                id(old): new
                for old, new in zip(members, _settled(database, members, policy), strict=True)
            }
    there = {j.record.path for j in judged}
    restored = {
        d
        for d, members in sets.items()
        if any(settled.get(id(j), j).verdict == "put-back" for j in members)
    }
    whole = {
        j.record.path: j
        for j in judged
        if j.record.path in restored and stat.S_ISDIR(j.record.mode)
    }
    made = [
        one
        for path, folder in whole.items()
        if databases.is_marked(path)
        for one in _made_since(folder, there)
    ]
    made += [one for j in judged if j.record.path in restored for one in stale(j, there)]
    return [*(settled.get(id(j), j) for j in judged), *made]


def stale(main: Judgement, known: set[str]) -> Iterator[Judgement]:
    """Yield the files next to a SQLite database that were made since the dump, to be set aside:
    it would take a journal there for its own, and roll it back.
    """
    for path in databases.neighbours(main.record.path):
        if path not in known and stat.S_ISREG(mode := _mode(path)):
            yield _made(main, path, mode)


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _made(near: Judgement, path: str, mode: int) -> Judgement:
    why = "was made since the dump in the folder of a database; kept aside"
    record = FileRecord(path, "carried", mode=mode)
    return replace(near, record=record, verdict="set-aside", why=why, hint="", whole="")


def _made_since(folder: Judgement, there: set[str]) -> Iterator[Judgement]:
    """Yield what is below a folder that came along and did not exist at the dump; of a new folder
    only the folder itself.
    """
    top = folder.record.path
    with suppress(CriuctlError, OSError):
        for path, fd in walk(top, os.getpid()):
            if fd is None or path in there or (os.path.dirname(path) not in there):
                continue
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                yield _made(folder, path, mode)


def _settled(database: str, members: list[Judgement], policy: Policy) -> list[Judgement]:
    """Put all changed ones back, or refuse one for all."""
    whole = [_whole(j) if j.changed else j for j in members]
    lost = [j for j in whole if j.changed and j.verdict != "put-back"]
    if not lost and policy == "restore":
        return whole
    first = next(j for j in members if j.changed)
    refusal = _refusal(database, members, first, bool(lost))
    return [
        refusal
        if j is first
        else replace(j, verdict="moved-on", why="", warns=False)
        if j.changed
        else j
        for j in members
    ]


def _whole(judgement: Judgement) -> Judgement:
    """Treat a file that has grown as changed: what was appended is not in the server's memory."""
    if judgement.verdict != "grown":
        return judgement
    why = (
        f"{judgement.why.partition(' and is only')[0]}; put back as it was with its database, the "
        "newer copy kept aside"
    )
    return replace(
        judgement, verdict="put-back", why=why, from_prefix=judgement.record.data is None
    )


def _refusal(database: str, members: list[Judgement], first: Judgement, lost: bool) -> Judgement:
    changed = [j for j in members if j.changed]
    names = ", ".join(os.path.basename(j.record.path) for j in changed[:_NAMED])
    names += ", ..." if changed[_NAMED:] else ""
    what = f"{len(changed)} of {len(members)} files" if members[1:] else "its file"
    why = f"is a database with {what} changed since the dump ({names})"
    back = "Put all of it back as it was at the dump"
    if not lost:
        return replace(
            first,
            verdict="refuse",
            whole=database,
            why=f"{why}; its memory fits only its files of the dump",
            hint=(
                f"{back}, or restore with --files restore, which does it and keeps the newer "
                "copies aside."
            ),
        )
    why = f"{why}, and not all of these were taken along: single files put back would damage it"
    option = databases.option(database, [j.record.path for j in members])
    return replace(
        first,
        verdict="refuse",
        whole=database,
        why=why,
        hint=f"{back}, or restore another checkpoint; next time dump with {option}.",
    )
