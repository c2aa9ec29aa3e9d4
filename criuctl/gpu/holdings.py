"""Sort processes that hold an NVIDIA device by what a dump must do with them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from .helper import CHECKPOINTED, FAILED, LOCKED, RUNNING
from .use import DeviceUser

NO_CONTEXT = -1  # the driver does not know the process
SILENT = -2  # the process did not answer: it does not run


class Holdings(Struct, frozen=True):
    """The processes of a tree that hold devices, sorted."""

    contexts: tuple[DeviceUser, ...] = ()  # locked and checkpointed
    inherited: tuple[DeviceUser, ...] = ()  # forked by one of those: their devices are of no use
    idle: tuple[DeviceUser, ...] = ()  # have a device open and do not use it
    others: tuple[DeviceUser, ...] = ()  # use it by other means than CUDA: cannot be dumped
    silent: tuple[DeviceUser, ...] = ()  # do not run
    left: tuple[DeviceUser, ...] = ()  # were locked by another program
    failed: tuple[DeviceUser, ...] = ()  # an earlier checkpoint by the driver has failed


def sort(
    users: Mapping[int, DeviceUser], states: Mapping[int, int], parents: Mapping[int, int]
) -> Holdings:
    """Sort `users`.

    `states`: PID -> the driver's state, NO_CONTEXT or SILENT; `parents`: PID -> parent, of the
    tree.
    """
    kinds: dict[str, list[DeviceUser]] = {name: [] for name in Holdings.__struct_fields__}
    with_context = {pid for pid in users if states[pid] >= RUNNING}
    for pid, user in users.items():
        kinds[_kind(user, states[pid], with_context, parents)].append(user)
    return Holdings(**{name: tuple(found) for name, found in kinds.items()})


def _kind(user: DeviceUser, state: int, with_context: set[int], parents: Mapping[int, int]) -> str:
    if state == NO_CONTEXT:
        if any(pid in with_context for pid in _ancestors(user.pid, parents)):
            return "inherited"
        return "others" if user.mapped else "idle"
    known = {SILENT: "silent", RUNNING: "contexts", FAILED: "failed"}
    return known.get(state, "left" if state in (LOCKED, CHECKPOINTED) else "failed")


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) in parents:
        yield pid
