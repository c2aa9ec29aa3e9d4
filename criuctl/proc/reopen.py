"""Changing what a process holds, by system calls that it runs itself (`criuctl.proc.inject`).

For what cannot be handed to it in another way: a descriptor is opened anew under its number, or
taken over from another process; a mapping is taken away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from . import inject

_BELOW_STACK = 8192  # below the red zone, well inside the stack's mapping
_ALIGN = 16


def reopen(
    pid: int, path: str, flags: int, fds: Iterable[tuple[int, bool]], position: int = 0
) -> None:
    """Have `pid` open `path` with the credentials that it has now, go to `position` and put it
    under each number of `fds` (with close-on-exec or without).

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
                if position:
                    _checked(run(inject.LSEEK, new, position, os.SEEK_SET), path)
                _put(run, new, fds)
        finally:
            inject.write_memory(pid, address, saved)


def take_over(pid: int, other: int, fd: int, fds: Iterable[tuple[int, bool]]) -> None:
    """Have `pid` take the open file that process `other`, as `pid` numbers it, has as `fd`, and put
    it under each number of `fds`.
    """
    with inject.stopped(pid), inject.calling(pid) as run:
        handle = _checked(run(inject.PIDFD_OPEN, other, 0), f"PID {other}")
        new = _checked(run(inject.PIDFD_GETFD, handle, fd, 0), f"fd {fd}")
        run(inject.CLOSE, handle)
        _put(run, new, fds)


def _put(run: Callable[..., int], new: int, fds: Iterable[tuple[int, bool]]) -> None:
    for fd, cloexec in fds:
        _checked(run(inject.DUP3, new, fd, os.O_CLOEXEC if cloexec else 0), f"fd {fd}")
    run(inject.CLOSE, new)


def unmap(pid: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Have `pid` unmap these ranges, (start, end) each."""
    with inject.stopped(pid), inject.calling(pid) as run:
        for start, end in ranges:
            _checked(run(inject.MUNMAP, start, end - start), f"{start:x}-{end:x}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)
    return result
