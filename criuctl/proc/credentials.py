"""The credentials by which the kernel judges what a process may open."""

from __future__ import annotations

import os

from msgspec import Struct

from .procfs import read_status, reading

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


class Credentials(Struct, frozen=True):
    """User, groups and effective capabilities of a process, in the initial user namespace."""

    uid: int  # that of file access (fsuid)
    gid: int
    groups: frozenset[int] = frozenset()  # the supplementary ones
    capabilities: int = 0  # a mask; none where the process is in a user namespace of its own

    @property
    def all_groups(self) -> frozenset[int]:
        """Those that count for file access."""
        return self.groups | {self.gid}

    def has(self, capability: int) -> bool:
        """Whether it is effective."""
        return bool(self.capabilities >> capability & 1)


def credentials_of(pid: int) -> Credentials:
    """Those of a process or thread; `NoSuchProcess`, `PreflightRefused`."""
    status = read_status(pid)
    with reading(pid):
        same = os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user"))
    return Credentials(
        uid=int(status["Uid"].split()[3]),
        gid=int(status["Gid"].split()[3]),
        groups=frozenset(map(int, status["Groups"].split())),
        capabilities=int(status["CapEff"], 16) if same else 0,
    )
