"""Programs that may ask for a userfaultfd of their own.

Memory can be registered with one userfaultfd only: while we track the writes to it, the program's
own UFFDIO_REGISTER of that memory fails with EBUSY. Nothing reports beforehand that a program is
about to call userfaultfd(2), and between that call and the registration may lie less than a
microsecond. So processes that can make the call are left alone from the beginning.

No C library has a function for userfaultfd(2). A compiled program has the number of the call as a
constant, and moves it to the register of a ``syscall`` instruction, or to that of the first
argument of syscall(3); also those that try /dev/userfaultfd first. Of 10 GiB of a distribution's
programs, six files have such code by accident (parts of a compiler, mostly): they are frozen for
longer, as all of their memory is read then.

Not seen is a call whose number is made at run time (by ctypes, say), and one in code that was not
mapped from a file or is mapped only after the look.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress

from .mappings import Mapping, each_mapping
from .procfs import open_entry
from .syscalls import userfaultfd_number

_NEAR = 48  # bytes around the constant
_SYSCALL = b"\x0f\x05"
_CALLS = (b"\xe8", b"\xff\x15", b"\xff\x25", b"\xe9")  # call, call through memory, jumps
_TO_RESULT = (b"\xb8", b"\x48\xc7\xc0")  # mov to eax, rax
_TO_ARGUMENT = (b"\xbf", b"\x48\xc7\xc7")  # mov to edi, rdi
_NO_VECTORS = (b"\x31\xc0", b"\xb8\0\0\0\0", b"\x30\xc0")  # al = 0: syscall(3) is variadic
_PIECE = 4 << 20

File = tuple[int, int, int]  # device, inode, offset


def code_of(pid: int) -> int:
    """Return a number for the files that a process maps as code, the same in every process."""
    return hash(tuple(sorted({_file(mapping) for mapping in _code(pid)})))  # of numbers alone


def may_ask(pid: int, seen: dict[File, bool]) -> bool:
    """Return whether the code of a process can ask for a userfaultfd.

    `seen`: what is known of files already; it is completed.
    """
    memory = -1
    try:
        for mapping in _code(pid):
            if _file(mapping) not in seen:
                if memory < 0:
                    memory = open_entry(pid, "mem", os.O_RDONLY)
                seen[_file(mapping)] = any(map(_asks, _pieces(memory, mapping)))
            if seen[_file(mapping)]:
                return True
    finally:
        if memory >= 0:
            os.close(memory)
    return False


def _file(mapping: Mapping) -> File:
    return mapping.device, mapping.inode, mapping.offset


def _code(pid: int) -> Iterator[Mapping]:
    return (m for m in each_mapping(pid) if m.inode and m.perms[2] == "x")


def _pieces(memory: int, mapping: Mapping) -> Iterator[bytes]:
    """Yield the bytes of a mapping in pieces that overlap, as far as they can be read."""
    for start in range(mapping.start, mapping.end, _PIECE):
        with suppress(OSError):  # past the end of the file
            yield os.pread(memory, min(_PIECE + 2 * _NEAR, mapping.end - start), start)


def _asks(code: bytes) -> bool:
    """Return whether these instructions make the call."""
    constant = struct.pack("<I", userfaultfd_number())
    at = code.find(constant)
    while at >= 0:
        before, after = code[max(0, at - _NEAR) : at], code[at + 4 : at + 4 + _NEAR]
        if before.endswith(_TO_RESULT) and _SYSCALL in after:
            return True
        if before.endswith(_TO_ARGUMENT) and any(call in after for call in _CALLS):
            if any(clear in before or clear in after for clear in _NO_VECTORS):
                return True
        at = code.find(constant, at + 1)
    return False
