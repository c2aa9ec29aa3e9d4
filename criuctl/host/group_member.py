"""A member's end of an operation on a group of sessions.

Each member is dumped, or restored, in a process of its own, which meets the others at named points
(`meet`): it reports facts, and goes on when all have come. The other end is the coordinator's
(`criuctl.ops.linked.meeting`).

If one fails, or the coordinator ends, `meet` raises, and the member's own dump or restore undoes
itself as after any failure. At a `decisive` point that would be wrong for a member that waits while
another one was let go already. So the coordinator notes its decision in memory that all of them
share, before it lets the first one go; who loses the coordinator there looks at that note, and all
decide alike.
"""

from __future__ import annotations

import json
import mmap
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from ..connections import links
from ..connections.record import Look
from ..connections.survey import FreezeAgain
from ..errors import CriuctlError, NoSuchProcess
from ..proc.tree import read_tree
from .target import ancestors

BROKEN = "group-broken"  # code of the error of a member that did not fail itself
AGAIN = "group-again"  # code of the error of a member whose failure passes by itself
_READ = 1 << 16


class GroupMember:
    """One member of a group that is dumped or restored."""

    def __init__(
        self,
        group: str,
        session: str,
        channel: socket.socket,
        decided: mmap.mmap,
        failure: type[CriuctlError],
    ) -> None:
        """`channel` leads to the coordinator, `decided` is its note, `failure` the class of the
        error if the operation is broken off.
        """
        self.group, self.session = group, session
        self._channel, self._decided, self._failure = channel, decided, failure
        self._read = b""

    def meet(self, point: str, *, decisive: bool = False, **facts: Any) -> dict[str, Any]:
        """Wait until all members have come to `point`; return the coordinator's answer.

        Raise the failure if the operation is broken off. At a `decisive` point the caller defers
        interrupts: the end of the coordinator is one.
        """
        try:
            self._channel.sendall(json.dumps({"at": point, "facts": facts}).encode() + b"\n")
            answer = self._answer()
        except ConnectionError:
            answer = None
        if answer is None:
            if decisive and self._decided[0]:
                return {}
            raise self._broken("the criuctl that led it has ended")
        if "broken" in answer:
            raise self._broken(str(answer["broken"]))
        return answer

    def _answer(self) -> dict[str, Any] | None:
        while b"\n" not in self._read:
            data = self._channel.recv(_READ)
            if not data:
                return None
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _broken(self, why: str) -> CriuctlError:
        error = self._failure(f"broken off with the group {self.group!r}: {why}")
        error.code = BROKEN
        return error


class DumpedMember(GroupMember):
    """A member that is dumped; it marks its connections to the others in their records."""

    def __init__(
        self,
        group: str,
        session: str,
        channel: socket.socket,
        decided: mmap.mmap,
        failure: type[CriuctlError],
        roots: Mapping[int, str],
    ) -> None:
        """`roots`: PID of the root of each member -> its session."""
        super().__init__(group, session, channel, decided, failure)
        self._roots = roots
        self.still = False  # all members have been seen to stand still

    def expected(self, found: Look) -> None:
        """See `connections.survey.Links`."""
        known: dict[int, str] = {}
        for c in found.external:
            pid = links.owner(c)
            if pid not in known:
                known[pid] = self._session_of(pid) if pid else ""
            if known[pid] and known[pid] != self.session and not c.record.datagrams:
                c.record = msgspec.structs.replace(c.record, linked=known[pid])

    def _session_of(self, pid: int) -> str:
        try:
            above = {pid} | ancestors(pid)
        except NoSuchProcess:
            return ""
        return next((name for root, name in self._roots.items() if root in above), "")

    def settle(self, found: Look) -> None:
        """See `connections.survey.Links`."""
        root = next(pid for pid, name in self._roots.items() if name == self.session)
        answer = self.meet(
            "frozen",
            halves=msgspec.to_builtins(links.halves(found.connections)),
            pids=[process.pid for process in read_tree(root)],
        )
        if why := answer.get("again"):
            raise FreezeAgain(str(why))
        self.still = True
        other = {int(inode): link for inode, link in answer["links"].items()}
        for c in found.connections:
            if (link := other.get(c.held.socket.inode)) is not None:
                c.record = msgspec.structs.replace(
                    c.record, linked=link["session"], link=link["number"]
                )


class RestoredMember(GroupMember):
    """A member that is restored; `sockets`: by the inode at the dump of a unix socket that leads to
    another member, the descriptor that takes its place, and that of its other end.
    """

    def __init__(
        self,
        group: str,
        session: str,
        channel: socket.socket,
        decided: mmap.mmap,
        failure: type[CriuctlError],
        sockets: Mapping[int, tuple[int, int]],
    ) -> None:
        super().__init__(group, session, channel, decided, failure)
        self.sockets = sockets
        self.filled = False  # their queues hold what was in them at the dump
