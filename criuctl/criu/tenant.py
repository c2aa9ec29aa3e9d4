"""What the processes of a checkpoint may be that is made, and restored, for an ordinary user.

The images say what CRIU will make: the user and groups of every thread, and its capabilities. A
tree that serves one user must hold nothing more than that user is: a set-uid program in it would
come back with root's rights, which the user only had through that program. So a dump for a tenant
is refused while such a program runs, and a restore makes nothing of images that hold one, whatever
the store says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from .images import ImageSet, read

_IDS = ("uid", "euid", "suid", "fsuid")
_GROUPS = ("gid", "egid", "sgid", "fsgid")
_CAPABILITIES = ("cap_inh", "cap_prm", "cap_eff", "cap_amb")


class Tenant(Struct, frozen=True):
    """An ordinary user, and the groups that a process of that user may have."""

    uid: int
    groups: frozenset[int]


def objections(images: ImageSet, tenant: Tenant) -> Iterator[str]:
    """Yield what processes of the images are, or have, that the tenant does not; PIDs are the
    tree's own.
    """
    names = set(images.names())
    if any(re.fullmatch(r"userns-\d+\.img", name) for name in names):
        yield "the tree is in a user namespace of its own"
    for entry in read(images.folder, "pstree.img", "PSTREE"):
        if f"mm-{entry.pid}.img" not in names:
            continue  # it has ended, and was not waited for
        for thread in entry.threads:
            core = read(images.folder, f"core-{thread}.img", "CORE")[0].thread_core
            for objection in _of_creds(core.creds, tenant):
                yield f"PID {entry.pid}{f' (thread {thread})' * (thread != entry.pid)} {objection}"


def _of_creds(creds: Any, tenant: Tenant) -> Iterator[str]:
    users = {getattr(creds, name) for name in _IDS} - {tenant.uid}
    if users:
        yield f"is also user {', '.join(map(str, sorted(users)))}"
    groups = {getattr(creds, name) for name in _GROUPS} | set(creds.groups)
    if more := groups - tenant.groups:
        yield f"is in group {', '.join(map(str, sorted(more)))}, in which its user is not"
    if any(word for name in _CAPABILITIES for word in getattr(creds, name)):
        yield "has capabilities"
