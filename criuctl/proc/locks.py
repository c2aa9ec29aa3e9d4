"""Locks between the criuctl processes of a host: locked files (flock) in a private folder.

The process that has locked the file at a path holds the lock of that path. The kernel frees the
lock when the last process with its descriptor ends, also by ``kill -9``: a forked process has the
descriptor, one that executes a program does not. Other users cannot reach it, and every net
namespace sees the same files.

The file is removed with the lock. A killed process leaves it empty and unlocked: the next one takes
it over, and `sweep` removes it. Only the process that has locked a file removes it, and after
locking it checks that the path still leads to that file. So two processes never hold the same lock.
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

# seconds: a process that checks whether a file is locked has it for a moment
_TRIES, _PAUSE = 25, 0.002


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold this lock inside the block.

    `BlockingIOError` if another process has it, another `OSError` if it cannot be taken at all.
    """
    _make(path.parent)
    file = _take(path)
    try:
        yield
    finally:
        file.close()
        _remove(path)  # unless a forked process still has the lock


def holder(path: Path) -> int:
    """Return the PID of the process that took this lock.

    0 if it has ended, or is not visible from here.
    """
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
    """Remove the files that killed processes have left in the folder."""
    for path in left(folder):
        with suppress(OSError):
            path.unlink()


def left(folder: Path) -> Iterator[Path]:
    """Yield the files that killed processes have left in the folder.

    Each is locked while the caller looks at it; the caller removes it or leaves it there.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            path = folder / name
            with suppress(OSError), _open(path) as file:
                if _locks(file, path):
                    yield path


def _make(folder: Path) -> None:
    # other users may look into this folder, whatever the umask is
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
    raise BlockingIOError(errno.EWOULDBLOCK, "another process holds this lock", str(path))


def _remove(path: Path) -> None:
    with suppress(OSError), _open(path) as file:
        if _locks(file, path):
            path.unlink()


def _open(path: Path, flags: int = 0) -> IO[bytes]:
    return open(
        os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b", buffering=0
    )


def _locks(file: IO[bytes], path: Path) -> bool:
    """Lock `file`; return whether that worked and `path` still leads to it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
