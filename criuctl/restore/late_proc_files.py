"""Files of /proc that the processes of a restored tree open themselves, because CRIU cannot.

A file about a thread, or about a descriptor, exists only when CRIU has made all of them.  Then the
process that had the file open opens it again, by the same path and under the same number, before it
has run, so that it never sees what CRIU has put there meanwhile (`criuctl.criu.procfiles`).  Other
processes that shared the open file get it from that process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ..criu.procfiles import LateFile
from ..errors import CriuctlError, RestoreFailed
from ..proc.reopen import reopen, take_over

# flags that the kernel does not report for an open file
_ONLY_NEW = os.O_CREAT | os.O_EXCL | os.O_TRUNC


def open_late(files: Iterable[LateFile], pids: Mapping[int, int]) -> None:
    """Have each file opened; `pids`: PID in the tree -> PID on this host.  `RestoreFailed`."""
    for file in files:
        first, fd, _ = file.holders[0]
        try:
            for pid in dict.fromkeys(pid for pid, _, _ in file.holders):
                fds = [(number, cloexec) for of, number, cloexec in file.holders if of == pid]
                if pid == first:
                    flags = file.flags & ~_ONLY_NEW | os.O_NOCTTY
                    reopen(pids[pid], file.path, flags, fds, file.position)
                else:
                    take_over(pids[pid], first, fd, fds)
        except (OSError, KeyError, CriuctlError) as error:
            text = f"{file.path} cannot be opened again: {error}"
            raise RestoreFailed(
                text, hint="Have the program close it before the next dump.", pid=first, fd=fd
            ) from error
