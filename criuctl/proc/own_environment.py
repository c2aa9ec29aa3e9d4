"""The environment of this process, which every process of its user can read in /proc."""

from __future__ import annotations

import ctypes
import os

from .procfs import read_text

_SECRETS = ("AWS_", "CRIUCTL_PASSPHRASE", "CRIUCTL_RECOVERY_KEY")


def forget_secrets() -> None:
    """Remove criuctl's secrets from this process's environment, for a process that goes on alone.

    ``/proc/PID/environ`` shows the memory that the kernel filled at the start, which no unsetenv
    changes: they are overwritten there.
    """
    for name in [name for name in os.environ if name.startswith(_SECRETS)]:
        del os.environ[name]
    fields = read_text(os.getpid(), "stat").rpartition(")")[2].split()
    address, end = int(fields[47]), int(fields[48])  # env_start and env_end
    for variable in ctypes.string_at(address, end - address).split(b"\0"):
        if os.fsdecode(variable).startswith(_SECRETS):
            ctypes.memset(address, 0, len(variable))
        address += len(variable) + 1
