"""Check that criuctl's own folders and files can be changed only by root or the user that runs it.

A folder with a name that can be guessed (below /dev/shm, /tmp, or where a configuration says) may
have been made by a user who waits for root to write or delete in it. A configuration file says
which programs criuctl starts, so a user who can change it has criuctl's rights. Both are checked
with `criuctl.proc.trustedpath`: all components of the path must be trusted. What is below such a
folder was then made by criuctl, and no other user can put a link there, so its names can be used as
they are.

Trusted are root and the effective user; for an ordinary user also the user's private group, if it
has no other members. In a user namespace also ids that it does not know: root itself, which owns
the host's folders, is one of them there, and no process inside can be another.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UntrustedPath
from .trustedpath import Fault, Place, opened

_NULL = os.makedev(1, 3)  # /dev/null
_ALL_IDS = 0xFFFFFFFF
# A path that a shell gives a command for an open file; it is the caller's, whatever it is.
_DESCRIPTOR = re.compile(r"/(dev|proc/self)/fd/[0-9]+|/dev/stdin")


@functools.cache
def trustees() -> frozenset[int]:
    """Return the user ids whose files criuctl trusts."""
    own = {0, os.geteuid()}
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    if sum(int(line.split()[2]) for line in lines) < _ALL_IDS:
        own.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(own)


@functools.cache
def trusted_groups() -> frozenset[int]:
    """Return the private group of an ordinary user, whose files are often writable for it."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return frozenset()
    alone = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return frozenset({user.pw_gid} if user.pw_uid and alone else ())


def check_own(folder: str | Path) -> None:
    """Refuse a folder that another user made, can change or can replace: `UntrustedPath`.

    A folder that is missing or cannot be reached passes: using it then fails.
    """
    _check(os.path.abspath(folder), sticky=False)


def check_place(folder: str | Path) -> None:
    """Refuse a place where another user could interfere with a folder that is about to be made.

    The nearest folder that exists may be sticky: all users have folders in it.
    """
    path = os.path.abspath(folder)
    if os.path.lexists(path):
        return _check(path, sticky=False)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return _check(path, sticky=True)


def _check(path: str, *, sticky: bool) -> None:
    try:
        with opened(path, trusted=trustees(), groups=trusted_groups()) as place:
            fault = place.fault
            if sticky and place.status.st_mode & stat.S_ISVTX and place.status.st_uid in trustees():
                fault = place.way_fault
    except UntrustedPath as error:
        raise _unused(path, error.message, error.hint) from None
    except OSError:
        return
    if fault is not None:
        raise _unused(path, fault.reason, _remedy(fault))


def _unused(path: str, reason: str, hint: str) -> UntrustedPath:
    return UntrustedPath(f"{path} is not used: {reason}", hint=hint, path=path)


def _remedy(fault: Fault) -> str:
    if fault.remedy:
        return f"Examine it; to use it: `{fault.remedy}`. Or configure another one."
    return "Examine it, and remove it or configure another one."


@contextmanager
def opened_own(path: str | Path) -> Iterator[int]:
    """Yield a descriptor of a file that decides what criuctl does; `UntrustedPath`, `OSError`.

    It is a regular file, or /dev/null. A file that the caller's shell has opened is taken as it is.
    """
    whole = os.path.abspath(path)
    if _DESCRIPTOR.fullmatch(str(path)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    else:
        ours = trustees()
        groups = trusted_groups()
        with opened(whole, trusted=ours, groups=groups, sticky_files=True) as place:
            if (fault := _fault(place)) is not None:
                raise UntrustedPath(
                    f"{path} is not read: {fault.reason}",
                    hint=f"`{fault.remedy}`" if fault.remedy else "",
                    path=whole,
                    component=fault.component,
                )
            mode = place.status.st_mode
            null = stat.S_ISCHR(mode) and place.status.st_rdev == _NULL
            if not (stat.S_ISREG(mode) or null):
                raise OSError(errno.EINVAL, "it is no regular file")
            fd = os.open(place.magic, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        yield fd
    finally:
        os.close(fd)


def _fault(place: Place) -> Fault | None:
    """Return the fault of a file; a device is trusted, whichever users may write to it."""
    device = stat.S_ISCHR(place.status.st_mode)
    return place.way_fault if device else place.fault
