"""Mounts, read from mountinfo: the one place that parses it.

Its lines are fields with one space between them, and a field may be empty (a mount whose source is
""). Spaces, tabs, newlines and backslashes within fields are written as octal numbers, every other
byte as it is (proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .procfs import read_lines, read_raw, text_lines

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount, as a process sees it."""

    id: int
    device: int  # st_dev of the files in it
    root: str  # the folder of the file system that is mounted
    point: str  # the mount point
    options: frozenset[str]  # per-mount options: ro, nosuid, ...
    kind: str  # file system type: ext4, cgroup2, ...
    source: str
    # file system options, in their order: rw, size=..., cpu, name=systemd
    settings: tuple[str, ...]
    # the id of the mount that holds the mount point; of another namespace for a root
    parent: int = 0


def read_mounts(pid: int | None = None) -> list[Mount]:
    """Return the mounts that `pid` sees (None: this process), in the order of mounting.

    `NoSuchProcess`, `PreflightRefused`.
    """
    lines = (
        read_lines(pid, "mountinfo")
        if pid is not None
        else text_lines(os.fsdecode(read_raw("/proc/self/mountinfo")))
    )
    return [parse(line) for line in lines]


def parse(line: str) -> Mount:
    """Parse one line of mountinfo."""
    fields = line.split(" ")
    optional = fields.index("-", 6)
    major, _, minor = fields[2].partition(":")
    return Mount(
        id=int(fields[0]),
        device=os.makedev(int(major), int(minor)),
        root=_plain(fields[3]),
        point=_plain(fields[4]),
        options=frozenset(fields[5].split(",")),
        kind=fields[optional + 1],
        source=_plain(fields[optional + 2]),
        settings=tuple(fields[optional + 3].split(",")),
        parent=int(fields[1]),
    )


def _plain(field: str) -> str:
    if "\\" not in field:
        return field
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)
