"""The restore of a group checkpoint: all members, with the connections among them, or none.

Each member is restored by itself, in a process of its own, and they proceed together
(`linked.meeting`):

1. ``placed``: CRIU has made every member, and none has run an instruction. Both ends of each
   connection exist, so CRIU may unlock them. Each is shown the others' unix sockets where these had
   to get names of their own.
2. ``running``: CRIU is done with every member. From here on they are let go; nothing that can
   usually fail is left. The decision is made for all at once, so that no member runs alone, even
   if the coordinator is killed between two of them.

A failure before that leaves nothing of any. If the last steps fail for one after all, those that
run already are ended.

TCP connections among the members are restored by CRIU, one end in each tree, in one network
(`linked.networks`). For each unix connection a pair of sockets is made here
(`criuctl.restore.linked_sockets`).
"""

from __future__ import annotations

import mmap
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.groups import GroupCheckpoint
from ..checkpoint.manifest import Manifest
from ..config import Config
from ..errors import Conflict, CriuctlError, RestoreFailed
from ..host.group_member import RestoredMember
from ..host.registry import Registry, check_outside
from ..report import Reporter
from ..restore import outcome
from ..restore.outcome import RestoreResult
from ..restore.partners import Partners
from ..restore.request import RestoreRequest
from ..restore.story import restore
from . import acting
from .groups import described
from .inspect import opened
from .kill import kill
from .linked import networks
from .linked.meeting import Answers, Facts, Together
from .scheduling import batch

_LEAST_MIB = 32  # of buffers for each member
_TYPES = {"stream": socket.SOCK_STREAM, "seqpacket": socket.SOCK_SEQPACKET}

Sockets = Mapping[str, Mapping[int, tuple[int, int]]]
"""By session: inode at the dump -> descriptor of its end, descriptor of the other end."""

RestoreOne = Callable[[Manifest, RestoredMember, str, Reporter], Facts]
"""Restore one member: its checkpoint, its end of the meeting, the network that it is to share (path
of a net namespace, or ""), its reporter.
"""


class GroupRestored(Struct, frozen=True):
    """A group that runs again."""

    checkpoint: GroupCheckpoint
    members: list[dict[str, Any]]  # the JSON of each restore
    elapsed_ms: float
    degraded: bool = False
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``restore --group``."""
        made = described(self.checkpoint)
        del made["members"]
        more = {"elapsed_ms": self.elapsed_ms, "warnings": self.warnings}
        return {**made, "members": self.members, **more}


def restore_group(
    config: Config, ref: str, *, request: RestoreRequest, reporter: Reporter
) -> GroupRestored:
    """Restore all members of the group checkpoint ``GROUP`` or ``GROUP@N``.

    `request` holds for each of them. Raise `Conflict` if one runs, and the error of the first
    member that failed: then none runs.
    """
    began = time.monotonic()
    check_outside(config, begins=True)
    with opened(config) as (_, repository):
        found = repository.groups.resolve(ref)
        manifests = {m.session: repository.manifest_at(m.object) for m in found.members}
    config = shared_buffers(config, len(manifests))

    def one(manifest: Manifest, member: RestoredMember, network: str, reporter: Reporter) -> Facts:
        asked = replace(request, group=found.group, network=network)
        partners = Partners(group=member)
        made = restore(config, manifest.id, request=asked, reporter=reporter, partners=partners)
        assert isinstance(made, RestoreResult)
        return {"result": made.to_dict(), "degraded": made.degraded}

    names = {name: name for name in manifests}
    outcomes = restored(config, found.group, manifests, names, one, reporter, copy=False)
    results = [made.answer or {} for made in outcomes.values()]
    reporter.step("group-done")
    return GroupRestored(
        found,
        [result["result"] for result in results],
        round((time.monotonic() - began) * 1000, 1),
        any(result["degraded"] for result in results),
        list(reporter.warnings),
    )


def shared_buffers(config: Config, members: int) -> Config:
    """Return the configuration of each of so many members that are restored at once."""
    share = max(_LEAST_MIB, config.buffers_mib // members)
    return replace(config, buffers_mib=min(config.buffers_mib, share))


def restored(
    config: Config,
    group: str,
    manifests: Mapping[str, Manifest],
    names: Mapping[str, str],
    one: RestoreOne,
    reporter: Reporter,
    *,
    copy: bool,
) -> dict[str, batch.Outcome]:
    """Restore all of `manifests` (by the session of the checkpoint) by `one`, as members of
    `group`; return the outcome of each, or raise the error of the first that failed: none runs.

    `names`: session of the checkpoint -> its name now, another one for a `copy`.
    """
    registry = Registry(config)
    with ExitStack() as stack:
        stack.enter_context(
            batch.alone(config, f"group/{group}", f"group {group!r} is being stored or restored")
        )
        for name in names.values():
            outcome.check_not_running(config, registry, name, copy=copy)
        sockets = stack.enter_context(_pairs(manifests))
        paths = stack.enter_context(networks.made(manifests, copy=copy))
        origins = {name: origin for origin, name in names.items()}

        def work(
            name: str, channel: socket.socket, decided: mmap.mmap, reporter: Reporter
        ) -> Facts:
            origin = origins[name]
            member = RestoredMember(group, name, channel, decided, RestoreFailed, sockets[origin])
            return one(manifests[origin], member, paths.get(origin, ""), reporter)

        together = Together(list(origins), work, _answers, reporter, RestoreFailed, "running")
        outcomes = together.run()
    if together.error is not None:
        raise _nothing_left(config, outcomes, together.error)
    return outcomes


def _answers(point: str, facts: Mapping[str, Facts]) -> Answers:
    """Return what each member needs of the others: the unix sockets that have other names than the
    programs know.
    """
    if point != "placed":
        return {}
    return {
        name: {"shown": [pair for one in facts if one != name for pair in facts[one]["shown"]]}
        for name in facts
    }


@contextmanager
def _pairs(manifests: Mapping[str, Manifest]) -> Iterator[Sockets]:
    """Make a pair of sockets for each unix connection among the members."""
    ends: dict[int, list[tuple[str, int, str]]] = {}
    for name, manifest in manifests.items():
        for c in manifest.connections:
            if c.linked and c.family == "unix":
                ends.setdefault(c.link, []).append((name, c.inode, c.type))
    found: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in manifests}
    held: list[socket.socket] = []
    try:
        for number, both in ends.items():
            if len(both) != 2 or both[0][2] != both[1][2] or both[0][2] not in _TYPES:
                raise RestoreFailed(
                    f"connection {number} of the group does not have two ends of one kind",
                    hint="The checkpoint was not made by criuctl.",
                )
            pair = socket.socketpair(socket.AF_UNIX, _TYPES[both[0][2]])
            held += pair
            fds = pair[0].fileno(), pair[1].fileno()
            for (name, inode, _type), own, other in zip(both, fds, reversed(fds), strict=True):
                found[name][inode] = own, other
        yield found
    finally:
        for one in held:
            one.close()


def _nothing_left(
    config: Config, outcomes: Mapping[str, batch.Outcome], error: CriuctlError
) -> CriuctlError:
    """End the members that run although another one failed; return the error, which says so."""
    ran = [name for name, one in outcomes.items() if one.answer is not None]
    left = []
    for name in ran:
        try:
            with acting.undoing():
                kill(config, name, 0)
        except CriuctlError as failure:
            left.append(f"{name} ({failure.message})")
    if left:
        error.message += f"; not all others could be ended: {', '.join(left)}"
    elif ran:
        error.message += f"; {', '.join(ran)} had begun to run and were ended"
    elif not isinstance(error, Conflict):
        error.message += "; no other member was restored"
    error.args = (error.message,)
    return error
