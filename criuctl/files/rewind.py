"""Judge a session's workspace for ``restore --rewind``: what is put back and what is set aside.

The workspace becomes what it was at the checkpoint. A changed file is put back, and its newer copy,
like every file that is new since, is moved to a folder next to the workspace (`put_back`): nothing
is deleted or overwritten. Sockets and devices stay; folders that are new since move as a whole.

RULE: the workspace is not taken from under a program that uses it. Refused is a file that a process
has open for writing, a workspace in which another session works, and a file that belongs to a user
who is neither its former owner nor one of the tree's: another user's work.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord, WorkspaceRecord
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..config import Config
from ..errors import CriuctlError, PreflightRefused
from ..host.registry import Registry
from ..proc.tree import read_tree
from ..quoting import quoted
from ..report import Finding
from . import workspace_index
from .carried_files import walk
from .contents import base_record
from .copies import writers_to
from .judgement import Judgement, judge_all

_HINT = "Restore without --rewind, which leaves the workspace as it is, or end what uses it first."
_NAMED = 5  # findings of one kind; the others are counted


def judge(
    manifest: Manifest,
    reader: CheckpointReader,
    judged: Sequence[Judgement],
    uids: Collection[int],
    *,
    at_home: bool,
) -> tuple[Judgement, ...]:
    """Return the judgements of all files of a restore with those of the workspace in their place.

    `judged`: of the files that the tree has open. `uids`: the users of the tree. Raise
    `PreflightRefused` if the checkpoint has no workspace, `Damaged` if it is not a valid one.
    """
    workspace = manifest.workspace
    if workspace is None:
        raise PreflightRefused(
            f"checkpoint {manifest.session.name}@{manifest.number} has no workspace to rewind to",
            hint="Restore it without --rewind. `criuctl snapshot --with-workspace` takes one.",
        )
    opened = {j.record.path: j.record for j in judged}
    records = [
        _as_opened(record, opened.get(record.path))
        for record in workspace_index.unpack(workspace, reader)
    ]
    users = {*uids, 0}
    ours = [_settled(j, users) for j in judge_all(records, "restore", uids, at_home=at_home)]
    ours += _new_since(workspace, {record.path: record.mode for record in records})
    paths = {j.record.path for j in ours}
    return (*(j for j in judged if j.record.path not in paths), *ours)


def _as_opened(record: FileRecord, opened: FileRecord | None) -> FileRecord:
    """Return the record with the descriptors that the tree has of the file."""
    return record if opened is None else record.with_use(holders=opened.holders)


def _settled(judgement: Judgement, users: Collection[int]) -> Judgement:
    """Return the judgement for a rewind: owner and mode come back, too, and the work of another
    user is not moved.
    """
    record = judgement.record
    try:
        now = os.lstat(record.path)
    except OSError:  # missing, and put back
        return judgement
    same_kind = stat.S_IFMT(now.st_mode) == stat.S_IFMT(record.mode)
    dressed = (now.st_mode, now.st_uid, now.st_gid) == (record.mode, record.uid, record.gid)
    if judgement.verdict in ("same", "moved-on") and stat.S_ISREG(record.mode):
        if same_kind and not dressed:
            why = "has another owner or mode than at the checkpoint; put back as it was"
            judgement = replace(judgement, verdict="put-back", why=why)
    if judgement.verdict != "put-back":
        return judgement
    if now.st_uid not in users and now.st_uid != record.uid:
        return replace(
            judgement,
            verdict="refuse",
            why=f"was changed since the checkpoint and belongs to user {now.st_uid} now",
            hint=f"Move it out of the workspace: `mv {quoted(record.path)} ...`.",
        )
    # The newer copy moves to another folder, and the contents are in the checkpoint.
    return replace(judgement, from_prefix=False)


def _new_since(workspace: WorkspaceRecord, known: Mapping[str, int]) -> Iterator[Judgement]:
    """Yield what has come into the workspace since; of a new folder only the folder.

    `known`: path -> mode at the checkpoint.
    """
    moved: tuple[str, ...] = ()  # folders that move with all that is in them
    for path, fd in _present(workspace.path):
        if path.startswith(moved):
            continue
        status = os.fstat(fd)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and not stat.S_ISDIR(known.get(path, 0)):
            moved = (*moved, f"{path}/")
        if path in known:
            continue
        if not (is_folder or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            continue  # a socket, a device or a FIFO is not work that could be lost
        why = "is new since the checkpoint; moved to a folder next to the workspace"
        record = base_record(path, "carried", status)
        yield Judgement(record, "set-aside", why, changed=True)


def _present(top: str) -> Iterator[tuple[str, int]]:
    """Yield each path of the workspace here, folders before what is in them, with a descriptor."""
    for path, fd in walk(top, os.getpid()):
        if fd is not None:
            yield path, fd


def conflicts(config: Config, manifest: Manifest, judged: Iterable[Judgement]) -> Iterator[Finding]:
    """Yield an error for each process that uses the workspace which is about to change."""
    assert manifest.workspace is not None
    top = manifest.workspace.path
    moved: dict[tuple[int, int], list[str]] = {}
    for one in judged:
        path = one.record.path
        if one.verdict in ("put-back", "set-aside") and _below(path, top):
            for name, status in _files(path):
                moved.setdefault((status.st_dev, status.st_ino), []).append(name)
    writers = writers_to(moved)
    for inode in list(writers)[:_NAMED]:
        text = f"{moved[inode][0]}: PID {writers[inode]} has it open for writing"
        yield Finding("error", "workspace-in-use", text, _HINT, writers[inode])
    if len(writers) > _NAMED:
        text = f"{len(writers) - _NAMED} more files of the workspace are open for writing"
        yield Finding("error", "workspace-in-use", text, _HINT)
    for name, pid in _sessions_in(config, top, manifest.session.name):
        text = f"{top}: the session {name} works in this folder, with PID {pid}"
        hint = f"End it: `criuctl kill {quoted(name)}`, or restore without --rewind."
        yield Finding("error", "workspace-in-use", text, hint, pid)


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files at and below a path."""
    for name, fd in _present(path):
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            yield name, status


def _sessions_in(config: Config, top: str, own: str) -> Iterator[tuple[str, int]]:
    """Yield the other sessions of this host that have a process in the folder, with its PID."""
    for record in Registry(config).all():
        if record.name == own or not record.alive():
            continue
        found: Mapping[int, str] = {}
        with suppress(CriuctlError, OSError):  # it has just ended
            found = {p.pid: os.readlink(f"/proc/{p.pid}/cwd") for p in read_tree(record.pid)}
        pid = next((pid for pid, cwd in found.items() if _below(cwd, top)), None)
        if pid is not None:
            yield record.name, pid


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")
