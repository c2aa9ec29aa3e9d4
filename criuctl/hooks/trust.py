"""Whether an executable may be run with criuctl's rights: only its owner may change it, and the
owner is root or criuctl's user.

Every folder and symlink on the way to the file is checked as well, because a user who can write to
one of them can replace the file. The way begins at the folder that the configuration names; the
folders above it are the operator's own choice. Outside of it (through a symlink) a sticky folder
such as /tmp is as safe as its entries.
"""

from __future__ import annotations

import os
import stat

from ..quoting import quoted

_MAX_LINKS = 40  # the kernel's limit


def _way(path: str) -> list[tuple[str, os.stat_result]]:
    """Return every folder and symlink on the way to `path`, and its target, each once."""
    pending = [part for part in path.split("/") if part][::-1]
    here, links = "/", 0
    passed: dict[str, os.stat_result] = {"/": os.lstat("/")}
    while pending:
        part = pending.pop()
        if part == ".":
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        one = os.path.join(here, part)
        status = passed[one] = os.lstat(one)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(f"{path}: too many symlinks")
            target = os.readlink(one)
            pending += [p for p in target.split("/") if p][::-1]
            here = "/" if target.startswith("/") else here
        else:
            here = one
    return list(passed.items())


def objection(path: str, top: str) -> tuple[str, str] | None:
    """Return why `path`, below the configured folder `top`, may not be run, and the remedy; None if
    it may.
    """
    real_top = os.path.realpath(top)
    above = {one for one, _ in _way(os.path.abspath(top))} - {real_top}
    trusted = {0, os.geteuid()}
    for one, status in _way(os.path.abspath(path)):
        if one in above:
            continue
        if status.st_uid not in trusted:
            who = "root" if os.geteuid() == 0 else f"root or user {os.geteuid()}"
            return (
                f"{one} belongs to user {status.st_uid}, not to {who}",
                f"`chown root {quoted(one)}`, if it is meant to run.",
            )
        mode = status.st_mode
        if stat.S_ISLNK(mode) or not mode & (stat.S_IWGRP | stat.S_IWOTH):
            continue
        outside = one != real_top and not one.startswith(f"{real_top}/")
        if not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX and outside):
            return f"{one} can be written by others than its owner", f"chmod go-w {quoted(one)}"
    return None
