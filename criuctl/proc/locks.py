"""Locks between the criuctl of a host: files that are locked (flock), in a folder that only their
owner can look into.

Who has locked the file that a path leads to holds the lock of that path.  The kernel frees it with
the last process that has its descriptor, ``kill -9`` included: one that was forked off has it, one
that executes a program has not.  Another user cannot come near it, and every net namespace sees the
same.

The file goes with the lock.  A process that was killed leaves it, empty and locked by nobody: the
next one takes it over, and `sweep` removes it.  Only who has locked a file removes it, and who has
locked one makes sure that the path still leads to it, so there are never two who hold the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from .folders import make_private

_TRIES, _PAUSE = 25, 0.002  # seconds: who looks whether a file is still locked has it for a moment


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold this lock; `BlockingIOError` when somebody has it, another `OSError` when it cannot be
    had at all.
    """
    _make(path.parent)
    file = _take(path)
    try:
        yield
    finally:
        file.close()
        _remove(path)  # unless a process that was forked off has it still


def holder(path: Path) -> int:
    """The PID of who has taken this lock; 0 if that one has ended, or cannot be seen from here."""
    try:
        status = os.stat(path)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = [
        int(words[4])
        for words in map(str.split, lines)
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == file
    ]
    return next((pid for pid in pids if pid > 0), 0)


def sweep(folder: Path) -> None:
    """Remove what killed processes have left there."""
    for path in left(folder):
        with suppress(OSError):
            path.unlink()


def left(folder: Path) -> Iterator[Path]:
    """What killed processes have left there; each is locked while the caller looks at it, who
    removes it or leaves it there.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            path = folder / name
            with suppress(OSError), _open(path) as file:
                if _locks(file, path):
                    yield path


def _make(folder: Path) -> None:
    # in which others have something to look for, whatever the umask is
    if not folder.parent.exists():
        make_private(folder.parent)
        folder.parent.chmod(0o755)
    make_private(folder)


def _take(path: Path) -> IO[bytes]:
    for _ in range(_TRIES):
        with ExitStack() as stack:
            file = stack.enter_context(_open(path, os.O_CREAT))
            if _locks(file, path):
                stack.pop_all()
                return file
        time.sleep(_PAUSE)
    raise BlockingIOError(errno.EWOULDBLOCK, "somebody holds this lock", str(path))


def _remove(path: Path) -> None:
    with suppress(OSError), _open(path) as file:
        if _locks(file, path):
            path.unlink()


def _open(path: Path, flags: int = 0) -> IO[bytes]:
    return open(
        os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b", buffering=0
    )


def _locks(file: IO[bytes], path: Path) -> bool:
    """Whether `file` could be locked, and is what `path` leads to."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
