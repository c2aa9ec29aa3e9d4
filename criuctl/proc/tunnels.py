"""Open files of ``/dev/net/tun``: the net namespace of each one's network interface."""

from __future__ import annotations

import fcntl
import os

from .procfs import reading
from .syscalls import pidfd_getfd

DEVICE = os.makedev(10, 200)
_SIOCGSKNS = 0x894C


def net_namespace(pid: int, fd: int) -> int:
    """Return the inode of the net namespace of that descriptor; `OSError`, `NoSuchProcess`."""
    with reading(pid):
        pidfd = os.pidfd_open(pid)
    try:
        tunnel = pidfd_getfd(pidfd, fd)
    finally:
        os.close(pidfd)
    try:
        namespace = fcntl.ioctl(tunnel, _SIOCGSKNS)
    finally:
        os.close(tunnel)
    try:
        return os.fstat(namespace).st_ino
    finally:
        os.close(namespace)
