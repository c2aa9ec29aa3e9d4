"""The connections of a tree during a dump: recorded, decided, waited for, their peers asked.

There are two moments. `Survey.ahead`, while the tree runs: names are resolved, unrecognised peers
are probed (over new connections), refused connections stop the dump, busy ones are waited for.
`Survey.frozen`: the record for the manifest is made, every decision is made again on the current
state, and the session state of connections that are to be reconnected is learned from their peers.
The first is optional: `criuctl connections` uses only half of it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord
from ..config import Config
from ..errors import CriuctlError, NoSuchProcess, Vetoed
from ..hooks.contract import RECONNECT
from ..hooks.find import executables
from ..proc.descriptors import Descriptor, descriptors
from ..proc.syscalls import borrow_socket
from ..proc.tree import Process, read_tree
from ..report import Reporter
from .decision import Decision
from .drain import Key, wait_idle
from .peer_inspection import Answer, Question, ask_all
from .protocols import BUILT_IN, find
from .record import Connection, Look, look
from .rule_parsing import parse
from .rules import Rules
from .tree_decisions import TCP_ONLY, TreeDecisions

# seconds for which a dump waits for servers of the tree to accept; between two looks
_ACCEPT_SECONDS, _ACCEPT_PAUSE = 1.0, 0.02
_FREEZES = 5  # freezes that a dump may try in order to find drained connections idle


class Links(Protocol):
    """Where the tree is dumped together with others: the connections among them."""

    def expected(self, found: Look) -> None:
        """Mark in the records those that lead to another member, as far as that is known while the
        trees run.
        """

    def settle(self, found: Look) -> None:
        """Wait until all members stand still, and mark the connections among them. Raises
        `FreezeAgain` if that is no moment to keep them.
        """


# a tree, and the open descriptors of each of its living processes
Seen = tuple[list[Process], dict[int, list[Descriptor]]]


class FreezeAgain(CriuctlError):
    """The frozen tree has changed since the dump was prepared. Nothing was taken of it, and it is
    to be frozen once more.
    """

    exit_code = 5
    code = "freeze-again"


class NotIdle(FreezeAgain):
    """A connection that was to be waited for was busy at the moment of the freeze; there is time to
    try again.
    """

    code = "not-idle"


class Survey:
    """One tree's connections, during a dump."""

    def __init__(
        self,
        config: Config,
        reporter: Reporter,
        *,
        requested: str | None = None,
        drain: float = 0.0,
        ending: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Set up the survey. `requested` is the command line's policy, `ending` whether the dump
        ends the tree, and its connections with it.
        """
        self.config = config
        self.rules = rules if rules is not None else parse(config)
        self.reporter = reporter
        self.requested = requested
        self.drain = drain
        self.ending = ending
        self.links: Links | None = None  # of a tree that is dumped as a member of a group
        self.shield = True  # whether CRIU has, or may have, TCP connections to lock in the firewall
        # initiated by the tree, to be hung up without a rule or option that says so
        self.unasked: list[Connection] = []
        self._decisions = TreeDecisions(self.rules, requested, reporter)
        self._before: Look | None = None
        self._busy: dict[Key, float] = {}  # seconds to wait for each
        self._until: dict[Key, float] = {}  # when its time is over, of `time.monotonic`
        self._freezes = 0
        self._accepted_until = 0.0  # of `time.monotonic`; 0: nothing has waited to be accepted

    # -- before the freeze

    def look(self, root: int, *, details: bool = True) -> list[Connection]:
        """Return the running tree's connections, each external one with its decision; probe peers
        where necessary.
        """
        tree, found = self._seen(root, details=details)
        self._decisions.resolve()
        self._decisions.probe(found, tree)
        decided = [(self._decisions.decided(c, tree), c) for c in found.connections]
        self.unasked = [c for (record, decision), c in decided if self._unasked(record, decision)]
        return [Connection(record, c.held) for (record, _decision), c in decided]

    def ahead(self, root: int, seen: Seen | None = None) -> None:
        """Do everything that is possible before the freeze. Raise `Vetoed` for a connection that
        must not be given up.

        `seen` is the tree, if the caller has just looked at it.
        """
        tree, found = self._seen(root, details=False, seen=seen)
        self.shield = found.tcp
        if self.links is not None:
            self.links.expected(found)
        self._decisions.resolve()
        self._decisions.probe(found, tree)
        wanted = set()
        self.unasked = []
        for c in found.external:
            record, decision = self._decisions.decided(c, tree)
            refuse(record)
            if self._unasked(record, decision):
                self.unasked.append(c)
            wanted |= {decision.application} if decision.policy == "reconnect" else set()
            seconds = max(self.drain, decision.drain)
            if seconds and not record.datagrams:
                self._busy[c.held.pid, c.held.fd] = seconds
        self._warn_of_missing(wanted.difference(BUILT_IN, {""}))

    def _unasked(self, record: ConnectionRecord, decision: Decision) -> bool:
        """Return whether it is given up without a rule. Accepted connections are not counted: their
        clients come again.
        """
        made = not record.datagrams and record.direction == "initiated" and not record.queued
        return made and decision.policy == "hangup" and not (self.requested or decision.rule)

    def _warn_of_missing(self, names: set[str]) -> None:
        """Warn of hooks that rules name and that do not exist here; the host of the restore may
        have them.
        """
        if not names:
            return
        for name in sorted(names - {hook.name for hook in executables(self.config, RECONNECT)}):
            text = f"there is no reconnect hook {name!r} here, which a connection rule names"
            self.reporter.warning(
                text,
                (
                    "It is needed where the tree is restored; `criuctl hooks list` shows those of "
                    "this host."
                ),
            )

    def wait(self, root: int) -> None:
        """Wait for the connections that are to be idle, just before the freeze; again after
        `NotIdle`.
        """
        while self._before is not None and self._unaccepted(self._before):
            time.sleep(_ACCEPT_PAUSE)
            self._seen(root, details=False)
        if self._busy:
            began = time.monotonic()
            self._until = self._until or {
                key: began + seconds for key, seconds in self._busy.items()
            }
            # late ones are already reported
            waiting = {key: until for key, until in self._until.items() if until > began}
            if waiting:
                self._wait(root, waiting)

    def _unaccepted(self, found: Look) -> bool:
        """Return whether a server of the tree gets more time to accept its own tree's
        connections.
        """
        if not any(c.record.queued for c in found.connections):
            return False
        self._accepted_until = self._accepted_until or time.monotonic() + _ACCEPT_SECONDS
        return time.monotonic() < self._accepted_until

    def _seen(
        self, root: int, *, details: bool, seen: Seen | None = None
    ) -> tuple[list[Process], Look]:
        tree, opened = seen or _read(root)
        self._before = look(tree, opened, before=self._before, details=details)
        return tree, self._before

    def _wait(self, root: int, deadlines: Mapping[Key, float]) -> None:
        self.reporter.step("drain", connections=len(deadlines))

        def now() -> dict[Key, ConnectionRecord]:
            _tree, found = self._seen(root, details=True)
            return {(c.held.pid, c.held.fd): c.record for c in found.external}

        for record in wait_idle(now, deadlines):
            text = (
                f"PID {record.pid} fd {record.fd}: the connection to {record.peer or 'its peer'} "
                "did not become idle in time"
            )
            self.reporter.warning(
                text, "What is under way on it is cut off, unless the connection is kept."
            )

    # -- when the tree is frozen

    def frozen(self, tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> Look:
        """Return the connections of the frozen tree for the manifest. Raise `Vetoed`, as in
        `ahead`, or `FreezeAgain`.
        """
        found = look(tree, opened, before=self._before)
        if found.tcp and not self.shield:
            self.shield = True
            raise FreezeAgain(
                "a TCP connection has been made since the first look, which is to be locked"
            )
        if self._unaccepted(found):
            self._before = found
            raise NotIdle("a connection within the tree waits to be accepted")
        if self.links is not None:
            self.links.settle(found)
        self._decisions.probe(found, tree)  # for connections that are newer than the first look
        decided = [self._decisions.decided(c, tree) for c in found.connections]
        for record, _decision in decided:
            refuse(record)
        before = {
            (c.held.pid, c.held.fd): record.policy
            for c, (record, _d) in zip(found.connections, decided, strict=True)
        }
        answers = self._inspect(found.connections, decided)
        for number, ((record, decision), c) in enumerate(
            zip(decided, found.connections, strict=True)
        ):
            answer = answers.get(number)
            if answer is not None:
                record = self._answered(record, decision, answer)
            c.record = record
        self._freezes += 1
        if self._freezes < _FREEZES:
            for c in found.external:
                self._meet_idle(c, before[c.held.pid, c.held.fd])
        for c in found.connections:
            refuse(c.record)
        return found

    def _meet_idle(self, c: Connection, expected: str) -> None:
        """Raise `NotIdle` if a connection is busy, or its session cannot be rebuilt at the moment,
        and it may be waited for.
        """
        if time.monotonic() >= self._until.get((c.held.pid, c.held.fd), 0.0):
            return
        if c.record.rqueue or c.record.wqueue or c.record.policy != expected:
            raise NotIdle(
                f"PID {c.record.pid} fd {c.record.fd}: the connection to {c.record.peer} is busy: "
                f"{c.record.reason}"
            )

    def _inspect(
        self,
        connections: Sequence[Connection],
        decided: Sequence[tuple[ConnectionRecord, Decision]],
    ) -> dict[int, Answer]:
        """Return an answer for each connection that is to be reconnected by a built-in protocol.

        The peer of one that ends with the tree is asked too, if its protocol is clear, so that a
        restore may still reconnect it. For a tree that continues, a peer is asked only on request.
        """
        answers: dict[int, Answer] = {}
        asked: list[int] = []
        questions: list[Question] = []
        for number, (record, decision) in enumerate(decided):
            wanted = decision.policy == "reconnect" or (
                self.ending and decision.policy == "hangup" and _asks(record)
            )
            protocol = (
                find(decision.application or record.application)
                if record.external and wanted
                else None
            )
            if protocol is None:
                continue
            if connections[number].held.waiting:
                answers[number] = Answer(reason="the peer has not accepted it yet")
            elif (record.rqueue or record.wqueue) and not getattr(protocol, "any_time", False):
                answers[number] = Answer(
                    reason=(
                        f"it is not idle: {record.rqueue} bytes are not read, {record.wqueue} "
                        "bytes not acknowledged"
                    )
                )
            else:
                held = connections[number].held
                asked.append(number)
                questions.append(
                    Question(
                        replace(record, pid=held.pid, holders=held.holders),
                        protocol,
                        decision.settings,
                        _borrower(held.pid, held.fd),
                    )
                )
        if questions:
            self.reporter.step("inspect", connections=len(questions))
            answers.update(zip(asked, ask_all(questions), strict=True))
        return answers

    def _answered(
        self, record: ConnectionRecord, decision: Decision, answer: Answer
    ) -> ConnectionRecord:
        if answer.shut:
            text = (
                f"PID {record.pid} fd {record.fd}: the peer {record.peer} did not answer, so the "
                "connection was ended"
            )
            self.reporter.warning(
                text, "A late answer to criuctl's question would have reached the program."
            )
        if answer.reason:
            reconnects = decision.policy == "reconnect"
            return (
                replace(record, policy=decision.on_failure, reason=answer.reason)
                if reconnects
                else record
            )
        session = dict(answer.session)
        for text in session.pop("warnings", ()):  # for the report of the dump, not for the restore
            self.reporter.warning(f"PID {record.pid} fd {record.fd}: {text}")
        return replace(record, session=session)


def _read(root: int) -> Seen:
    tree = read_tree(root)
    opened: dict[int, list[Descriptor]] = {}
    for process in tree:
        if not process.zombie:
            with suppress(NoSuchProcess):  # the tree runs, so a child may end meanwhile
                opened[process.pid] = descriptors(process.pid)
    return tree, opened


def _asks(record: ConnectionRecord) -> bool:
    """Return whether a reconnect of this connection would need the session's state."""
    return (
        record.direction == "initiated"
        and record.state == "established"
        and record.application not in ("", TCP_ONLY)
    )


def refuse(record: ConnectionRecord) -> None:
    """Refuse the dump: a connection with policy ``refuse`` is open."""
    if not record.external or record.policy != "refuse":
        return
    why = f": {record.reason}" if record.reason else ""
    raise Vetoed(
        f"PID {record.pid} fd {record.fd}: the connection {record.local or record.family} -> "
        f"{record.peer or '(unnamed)'} may not be given up{why}",
        hint="Wait until it is closed, or dump with --connections hangup or keep.",
        pid=record.pid,
        fd=record.fd,
    )


def _borrower(pid: int, fd: int) -> Callable[[], socket.socket]:
    def borrow() -> socket.socket:
        pidfd = os.pidfd_open(pid)
        try:
            return borrow_socket(pidfd, fd)
        finally:
            os.close(pidfd)

    return borrow
