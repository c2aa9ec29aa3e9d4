"""Databases: files that belong together, so that putting back single ones would damage them.

A server keeps in memory what is in its files: the place in its log, pages, numbers of transactions.
When one of the files is another one at the restore, all must be as they were at the dump, also those
that the server had closed.  A database is found at the dump, by what lies in its folder:

- PostgreSQL: ``PG_VERSION``, in the topmost such folder;
- MariaDB and MySQL: ``ibdata1``;
- Redis with an append-only file: ``appendonlydir``, or a file ``*.aof``;
- SQLite: the main file and its ``-wal``, ``-journal`` and ``-shm``.

All that the tree has open for writing below such a folder belongs to it.  `as_sets` judges: a database
of which nothing has changed goes on; one whose changed files are all in the checkpoint comes back as a
whole; any other is refused, once, with what would have helped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..checkpoint.manifest import FileRecord
from ..quoting import quoted

if TYPE_CHECKING:
    from .judgement import Judgement, Policy

_NEIGHBOURS = ("-wal", "-journal", "-shm")  # of SQLite's main file
_MARKS = ("PG_VERSION", "ibdata1")
_CONTROL = ("global/pg_control",)  # written at every start, stop and checkpoint of its server, and closed
_NAMED = 3  # files


def named(root_pid: int, records: Iterable[FileRecord]) -> list[FileRecord]:
    """The records, those of files that belong to a database with that."""
    records = list(records)
    written = {r.path for r in records if r.holders and r.kind in ("written", "carried") and stat.S_ISREG(r.mode)}
    found = databases(root_pid, written)
    return [r.with_use(database=found[r.path]) if r.path in found else r for r in records]


def databases(root_pid: int, written: Iterable[str]) -> dict[str, str]:
    """Path -> database, of those of these files that belong to one: `written` are open for writing in the tree."""
    written = set(written)
    folders: dict[str, str] = {}
    found = {}
    for path in written:
        if database := _sqlite(path, written) or _folder_of(f"/proc/{root_pid}/root", os.path.dirname(path), folders):
            found[path] = database
    logs = {os.path.dirname(path).removesuffix("/appendonlydir") for path in written if path.endswith(".aof")}
    for path in written - found.keys():
        if folder := next((f for f in logs if path.startswith(f"{f}/")), ""):
            found[path] = folder
    return found


def is_folder(database: str, paths: Container[str]) -> bool:
    """Whether it is a server's data folder; `paths` are its files."""
    return database not in paths


def control_files(database: str) -> list[str]:
    """Files of a database that show whether it was changed, though its server does not keep them open."""
    return [os.path.join(database, name) for name in _CONTROL]


def _sqlite(path: str, written: set[str]) -> str:
    for ending in _NEIGHBOURS:
        main = path.removesuffix(ending)
        if main != path and main in written:
            return main
    return path if any(path + ending in written for ending in _NEIGHBOURS) else ""


def _folder_of(root: str, folder: str, known: dict[str, str]) -> str:
    """The topmost folder on the way to this one that is a server's data folder; "" for none."""
    if folder not in known:
        above = os.path.dirname(folder)
        known[folder] = _folder_of(root, above, known) if above != folder else ""
        if not known[folder] and any(os.path.lexists(f"{root}{folder}/{mark}") for mark in _MARKS):
            known[folder] = folder
    return known[folder]


def as_sets(judged: Iterable[Judgement], policy: Policy) -> list[Judgement]:
    """The judgements, with those of files of one database made to agree."""
    judged = list(judged)
    sets: dict[str, list[Judgement]] = {}
    for judgement in judged:
        if judgement.record.database:
            sets.setdefault(judgement.record.database, []).append(judgement)
    settled: dict[int, Judgement] = {}
    for database, members in sets.items():
        changed = [j for j in members if j.changed]
        lone = not is_folder(database, [j.record.path for j in members])  # SQLite looks again before each transaction
        if changed and not (policy == "keep" and lone):
            settled |= {id(old): new for old, new in zip(members, _settled(database, members, policy), strict=True)}
    return [settled.get(id(j), j) for j in judged]


def _settled(database: str, members: list[Judgement], policy: Policy) -> list[Judgement]:
    """All changed ones are put back, or one is refused for all."""
    whole = [_whole(j) if j.changed else j for j in members]
    lost = [j for j in whole if j.changed and j.verdict != "put-back"]
    if not lost and policy == "restore":
        return whole
    first = next(j for j in members if j.changed)
    refusal = _refusal(database, members, first, bool(lost))
    return [refusal if j is first else replace(j, verdict="moved-on", why="", warns=False) if j.changed else j for j in members]


def _whole(judgement: Judgement) -> Judgement:
    """A file that has grown is not left: what was appended is not in the server's memory."""
    if judgement.verdict != "grown":
        return judgement
    why = f"{judgement.why.partition(' and is only')[0]}; put back as it was with its database, the newer copy kept aside"
    return replace(judgement, verdict="put-back", why=why, from_prefix=judgement.record.data is None)


def _refusal(database: str, members: list[Judgement], first: Judgement, lost: bool) -> Judgement:
    changed = [j for j in members if j.changed]
    names = ", ".join(os.path.basename(j.record.path) for j in changed[:_NAMED])
    names += ", ..." if changed[_NAMED:] else ""
    what = f"{len(changed)} of {len(members)} files" if members[1:] else "its file"
    why = f"is a database of which {what} changed since the dump ({names})"
    back = "Put all of it back as it was at the dump"
    if not lost:
        return replace(
            first,
            verdict="refuse",
            whole=database,
            why=f"{why}; its memory fits only its files of the dump",
            hint=f"{back}, or restore with --files restore, which does it and keeps the newer copies aside.",
        )
    why = f"{why}, and not all of these were taken along: single files put back would damage it"
    return replace(
        first,
        verdict="refuse",
        whole=database,
        why=why,
        hint=f"{back}, or restore another checkpoint; next time dump with {option(database, [j.record.path for j in members])}.",
    )


def option(database: str, paths: Iterable[str]) -> str:
    """The option of `dump` that takes all of it along."""
    paths = sorted(paths)
    wanted = [database] if is_folder(database, paths) else paths
    return " ".join(f"--with-files {quoted(path)}" for path in wanted)
