"""The workspaces of copies: each copy gets a copy of the folder that its original works in.

The first is copied from the original's folder while that runs, right after its snapshot; the others
are copied from the first, before any copy runs. So all copies begin with the same files. Files
share their blocks where the file system has reflinks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..checkpoint.manifest import Manifest
from ..errors import Conflict, CriuctlError, PreflightRefused, UsageError
from ..files.clone_tree import CloneReport, Limits, clone_tree
from ..proc import folder_walk
from ..quoting import quoted
from ..report import Reporter

_LIMITS = Limits(1 << 60, 50_000_000)
_SOCKET = "it is a socket"
_SHOWN = 5  # files that are named


def workspace_of(manifest: Manifest) -> str:
    """Return the workspace of a session; `UsageError` if it has none."""
    held = manifest.holder.workspace if manifest.holder is not None else ""
    if not held:
        raise UsageError(
            f"session {manifest.session.name!r} has no workspace",
            hint="`criuctl run --workspace FOLDER` names one.",
        )
    return held


def places(workspace: str, names: Sequence[str]) -> dict[str, str]:
    """Return where the copies of these names get theirs: next to the original's folder."""
    return {name: f"{workspace}.{name}" for name in names}


@contextmanager
def separated(workspace: str, made: dict[str, str], reporter: Reporter) -> Iterator[None]:
    """Make all of them; an error inside the block removes them."""
    begun: list[str] = []
    try:
        source = workspace
        for folder in made.values():
            _make(folder)
            begun.append(folder)
            _report(reporter, folder, _copied(source, folder), first=source == workspace)
            source = next(iter(made.values()))
        yield
    except BaseException as error:
        for folder in begun:
            try:
                remove(folder)
            except OSError as left:
                error.add_note(f"{folder} could not be removed: {left.strerror}")
        raise


def remove(folder: str) -> None:
    """Remove the folder of a copy that does not run."""
    above, name = os.path.split(folder)
    with suppress(FileNotFoundError), folder_walk.folder(above) as parent:
        shutil.rmtree(name, dir_fd=parent)


def _make(folder: str) -> None:
    above, name = os.path.split(folder)
    try:
        with folder_walk.folder(above) as parent:
            os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError as error:
        raise Conflict(
            f"{folder} exists already, and would be the workspace of a copy",
            hint=f"Choose another --prefix, or move it away: `mv {quoted(folder)} ...`.",
        ) from error
    except OSError as error:
        raise PreflightRefused(
            f"{folder}: the workspace of a copy cannot be made: {error.strerror}",
            hint="Check the folder above it.",
        ) from error


def _copied(source: str, target: str) -> CloneReport:
    try:
        with folder_walk.folder(source) as old, folder_walk.folder(target) as new:
            return clone_tree(old, new, _LIMITS)
    except OSError as error:
        raise CriuctlError(
            f"{source} cannot be copied to {target}: {error.filename}: {error.strerror}",
            hint="Make room, or fork without --fork-workspace.",
        ) from error


def _report(reporter: Reporter, folder: str, report: CloneReport, *, first: bool) -> None:
    if not first:
        return  # the same again
    # The sockets of the copy are made by its restore.
    left_out = [f"{one.path} ({one.reason})" for one in report.skipped if one.reason != _SOCKET]
    if left_out:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        reporter.warning(f"{folder} lacks {', '.join(left_out[:_SHOWN])}{more}")
    if report.changed:
        more = f" and {len(report.changed) - _SHOWN} more" if len(report.changed) > _SHOWN else ""
        reporter.warning(
            f"written to while they were copied: {', '.join(report.changed[:_SHOWN])}{more}"
        )
