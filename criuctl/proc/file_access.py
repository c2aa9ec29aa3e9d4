"""Whether a process could open a file itself, judged as the kernel does.

Root opens paths of a tree's files for it (`trustedpath`). What it opens is handed to a process only
if that process could have opened it: by owner, groups, ACL and capabilities. Security modules are
not asked.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Collection

from .credentials import CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, Credentials
from .trustedpath import Component

_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP, _ACL_MASK = 0x02, 0x04, 0x08, 0x10


def may_open(credentials: Credentials, components: Collection[Component], access: int) -> bool:
    """Return whether the owner of `credentials` could open the last of `components` itself.

    `access`: os.R_OK, W_OK and X_OK bits. `components`: everything on the way (`Place.walked`).
    Judged as the kernel does without security modules: the right to search each folder, then the
    rights to the file, by owner, ACL, groups and the capabilities of the initial user namespace.
    """
    *way, last = components
    needed = [(one, os.X_OK) for one in way if stat.S_ISDIR(one.mode)] + [(last, access)]
    return all(_allowed(credentials, one, wanted) for one, wanted in needed)


def access_of(flags: int) -> int:
    """Return the access that open(2) with these flags needs, as os.R_OK and os.W_OK bits.

    O_PATH needs none.
    """
    if flags & os.O_PATH:
        return 0
    both = os.R_OK | os.W_OK
    wanted = {os.O_RDONLY: os.R_OK, os.O_WRONLY: os.W_OK}.get(flags & os.O_ACCMODE, both)
    return wanted | (os.W_OK if flags & os.O_TRUNC else 0)


def _allowed(credentials: Credentials, one: Component, access: int) -> bool:
    if any(access & ~permission == 0 for permission in _permissions(credentials, one)):
        return True
    if credentials.has(CAP_DAC_OVERRIDE):
        return bool(stat.S_ISDIR(one.mode) or not access & os.X_OK or one.mode & 0o111)
    only_reads = not access & os.W_OK and (stat.S_ISDIR(one.mode) or not access & os.X_OK)
    return only_reads and credentials.has(CAP_DAC_READ_SEARCH)


def _permissions(credentials: Credentials, one: Component) -> list[int]:
    """Return the rwx bits of each entry that applies.

    The kernel grants the access if one entry allows all of it.
    """
    mode, status = one.mode, one.status
    if status.st_uid == credentials.uid:
        return [mode >> 6 & 7]
    if not one.acl:
        return [mode >> 3 & 7] if status.st_gid in credentials.all_groups else [mode & 7]
    entries = list(struct.iter_unpack("<HHI", one.acl[4:]))
    mask = next((permission for tag, permission, _ in entries if tag == _ACL_MASK), 7)
    for tag, permission, who in entries:
        if tag == _ACL_USER and who == credentials.uid:
            return [permission & mask]
    matching = [
        permission & mask
        for tag, permission, who in entries
        if (tag == _ACL_GROUP_OBJ and status.st_gid in credentials.all_groups)
        or (tag == _ACL_GROUP and who in credentials.all_groups)
    ]
    return matching or [mode & 7]
