"""Check System V semaphores and message queues of the host's IPC namespace.

CRIU saves them only together with a namespace.  The kernel does not list their users, only the last
one.  (Attached segments of shared memory are mappings: `memory`.)
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress

from ...proc.procfs import read_raw, text_lines
from ...proc.syscalls import semaphore_user
from ...report import Finding
from .scene import Scene

_HINT = "Start the program in a private IPC namespace: `unshare --ipc setsid ...`."
_ASKED = 4096  # semaphores of each set whose last user is asked for


def check_sysv(scene: Scene) -> Iterator[Finding]:
    """Report those whose last user is a process of the tree."""
    if scene.foreign("ipc"):
        return
    used = [*_semaphores(scene.by_pid), *_queues(scene.by_pid)]
    if used:
        what, pid = used[0]
        more = f" (and {len(used) - 1} more such)" if used[1:] else ""
        yield Finding(
            "warning",
            "sysv-ipc",
            f"{scene.by_pid[pid]} uses {what} of the host's IPC namespace{more}: no checkpoint "
            "holds it, a copy uses the same one as its original, and it is gone when the host "
            "starts again",
            _HINT,
            pid=pid,
        )


def _semaphores(pids: Container[int]) -> Iterator[tuple[str, int]]:
    left = _ASKED
    for row in _rows("sem"):
        number, count = int(row["semid"]), int(row["nsems"])
        with suppress(OSError):  # removed meanwhile
            for place in range(min(count, left)):
                if (pid := semaphore_user(number, place)) in pids:
                    yield f"the System V semaphores {number}", pid
                    break
        left = max(left - count, 0)


def _queues(pids: Container[int]) -> Iterator[tuple[str, int]]:
    for row in _rows("msg"):
        users = (int(row["lspid"]), int(row["lrpid"]))
        if (pid := next((pid for pid in users if pid in pids), 0)) != 0:
            yield f"the System V message queue {row['msqid']}", pid


def _rows(name: str) -> Iterator[dict[str, str]]:
    """Return the lines of a table of /proc/sysvipc; a kernel without System V has none."""
    with suppress(OSError):
        head, *lines = text_lines(read_raw(f"/proc/sysvipc/{name}").decode())
        names = head.split()
        for line in lines:
            yield dict(zip(names, line.split(), strict=False))
