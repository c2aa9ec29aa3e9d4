"""Several dumps or restores that proceed together: all go on at a point, or none does.

Each member works in a process of its own (`criuctl.proc.forked`) and meets the others at named
points (`criuctl.host.group_member`). When all have come to one, the coordinator, this process,
answers each. When one fails, all that wait, or come to a point later, are answered that it is
broken off, and undo themselves; so it is when the coordinator ends, because its ends of the
channels close with it.

At the `decisive` point an operation cannot be undone for one member alone. The decision is a byte
of memory that all processes share; it is set before the first of them is answered.
"""

from __future__ import annotations

import json
import mmap
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec import Struct, field

from ...errors import CriuctlError
from ...host.group_member import BROKEN
from ...proc import forked
from ...proc.child import InterruptsDeferred
from ...report import Reporter
from ..scheduling import batch

Facts = dict[str, Any]
Answers = Mapping[str, Facts]
Work = Callable[[str, socket.socket, mmap.mmap, Reporter], Facts]
"""What a member does, in its own process: its name, its channel, the decision, its reporter."""

_READ = 1 << 16


class _Seat(Struct, eq=False):
    """One member, as the coordinator sees it."""

    name: str
    channel: socket.socket | None
    read: bytes = b""
    waits: tuple[str, Facts] | None = None  # the point at which it waits, and its facts
    outcome: batch.Outcome | None = None

    def take(self) -> None:
        """Read what it has sent."""
        assert self.channel is not None
        try:
            data = self.channel.recv(_READ)
        except ConnectionError:
            data = b""
        if not data:
            self.close()
            return
        self.read += data
        line, found, rest = self.read.partition(b"\n")
        if found:
            self.read = rest
            said = json.loads(line)
            self.waits = said["at"], said["facts"]

    def answer(self, body: Facts) -> None:
        """Let it go on."""
        self.waits = None
        if self.channel is not None:
            try:
                self.channel.sendall(json.dumps(body).encode() + b"\n")
            except ConnectionError:  # it has ended, and why is known soon
                self.close()

    def close(self) -> None:
        """Close the channel: whatever it waits for there is broken off."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Together(Struct):
    """An operation on several members."""

    names: Sequence[str]
    work: Work
    at: Callable[[str, dict[str, Facts]], Answers]
    """Called when all have come to a point: its name, and each one's facts."""

    reporter: Reporter
    failure: type[CriuctlError]  # of a member whose process was killed
    decisive: str = ""
    decided: bool = False
    error: CriuctlError | None = None  # why it was broken off
    _seats: list[_Seat] = field(default_factory=list)

    def run(self) -> dict[str, batch.Outcome]:
        """Do it; return the outcome of each member. All of them have ended."""
        running: list[forked.Process] = []
        with ExitStack() as stack, mmap.mmap(-1, 1) as decision:
            pairs = [socket.socketpair() for _ in self.names]
            for ours, theirs in pairs:
                stack.callback(ours.close)
                stack.callback(theirs.close)
            self._seats = [
                _Seat(name, ours) for name, (ours, _) in zip(self.names, pairs, strict=True)
            ]
            try:
                for number, name in enumerate(self.names):
                    work = self._alone(number, name, pairs, decision)
                    forked.start(name, batch.piece(work, self.reporter, name), running)
                for _, theirs in pairs:
                    theirs.close()
                with ExitStack() as deferred:
                    while any(seat.outcome is None for seat in self._seats):
                        self._look(running)
                        self._proceed(decision, deferred)
            finally:
                for seat in self._seats:
                    seat.close()
                forked.end_all(running)
        return {seat.name: seat.outcome for seat in self._seats if seat.outcome is not None}

    def _alone(
        self,
        number: int,
        name: str,
        pairs: Sequence[tuple[socket.socket, socket.socket]],
        decision: mmap.mmap,
    ) -> batch.Work:
        def work(reporter: Reporter) -> Facts:
            # else no channel would end with the coordinator
            for other, (ours, theirs) in enumerate(pairs):
                ours.close()
                if other != number:
                    theirs.close()
            return self.work(name, pairs[number][1], decision, reporter)

        return work

    def _look(self, running: list[forked.Process]) -> None:
        """Wait for the next message or end, and note what there is."""
        poller = select.poll()
        for process in running:
            poller.register(process.pidfd, select.POLLIN)
        for seat in self._seats:
            if seat.channel is not None and seat.waits is None:
                poller.register(seat.channel, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        for seat in self._seats:
            if seat.channel is not None and seat.channel.fileno() in ready:
                seat.take()
        for process in [process for process in running if process.has_ended()]:
            running.remove(process)
            ended = process.end()
            seat = next(seat for seat in self._seats if seat.name == ended.key)
            seat.outcome = batch.outcome_of(ended, self.reporter, broken=self.failure)
            seat.close()
            if seat.outcome.error is not None:
                self._break(seat.name, seat.outcome.error)

    def _break(self, name: str, error: CriuctlError) -> None:
        if self.error is None or self.error.code == BROKEN:
            self.error = error
            if name:
                error.message = f"session {name!r}: {error.message}"
                error.args = (error.message,)

    def _proceed(self, decision: mmap.mmap, deferred: ExitStack) -> None:
        """Answer those that wait, if all do, or if it is broken off."""
        waiting = [seat for seat in self._seats if seat.waits is not None]
        if self.error is None and len(waiting) == len(self._seats):
            points = {seat.waits[0] for seat in waiting if seat.waits is not None}
            (point,) = points
            self.reporter.step(f"group-{point}")
            try:
                answers = self.at(point, {s.name: s.waits[1] for s in waiting if s.waits})
            except CriuctlError as error:
                self._break("", error)
            else:
                if point == self.decisive:  # from here on no signal stops it half way
                    deferred.enter_context(InterruptsDeferred())
                    decision[0], self.decided = 1, True
                    self.reporter.step("group-decided")
                for seat in waiting:
                    seat.answer(dict(answers.get(seat.name, {})))
                return
        if self.error is not None:
            for seat in waiting:
                seat.answer({"broken": self.error.message})
