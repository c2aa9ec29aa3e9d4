"""What is mounted where: mountinfo, read in one place.

Its lines are fields with one space between them, and a field may be empty (a mount whose source is
""); spaces, tabs, newlines and backslashes within fields are written as octal numbers, every other
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
    device: int  # st_dev of what is in it
    root: str  # the folder of the file system that is its root
    point: str  # where it is
    options: frozenset[str]  # of the mount: ro, nosuid, ...
    kind: str  # of the file system: ext4, cgroup2, ...
    source: str
    settings: tuple[str, ...]  # of the file system, in their order: rw, size=..., cpu, name=systemd
    parent: int = 0  # the id of the mount on which it is; another namespace's for a root


def read_mounts(pid: int | None = None) -> list[Mount]:
    """What `pid` sees (None: this process), in the order in which it was mounted; `NoSuchProcess`,
    `PreflightRefused`.
    """
    lines = (
        read_lines(pid, "mountinfo")
        if pid is not None
        else text_lines(os.fsdecode(read_raw("/proc/self/mountinfo")))
    )
    return [parse(line) for line in lines]


def parse(line: str) -> Mount:
    """One line of mountinfo."""
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
