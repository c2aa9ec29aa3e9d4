"""Memory mappings of a process, from ``/proc/PID/maps``.

``smaps`` knows more (VmFlags) but walks all page tables, which takes long for gigabytes. `vm_flags`
reads it, for callers that found a reason to in the plain list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .procfs import read_text

_DELETED = " (deleted)"


class Mapping(NamedTuple):
    """One mapped range."""

    start: int
    end: int
    perms: str  # "rw-p", "r-xs", ...
    offset: int
    major: int
    minor: int
    inode: int
    # as shown, without " (deleted)"; "" when anonymous; "[heap]", "[stack]", ... for the special
    # ones
    path: str
    deleted: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    @property
    def shared(self) -> bool:
        """MAP_SHARED."""
        return self.perms[3] == "s"

    @property
    def device(self) -> int:
        """st_dev of the file it maps."""
        return os.makedev(self.major, self.minor)


def mappings(pid: int) -> list[Mapping]:
    """Return all mappings of `pid` in order; none for zombies and kernel threads.

    `NoSuchProcess`, `PreflightRefused`.
    """
    return list(each_mapping(pid))


def each_mapping(pid: int) -> Iterator[Mapping]:
    """Yield the mappings in order, for callers that need only the first ones."""
    return map(_parsed, filter(None, read_text(pid, "maps").split("\n")))


@lru_cache(maxsize=8192)  # forked processes have most mappings at the same addresses
def _parsed(line: str) -> Mapping:
    f = line.split(maxsplit=5)
    start, _, end = f[0].partition("-")
    major, _, minor = f[3].partition(":")
    path = f[5] if len(f) > 5 else ""
    return Mapping(
        start=int(start, 16),
        end=int(end, 16),
        perms=f[1],
        offset=int(f[2], 16),
        major=int(major, 16),
        minor=int(minor, 16),
        inode=int(f[4]),
        path=path.removesuffix(_DELETED),
        deleted=path.endswith(_DELETED),
    )


def vm_flags(pid: int) -> dict[int, frozenset[str]]:
    """Return start address -> VmFlags of each mapping, in two letters (``io``, ``pf``, ``lo``,
    ...).
    """
    flags: dict[int, frozenset[str]] = {}
    start = 0
    for line in read_text(pid, "smaps").split("\n"):
        word, _, rest = line.partition(" ")
        if word == "VmFlags:":
            flags[start] = frozenset(rest.split())
        elif "-" in word and not word.endswith(":"):
            start = int(word.partition("-")[0], 16)
    return flags
