"""Change what a process holds, by system calls that it runs itself (`criuctl.proc.inject`).

For what cannot be passed to it in another way: a descriptor is opened again under its number, or
taken over from another process; a mapping is removed; a session keyring is left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from . import inject
from .procfs import read_memory

_BELOW_STACK = 8192  # below the red zone, well inside the stack's mapping
_ALIGN = 16
_JOIN_SESSION_KEYRING = 1  # of keyctl(2)


def reopen(
    pid: int, path: str, flags: int, fds: Iterable[tuple[int, bool]], position: int = 0
) -> None:
    """Make `pid` open `path` and put it under each number of `fds`.

    It opens with its present credentials, seeks to `position`, and sets close-on-exec as `fds`
    says. What was open there is closed. `OSError` is the process's own error.
    """
    name = os.fsencode(path) + b"\0"
    with inject.stopped(pid):
        address = (inject.stack_pointer(pid) - _BELOW_STACK) & -_ALIGN
        saved = read_memory(pid, address, len(name))
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
    """Make `pid` duplicate descriptor `fd` of the process `other` under each number of `fds`.

    `other`: its PID in the PID namespace of `pid`.
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
    """Make `pid` unmap these ranges, (start, end) each."""
    with inject.stopped(pid), inject.calling(pid) as run:
        for start, end in ranges:
            _checked(run(inject.MUNMAP, start, end - start), f"{start:x}-{end:x}")


def join_empty_keyring(pid: int) -> None:
    """Make `pid` join a new session keyring, which processes that it forks then have, too.

    `OSError`; on a kernel without keys nothing is done.
    """
    with inject.stopped(pid):
        result = inject.call(pid, inject.KEYCTL, _JOIN_SESSION_KEYRING, 0)
    if result != -errno.ENOSYS:
        _checked(result, f"session keyring of PID {pid}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)
    return result
