"""OpenSSL's random generators: a copy must not go on with the numbers of its original.

Before each use, a generator of OpenSSL (1.1.1d and newer) compares ``getpid()`` with the number
that it noted when it was seeded; another number means that there was a fork, and it takes a new
seed from the kernel. The copies of a tree have the same PIDs, each in a namespace of its own, so
none of them would notice. So what OpenSSL takes for its PID is changed: a few instructions return
the PID, combined with a number that is another one in each restore. They do so in later children,
too, which still notice that they were forked.

In a library these instructions lie after its code, in a part of the last page that belongs to
nothing, and the library's reference to ``getpid`` (of no other file) leads to them. A program that
contains OpenSSL and exports its symbols, as Node.js does, has a function for this purpose, whose
one jump to ``getpid`` they replace.

No function of the library is called, no lock is taken, and no thread has to be at a certain place:
one that is about to jump to ``getpid`` returns from there. What a generator was making at the dump
it completes, as any value from before; the next use takes a new seed, in the thread that asks.

It is done in each restore, as any of them may be one of several. An OpenSSL without exported
symbols inside another program is not found.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import struct
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from ..criu.images import path_of
from ..errors import CriuctlError, PlatformError
from ..proc import inject
from ..proc.elf_symbols import ElfSymbols
from ..proc.memory import PAGE
from ..proc.syscalls import read_process
from .base import Repair, RestoredTree, RestoreImages

# The library, its FIPS provider, and Python's package cryptography, which contains it.
_LIBRARY = re.compile(r".*/((libcrypto|fips)[-.]|cryptography/hazmat/bindings/_rust\b)[^/]*")
_FORK_ID, _GETPID = b"openssl_get_fork_id", b"getpid"
_ENTRY = bytes.fromhex("f30f1efa")  # endbr64
# push 39 (getpid); pop rax; syscall; xor eax, NUMBER; ret
_START, _END = bytes.fromhex("6a27580f0535"), b"\xc3"
_CODE = len(_ENTRY + _START) + 4 + len(_END)
_JUMP, _SPACE = b"\xe9", 16  # functions begin at multiples of this
_FILLING = frozenset(bytes.fromhex("662e0f1f8440440090cc80"))  # what assemblers fill with


class _File(NamedTuple):
    """A file that may contain OpenSSL, in one process."""

    path: str
    start: int
    code: list[tuple[int, int]]  # where the process may execute it

    def executes(self, address: int) -> bool:
        """Return whether this is an address of its code."""
        return any(start <= address and address + _SPACE <= end for start, end in self.code)


class _Place(NamedTuple):
    """The addresses at which a file asks for the PID; 0 for what it does not have."""

    function: int = 0  # OpenSSL's own function
    slot: int = 0  # what has the address of `getpid`
    room: int = 0  # for the instructions


class OpensslGenerators(Repair):
    """What OpenSSL takes for the PID."""

    loses = (
        "OpenSSL does not notice that it was restored: with CRIU 4.2 alone, two restores of one "
        "checkpoint go on with the same random numbers."
    )

    def __init__(self) -> None:
        self._files: dict[int, list[_File]] = {}  # by PID in the tree

    def amend_restore(self, restore: RestoreImages) -> None:
        """Note where the files are mapped."""
        paths = {e.id: path_of(e.reg) for e in restore.images.files() if e.HasField("reg")}
        libraries = {path for path in paths.values() if _LIBRARY.fullmatch(path)}
        for pid, memory in restore.images.memories():
            candidates = libraries | {paths.get(memory.exe_file_id, "")} - {""}
            areas = [
                (area, path)
                for area in memory.vmas
                if area.flags & mmap.MAP_PRIVATE and (path := paths.get(area.shmid)) in candidates
            ]
            self._files[pid] = [
                _File(path, area.start, _executable(areas, path))
                for area, path in areas
                if area.pgoff == 0 and _executable(areas, path)
            ]

    def mend(self, tree: RestoredTree) -> None:
        """Change the PID that OpenSSL sees; a warning where that is not possible."""
        for inner, files in self._files.items():
            for file in files if inner in tree.pids else ():
                try:
                    _change(tree.pids[inner], file)
                except (OSError, ValueError, CriuctlError) as error:
                    tree.reporter.warning(
                        f"PID {inner}: OpenSSL in {file.path} cannot notice that this may be a "
                        f"copy: {error}",
                        "Its random numbers may be those of another copy.",
                    )


def _change(pid: int, file: _File) -> None:
    """Change the PID that OpenSSL sees in one file of a process.

    What another process has in its memory of the same file must not decide where this one is
    written to: it may belong to another user.
    """
    place = _place(pid, file)
    if place.function:
        _write_number(pid, place.function + _jump(read_process(pid, place.function, _SPACE)))
    elif place.slot:
        (address,) = struct.unpack("<Q", read_process(pid, place.slot, 8))
        if _is_ours(pid, address):
            _write_number(pid, address + len(_ENTRY))
            return
        address = place.room or _new_page(pid)
        inject.write_memory(pid, address, _ENTRY)
        _write_number(pid, address + len(_ENTRY))
        inject.write_memory(pid, place.slot, struct.pack("<Q", address))


def _executable(areas: Iterable[tuple[Any, str]], path: str) -> list[tuple[int, int]]:
    return [(a.start, a.end) for a, name in areas if name == path and a.prot & mmap.PROT_EXEC]


def _place(pid: int, file: _File) -> _Place:
    """Return where this file asks for the PID; nowhere if it does not contain OpenSSL."""
    library = _LIBRARY.fullmatch(file.path)
    try:
        symbols = ElfSymbols(partial(read_process, pid), file.start)
        function = symbols.function(_FORK_ID)
    except (OSError, ValueError):
        if library:
            raise
        return _Place()  # a program of another kind
    if not all(map(file.executes, symbols.code())):
        return _Place()  # mapped only to be read
    if platform.machine() != "x86_64" and (library or function is not None):
        raise PlatformError("it is only supported on x86-64")
    if function is not None:
        address, size = function
        if address % _SPACE or size > _SPACE or not file.executes(address):
            raise ValueError(f"its {_FORK_ID.decode()} is another function")
        return _Place(function=address)
    slot = symbols.slot(_GETPID) if library else None
    if slot is None:
        return _Place()
    room = symbols.unused_code(_CODE)
    return _Place(slot=slot, room=room if room and file.executes(room) else 0)


def _jump(code: bytes) -> int:
    """Return where in OpenSSL's function its one jump is, or what has replaced it."""
    at = len(_ENTRY) if code.startswith(_ENTRY) else 0
    jumps = code.startswith(_JUMP, at) and _FILLING.issuperset(code[at + 5 :])
    if not jumps and not code.startswith(_START, at):
        raise ValueError(f"its {_FORK_ID.decode()} does more than is known")
    return at


def _is_ours(pid: int, address: int) -> bool:
    """Return whether an earlier restore has put the instructions there."""
    try:
        code = read_process(pid, address, _CODE)
    except OSError:
        return False
    return code.startswith(_ENTRY + _START) and code.endswith(_END)


def _write_number(pid: int, address: int) -> None:
    """Write the instructions with a new number; not zero, and not the one that is there."""
    length = len(_START) + 4 + len(_END)
    before = read_process(pid, address, length)
    while (code := _START + os.urandom(4) + _END) == before or code[-5:-1] == bytes(4):
        pass
    inject.write_memory(pid, address, code)


def _new_page(pid: int) -> int:
    """Return a new page of the process for the instructions."""
    with inject.stopped(pid):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        place = inject.call(
            pid, inject.MMAP, 0, PAGE, mmap.PROT_READ | mmap.PROT_EXEC, flags, -1, 0
        )
    if place < 0:
        raise OSError(-place, os.strerror(-place))
    return place
