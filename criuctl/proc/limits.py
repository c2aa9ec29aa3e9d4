"""Limits and rights of this process."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CAP_SYS_RESOURCE = 24
_RESERVED = 256  # descriptors that other code may need


@contextmanager
def room_for_descriptors(count: int) -> Iterator[None]:
    """Permit opening `count` more descriptors inside the block, as far as the hard limit allows.

    Only inside it: started programs inherit the limit, and some of them depend on it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield
        return
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def free_descriptors() -> int:
    """Return how many descriptors may be opened now, without those that other code may need."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(0, soft - len(os.listdir("/proc/self/fd")) - _RESERVED)


def effective_capabilities() -> int:
    """Return the effective capabilities as a bit mask."""
    return int(_status("CapEff:"), 16)


def is_filtered() -> bool:
    """Return whether a seccomp filter restricts this process, and with it each CRIU it starts.

    The kernel refuses PTRACE_O_SUSPEND_SECCOMP to such a tracer, whatever the filter allows; CRIU
    needs it for each process that has a filter itself, in a dump and in a restore.
    """
    return _status("Seccomp:", "0") != "0"


def _status(key: str, default: str = "") -> str:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((line.split()[1] for line in file if line.startswith(key)), default)
