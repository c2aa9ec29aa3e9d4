"""The environment of this process, which every process of its user can read in /proc."""

from __future__ import annotations

import ctypes
import os

from .procfs import read_text

_SECRETS = ("AWS_", "CRIUCTL_PASSPHRASE", "CRIUCTL_RECOVERY_KEY")


def forget_secrets() -> None:
    """Remove criuctl's secrets from this process's environment, for a process that goes on alone.

    ``/proc/PID/environ`` shows the memory that the kernel filled at the start, which no unsetenv
    changes: it is overwritten. Call it while there is one thread.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    os.environ.clear()
    fields = read_text(os.getpid(), "stat").rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # env_start and env_end
    ctypes.memset(begin, 0, end - begin)
    os.environ.update(kept)
