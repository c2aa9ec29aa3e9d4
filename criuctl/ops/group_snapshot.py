"""A checkpoint of a whole group: all its members at one moment.

Each member is dumped by itself, in a process of its own, and they proceed together
(`linked.meeting`):

1. ``ready``: all checks are done, and CRIU waits. Nothing was touched.
2. ``frozen``: all members stand still. This is the moment of the checkpoint. Each has described the
   ends of its connections, and learns which lead to other members (`connections.links`): those are
   kept, with what is in their queues. If one is not accepted yet, all run on for a moment and are
   frozen again.
3. ``images``: CRIU has written all of every member, with the connections locked in the firewall.
   Only now may the first member run on.
4. ``stored``: everything is durable, and no manifest is written yet.
5. The members' manifests, then the group's: the commit point. For a dump that ends the members the
   group's manifest comes before any of them is ended (``committed``).

A failure of one member before its manifest breaks the whole off: all run on, and nothing is
listed. After that the manifests that were written are removed again. If criuctl is killed between
the first manifest and the group's, what is left are ordinary checkpoints of single sessions, and no
group checkpoint.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.groups import GroupCheckpoint, GroupMemberRecord
from ..checkpoint.manifest import now
from ..checkpoint.repository import Repository
from ..config import Config
from ..connections import links
from ..dump.destination import opened_or_made
from ..dump.job import DumpRequest
from ..dump.story import dump
from ..errors import CriuctlError, DumpFailed
from ..host.group_member import AGAIN, DumpedMember
from ..host.identity import host_name
from ..host.registry import Registry, check_outside
from ..host.stale_locks import forget_stale_locks
from ..report import Reporter
from ..store import open_store
from . import acting
from .groups import described, living, members
from .inspect import opened, remove
from .linked.meeting import Answers, Facts, Together
from .scheduling import batch

_TRIES = 3  # of the whole, if a failure passes by itself
_ACCEPT_SECONDS = 1.0  # for connections among the members to be accepted
_LEAST_MIB = 32  # of buffers for each member


class GroupResult(Struct, frozen=True):
    """A group checkpoint that was made."""

    checkpoint: GroupCheckpoint
    members: list[dict[str, Any]]  # the JSON of each dump
    total_ms: float
    degraded: bool = False
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``snapshot --group``."""
        made = described(self.checkpoint)
        del made["members"]
        more = {"total_ms": self.total_ms, "warnings": self.warnings}
        return {**made, "members": self.members, **more}


def snapshot_group(
    config: Config, group: str, *, request: DumpRequest, reporter: Reporter
) -> GroupResult:
    """Store all members of `group` that run, as they are at one moment.

    They run on, or with a `request` that does not leave them running, are ended together. Raises
    the error of the first member that failed; then all run on, and nothing is listed.
    """
    check_outside(config)
    with batch.alone(config, f"group/{group}", f"group {group!r} is being stored already"):
        for _attempt in range(_TRIES - 1):
            try:
                return _Snapshot.of(config, group, request, reporter).take()
            except CriuctlError as error:
                if error.code != AGAIN:
                    raise
                reporter.step("group-again", why=error.message)
                # it may have been that: see `dump.short_freeze`
                config = replace(config, track_writes_mib=0)
        return _Snapshot.of(config, group, request, reporter).take()


class _Snapshot(Struct, eq=False):
    """One try."""

    config: Config
    group: str
    request: DumpRequest
    reporter: Reporter
    roots: dict[int, str]  # PID of the root of each member -> its session
    made: dict[str, GroupMemberRecord] = field(default_factory=dict)
    checkpoint: GroupCheckpoint | None = None
    _patience: float = 0.0  # until when connections may be accepted, monotonic
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, config: Config, group: str, request: DumpRequest, reporter: Reporter) -> _Snapshot:
        found = living(config, group)
        for session in members(config, group):
            if session["state"] == "checkpointed":
                reporter.warning(
                    f"session {session['session']!r} is in the group and checkpointed; it is not "
                    "in this checkpoint of the group"
                )
        share = max(_LEAST_MIB, config.buffers_mib // len(found))
        config = replace(config, buffers_mib=min(config.buffers_mib, share))
        return cls(config, group, request, reporter, {s["pid"]: s["session"] for s in found})

    def take(self) -> GroupResult:
        """Make the checkpoint."""
        self._open_store()
        names = list(self.roots.values())
        decisive = "" if self.request.leave_running else "committed"
        together = Together(names, self._dump, self._at, self.reporter, DumpFailed, decisive)
        try:
            outcomes = together.run()
            results = [one.answer for name in names if (one := outcomes[name]).answer is not None]
            for result in results:
                self._note(result["result"]["session"], result["result"]["checkpoint"])
            if together.error is not None:
                raise together.error
            if self.checkpoint is None:
                self._commit(max(r["result"]["frozen_ms"] for r in results))
        except BaseException as error:
            # a member's criuctl may have been killed together with its CRIU
            forget_stale_locks(self.config)
            if self.checkpoint is None:
                self._forget(error)
            raise
        assert self.checkpoint is not None
        self.reporter.step("group-done")
        return GroupResult(
            self.checkpoint,
            [result["result"] for result in results],
            round((time.monotonic() - self._began) * 1000, 1),
            any(result["degraded"] for result in results),
            list(self.reporter.warnings),
        )

    def _open_store(self) -> None:
        """Open the store, which is made if it is the configured one and absent: once, not by each
        member.
        """
        with open_store(self.config.store, self.config) as store:
            opened_or_made(store, self.config, self.reporter, Registry(self.config)).close()

    def _dump(
        self, name: str, channel: socket.socket, decided: mmap.mmap, reporter: Reporter
    ) -> Facts:
        """Dump one member; in its own process."""
        member = DumpedMember(self.group, name, channel, decided, DumpFailed, self.roots)
        result = dump(self.config, name, request=self.request, reporter=reporter, group=member)
        return {"result": result.to_dict(), "degraded": result.degraded}

    def _at(self, point: str, facts: dict[str, Facts]) -> Answers:
        """Answer the members, which have all come to `point`."""
        if point == "frozen":
            return self._linked(facts)
        if point == "committed":
            for name, said in facts.items():
                self._note(name, said["checkpoint"])
            self._commit(max(said["frozen_ms"] for said in facts.values()))
        return {}

    def _linked(self, facts: Mapping[str, Facts]) -> Answers:
        halves = {
            name: msgspec.convert(said["halves"], list[links.Half]) for name, said in facts.items()
        }
        found = links.match(halves, {name: set(said["pids"]) for name, said in facts.items()})
        self._patience = self._patience or time.monotonic() + _ACCEPT_SECONDS
        if found.unaccepted and time.monotonic() < self._patience:
            why = f"a connection among them waits to be accepted: {found.unaccepted[0]}"
            return {name: {"again": why} for name in facts}
        for text in found.unaccepted:
            self.reporter.warning(
                f"{text} was not accepted; it is not kept as a connection of the group"
            )
        return {
            name: {"links": {str(inode): msgspec.to_builtins(x) for inode, x in by_inode.items()}}
            for name, by_inode in found.links.items()
        }

    def _note(self, name: str, checkpoint: str) -> None:
        self.made.setdefault(name, GroupMemberRecord(session=name, checkpoint=checkpoint))

    def _commit(self, frozen_ms: float) -> None:
        """Put the group's manifest: the group checkpoint exists."""
        self.reporter.step("group-commit")
        with opened(self.config) as (_, repository):
            one = GroupCheckpoint(
                id=os.urandom(16).hex(),
                group=self.group,
                created=now(),
                host=host_name(self.config),
                frozen_ms=frozen_ms,
                members=tuple(_located(repository, self.made.values())),
                labels=dict(self.request.labels),
            )
            self.checkpoint = repository.groups.put(one)

    def _forget(self, error: BaseException) -> None:
        """Remove the checkpoints of members that were committed before another one failed."""
        if not self.made:
            return
        ids = [member.checkpoint for member in self.made.values()]
        left = list(self.made)
        with suppress(CriuctlError), acting.undoing():
            removals = remove(self.config, ids, reporter=self.reporter)
            left = [r.summary.session for r in removals if r.summary and r.error is not None]
        if left and isinstance(error, CriuctlError):
            error.message += f"; checkpoints of {', '.join(left)} alone are left in the store"


def _located(repository: Repository, made: Iterable[GroupMemberRecord]) -> list[GroupMemberRecord]:
    """Return the members with the numbers and names of their manifests."""
    found = []
    for member in made:
        summary = repository.resolve(member.checkpoint)
        found.append(member.with_use(number=summary.number, object=summary.object))
    return found
