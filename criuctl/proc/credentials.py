"""The credentials by which the kernel judges what a process may open."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .procfs import read_status, reading

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_MKNOD = 1, 2, 27
_ALL_FILES = (CAP_DAC_OVERRIDE, 19, 21)  # and CAP_SYS_PTRACE, CAP_SYS_ADMIN


class Credentials(NamedTuple):
    """User, groups and effective capabilities of a process, in the initial user namespace."""

    uid: int  # the user id of file access (fsuid)
    gid: int
    groups: frozenset[int] = frozenset()  # the supplementary groups
    capabilities: int = 0  # a bit mask; 0 if the process is in its own user namespace

    @property
    def all_groups(self) -> frozenset[int]:
        """All groups that count for file access."""
        return self.groups | {self.gid}

    @property
    def opens_all(self) -> bool:
        """Whether the kernel's checks refuse it no file that CRIU can open."""
        return self.uid == 0 and all(map(self.has, _ALL_FILES))

    def has(self, capability: int) -> bool:
        """Return whether the capability is effective."""
        return bool(self.capabilities >> capability & 1)


def credentials_of(pid: int) -> Credentials:
    """Return the credentials of a process or thread; `NoSuchProcess`, `PreflightRefused`."""
    status = read_status(pid)
    with reading(pid):
        same = os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user"))
    return Credentials(
        uid=int(status["Uid"].split()[3]),
        gid=int(status["Gid"].split()[3]),
        groups=frozenset(map(int, status["Groups"].split())),
        capabilities=int(status["CapEff"], 16) if same else 0,
    )


# setgroups, setresgid, setresuid. The C library's functions would change all threads of this
# process.
_NUMBERS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def acting_as(user: Credentials | None) -> Iterator[None]:
    """Give this thread the user and groups of `user`, and no capabilities, inside the block.

    None changes nothing. The kernel then judges what the thread opens and connects to as that
    user's, and reports that user to peers (SO_PEERCRED). `OSError` if it may not change.
    """
    if user is None or user.uid == os.geteuid():
        yield
        return
    if (numbers := _NUMBERS.get(platform.machine())) is None:
        raise OSError(errno.ENOSYS, "acting as another user is only supported on x86-64 and arm64")
    set_groups, set_gid, set_uid = numbers
    uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
    _groups(set_groups, sorted(user.groups))
    try:
        _call(set_gid, -1, user.gid, -1)
        try:
            _call(set_uid, -1, user.uid, -1)
            try:
                yield
            finally:
                _call(set_uid, -1, uid, -1)
        finally:
            _call(set_gid, -1, gid, -1)
    finally:
        _groups(set_groups, groups)


def _groups(number: int, groups: Sequence[int]) -> None:
    packed = struct.pack(f"={len(groups)}I", *groups)
    _call(number, len(groups), ctypes.c_char_p(packed))


def _call(number: int, *arguments: object) -> None:
    if _LIBC.syscall(number, *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
