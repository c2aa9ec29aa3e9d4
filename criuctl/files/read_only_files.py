"""Files that the tree only reads: which are hashed, and which travel.

A program does not notice that a file which it reads was replaced while it was away: a shell goes on
at its offset in another script, and a mapped table has other entries.  Size and time alone do not
show all of that.  So at the dump such a file is hashed if it is small, up to `HASH_TOTAL` in all,
because the tree is frozen meanwhile (a file of `HASH_LIMIT` takes under a millisecond). Two kinds
also travel, up to ``files_small_mib`` in all:

- ``script``: an interpreter has it open, or it begins with ``#!``;
- ``data``: it is mapped with MAP_PRIVATE, and not as code (CRIU compares libraries by build-id).

A shared mapping is not one of them: the program sees what others write there, and is meant to.
File systems in user space are left out: the process that serves one may be frozen, too.  How they
are judged: `criuctl.files.judgement`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import NoSuchProcess, PreflightRefused
from ..proc.procfs import read_link
from ..proc.trustedpath import fs_type

if TYPE_CHECKING:
    from .used_files import OpenFile

Opener = Callable[[str, tuple[int, int] | None, int], int]

HASH_LIMIT = 1 << 20  # bytes of one file
HASH_TOTAL = 16 << 20  # bytes of all files of a tree
HASH_FILES = 1000  # files of a tree; each is opened while it is frozen
SCRIPT, DATA = "script", "data"
_FUSE = 0x65735546  # f_type of statfs(2)
_ORDER = {SCRIPT: 0, DATA: 1, "": 2}
_INTERPRETER = re.compile(
    r"(ba|da|z|fi|c|tc|mk|pdk|ya|a)?sh|ksh(93)?|busybox|(g|m|n)?awk"
    r"|(python|pypy|perl|ruby|lua|luajit|php|tclsh|wish|expect|guile)[\d.-]*|node(js)?|R|julia"
)


def is_interpreter(program: str) -> bool:
    """Return whether a program, known by its executable file, reads scripts."""
    return _INTERPRETER.fullmatch(os.path.basename(program.removesuffix(" (deleted)"))) is not None


def mark_read(config: Config, entries: Iterable[OpenFile], contents: Opener) -> None:
    """Give each file that is only read its role, and mark those that are hashed and that travel.

    `contents` opens a file, see `criuctl.files.contents.open_contents`.
    """
    programs: dict[int, bool] = {}
    found: list[tuple[int, int, str, OpenFile]] = []
    for entry in entries:
        if entry.kind != "written" and not entry.executable:
            with suppress(OSError):
                size = os.stat(entry.source).st_size
                _settle(entry, programs)
                if size <= HASH_LIMIT:
                    found.append((_ORDER[entry.role], size, entry.path, entry))
    looked = []
    for _order, size, path, entry in sorted(found, key=lambda one: one[:3])[:HASH_FILES]:
        with suppress(OSError):
            if _look(entry, contents):
                looked.append((_ORDER[entry.role], size, path, entry))
    hashed, carried = HASH_TOTAL, config.files_small_mib << 20
    for _order, size, _path, entry in sorted(looked, key=lambda one: one[:3]):
        if size > hashed:
            continue
        hashed -= size
        entry.hashed = True
        if entry.role and size <= carried:
            carried -= size
            entry.small = True


def _settle(entry: OpenFile, programs: dict[int, bool]) -> None:
    """Set the role, as far as it is known without opening the file."""
    if entry.mapped:
        entry.role = "" if entry.live else DATA
    elif any(_interprets(pid, programs) for pid, _fd in entry.holders):
        entry.role = SCRIPT


def _look(entry: OpenFile, contents: Opener) -> bool:
    """Return whether the file may be read; one that begins with ``#!`` becomes a script."""
    fd = contents(entry.source, entry.leased, os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if fs_type(fd) == _FUSE:
            return False
        if not entry.mapped and not entry.role and os.pread(fd, 2, 0) == b"#!":
            entry.role = SCRIPT
        return True
    finally:
        os.close(fd)


def _interprets(pid: int, programs: dict[int, bool]) -> bool:
    if pid not in programs:
        programs[pid] = False
        with suppress(NoSuchProcess, PreflightRefused, OSError):
            programs[pid] = is_interpreter(read_link(pid, "exe"))
    return programs[pid]
