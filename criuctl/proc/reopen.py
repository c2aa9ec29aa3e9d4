"""Changing what a process holds, by system calls that it runs itself (`criuctl.proc.inject`).

For what another program's file cannot be handed to it in another way: a descriptor is opened anew
under its number, a mapping is taken away.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import inject

_BELOW_STACK = 8192  # below the red zone, well inside the stack's mapping
_ALIGN = 16


def reopen(pid: int, path: str, flags: int, fds: Iterable[tuple[int, bool]]) -> None:
    """Have `pid` open `path` with its own credentials and put it under each number of `fds` (with close-on-exec or without).

    What was open there is closed.  `OSError` says what the process was answered.
    """
    name = os.fsencode(path) + b"\0"
    with inject.stopped(pid):
        address = (inject.stack_pointer(pid) - _BELOW_STACK) & -_ALIGN
        saved = inject.read_memory(pid, address, len(name))
        inject.write_memory(pid, address, name)
        try:
            with inject.calling(pid) as run:
                new = _checked(run(inject.OPEN, address, flags | os.O_CLOEXEC, 0), path)
                for fd, cloexec in fds:
                    _checked(run(inject.DUP3, new, fd, os.O_CLOEXEC if cloexec else 0), f"fd {fd}")
                run(inject.CLOSE, new)
        finally:
            inject.write_memory(pid, address, saved)


def unmap(pid: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Have `pid` unmap these ranges, (start, end) each."""
    with inject.stopped(pid), inject.calling(pid) as run:
        for start, end in ranges:
            _checked(run(inject.MUNMAP, start, end - start), f"{start:x}-{end:x}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)
    return result
