"""The connections of a tree on the way into a checkpoint: looked at, decided, waited for, asked
about.

Two moments.  `Survey.ahead`, while the tree runs: names are resolved, peers that give nothing away
are probed (over connections of our own), refused connections stop the dump, busy ones are waited
for.  `Survey.frozen`: the record that the manifest gets, every decision made again on what is there
now, and the sessions of connections that are to be reconnected learned from their peers.  The first
is optional: `criuctl connections` stops half way through it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ..checkpoint.manifest import ConnectionRecord
from ..config import Config
from ..errors import CriuctlError, NoSuchProcess, Vetoed
from ..proc.descriptors import Descriptor, descriptors
from ..proc.sockdiag import namespace_socket
from ..proc.syscalls import borrow_socket
from ..proc.tree import Process, read_tree
from ..report import Reporter
from . import detect
from .drain import Key, wait_idle
from .peer_inspection import Answer, Question, ask_all
from .protocols import BUILT_IN, find
from .record import Connection, Look, look
from .rules import TRANSPORTS, Decision, Rules, decide, endpoint, parse
from .secret_scope import Owner, of_tree

_RESOLVE_SECONDS = 2.0  # for all host names together
# for which a dump waits for servers of the tree; between two looks
_ACCEPT_SECONDS, _ACCEPT_PAUSE = 1.0, 0.02
_FREEZES = 5  # that a dump may try in order to meet drained connections idle
_PROBE_TCP_ONLY = "tcp"  # what a peer speaks whom nobody understands

# a tree, and what each of its living processes has open
Seen = tuple[list[Process], dict[int, list[Descriptor]]]


class FreezeAgain(CriuctlError):
    """The frozen tree was not what its dump was prepared for: nothing has been taken of it, and it
    is to be frozen once more.
    """

    exit_code = 5
    code = "freeze-again"


class NotIdle(FreezeAgain):
    """A connection that was to be waited for was busy at the very moment of the freeze; there is
    time to try again.
    """

    code = "not-idle"


class Survey:
    """One tree's connections, seen from a dump."""

    def __init__(
        self,
        config: Config,
        reporter: Reporter,
        *,
        wish: str | None = None,
        drain: float = 0.0,
        ending: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """`wish` is the command line's policy, `ending` whether the dump ends the tree, and its
        connections with it.
        """
        self.config = config
        self.rules = rules if rules is not None else parse(config)
        self.reporter = reporter
        self.wish = wish
        self.drain = drain
        self.ending = ending
        self.shield = True  # whether CRIU has TCP connections to lock in the firewall, or may have
        # made by the tree, to be hung up with no rule or option that says so
        self.unasked: list[Connection] = []
        self._addresses: dict[str, frozenset[str]] = {}
        self._spoken: dict[str, str] = {}  # peer -> application protocol, as probed
        self._before: Look | None = None
        # of the tree that was looked at last
        self._owned: tuple[Sequence[Process], dict[int, Owner]] | None = None
        self._busy: dict[Key, float] = {}  # seconds to wait for each
        self._until: dict[Key, float] = {}  # when its time is over, of `time.monotonic`
        self._freezes = 0
        self._accepted_until = 0.0  # of `time.monotonic`; 0: nothing has waited to be accepted

    # -- before the freeze

    def look(self, root: int, *, details: bool = True) -> list[Connection]:
        """What the running tree holds, each external connection with the decision for it; probes
        what has to be known.
        """
        tree, found = self._seen(root, details=details)
        self._resolve()
        self._probe(found, tree)
        decided = [(self._decided(c, tree), c) for c in found.connections]
        self.unasked = [c for (record, decision), c in decided if self._unasked(record, decision)]
        return [Connection(record, c.held) for (record, _decision), c in decided]

    def ahead(self, root: int, seen: Seen | None = None) -> None:
        """Everything that can be found out before the freeze.  `Vetoed` for a connection that may
        not be given up.

        `seen` is the tree, if somebody has just looked at it.
        """
        tree, found = self._seen(root, details=False, seen=seen)
        self.shield = found.tcp
        self._resolve()
        self._probe(found, tree)
        wanted = set()
        self.unasked = []
        for c in found.external:
            record, decision = self._decided(c, tree)
            refuse(record)
            if self._unasked(record, decision):
                self.unasked.append(c)
            wanted |= {decision.application} if decision.policy == "reconnect" else set()
            seconds = max(self.drain, decision.drain)
            if seconds and not record.datagrams:
                self._busy[c.held.pid, c.held.fd] = seconds
        self._tell_missing(wanted.difference(BUILT_IN, {""}))

    def _unasked(self, record: ConnectionRecord, decision: Decision) -> bool:
        """Not of what the tree has accepted: its clients are used to come again."""
        made = not record.datagrams and record.direction == "initiated" and not record.queued
        return made and decision.policy == "hangup" and not (self.wish or decision.rule)

    def _tell_missing(self, names: set[str]) -> None:
        """Hooks that rules name and that are not here; the host of the restore may have them."""
        if not names:
            return
        from ..hooks.contract import RECONNECT
        from ..hooks.find import executables

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
            # who is late was told
            waiting = {key: until for key, until in self._until.items() if until > began}
            if waiting:
                self._wait(root, waiting)

    def _unaccepted(self, found: Look) -> bool:
        """Whether a server of the tree is to have another moment for its own tree's connections."""
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

    def _resolve(self) -> None:
        """The addresses of every host name in the rules, asked all at once and once only."""
        names = [name for name in self.rules.hosts if name not in self._addresses]
        if not names:
            return
        found: dict[str, frozenset[str]] = {}

        def ask(name: str) -> None:
            try:
                infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except OSError:
                return
            found[name] = frozenset(str(address[0]) for *_, address in infos)

        # Daemon threads: a resolver that hangs is left behind.
        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _RESOLVE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._addresses.update({name: found.get(name, frozenset()) for name in names})
        for name in names:
            if name not in found:
                self.reporter.warning(
                    f"the host name {name!r} of connection_rules cannot be resolved; rules with "
                    "it do not match"
                )

    def _probe(self, found: Look, tree: Sequence[Process]) -> None:
        """Ask the peers of which it matters what they speak."""
        peers: dict[str, detect.Dial] = {}
        for c in found.external:
            if (
                c.record.type != "stream"
                or c.record.direction != "initiated"
                or c.held.waiting
                or c.record.queued
            ):
                continue
            _record, decision = self._decided(c, tree)
            unknown = not decision.application and c.record.peer not in self._spoken
            if unknown and (decision.policy == "reconnect" or self._speech_matters(c.record)):
                dial = _dial(c)
                if dial is not None:
                    peers[c.record.peer] = dial
        self._spoken.update(detect.probe(peers))

    def _speech_matters(self, record: ConnectionRecord) -> bool:
        return any(p not in TRANSPORTS for rule in self.rules.rules for p in rule.match.protocols)

    # -- when the tree is frozen

    def frozen(self, tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> Look:
        """The connections of the frozen tree as the manifest gets them.  `Vetoed`, as in `ahead`;
        `FreezeAgain`.
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
        self._probe(found, tree)  # of connections that are newer than the first look
        decided = [self._decided(c, tree) for c in found.connections]
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

    def _meet_idle(self, c: Connection, wished: str) -> None:
        """`NotIdle` if a connection is busy, or its session such that it cannot be rebuilt now, and
        may be waited for.
        """
        if time.monotonic() >= self._until.get((c.held.pid, c.held.fd), 0.0):
            return
        if c.record.rqueue or c.record.wqueue or c.record.policy != wished:
            raise NotIdle(
                f"PID {c.record.pid} fd {c.record.fd}: the connection to {c.record.peer} is "
                "busy: "
                f"{c.record.reason}"
            )

    def _inspect(
        self,
        connections: Sequence[Connection],
        decided: Sequence[tuple[ConnectionRecord, Decision]],
    ) -> dict[int, Answer]:
        """An answer for each connection that is to be reconnected by a protocol of ours.

        One that ends with the tree is asked too, if it is plain what it speaks: a restore may then
        still be told to reconnect it.  One of a tree that goes on is not spoken to without a wish.
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
            wished = decision.policy == "reconnect"
            return (
                replace(record, policy=decision.on_failure, reason=answer.reason)
                if wished
                else record
            )
        session = dict(answer.session)
        for text in session.pop("warnings", ()):  # for whoever dumps, not for the restore
            self.reporter.warning(f"PID {record.pid} fd {record.fd}: {text}")
        return replace(record, session=session)

    # -- deciding

    def _decided(self, c: Connection, tree: Sequence[Process]) -> tuple[ConnectionRecord, Decision]:
        """The record with its policy, and all that was decided; listening and internal sockets have
        no policy.
        """
        record = c.record
        if not record.external:
            return record, Decision("")
        spoken = self._spoken.get(record.peer, "") if record.direction == "initiated" else ""
        application = record.application or detect.by_appearance(record) or spoken
        commands = {p.ns_pid: p.command for p in tree}
        record = replace(record, application=application, policy="", reason="")
        owners = self._owners_of(tree)
        decision = decide(
            record,
            self.rules,
            self.wish,
            commands=commands,
            addresses=self._addresses,
            owners=owners,
        )
        if decision.policy == "reconnect" and not decision.application:
            decision = replace(
                decision, application=_PROBE_TCP_ONLY if record.peer in self._spoken else ""
            )
        made = replace(
            record,
            policy=decision.policy,
            application=decision.application,
            host=decision.host,
            reason=decision.reason,
        )
        return made, decision

    def _owners_of(self, tree: Sequence[Process]) -> Mapping[int, Owner]:
        """Only asked for rules that look at it."""
        if not any(rule.lends or rule.match.users for rule in self.rules.rules):
            return {}
        if self._owned is None or self._owned[0] is not tree:
            self._owned = tree, of_tree(tree)
        return self._owned[1]


def _read(root: int) -> Seen:
    tree = read_tree(root)
    opened: dict[int, list[Descriptor]] = {}
    for process in tree:
        if not process.zombie:
            with suppress(NoSuchProcess):  # it runs, so a child may end while we look
                opened[process.pid] = descriptors(process.pid)
    return tree, opened


def _asks(record: ConnectionRecord) -> bool:
    """Whether a reconnect of this connection would need to know what the session holds."""
    return (
        record.direction == "initiated"
        and record.state == "established"
        and record.application not in ("", _PROBE_TCP_ONLY)
    )


def refuse(record: ConnectionRecord) -> None:
    """Policy ``refuse``: a tree with such a connection is not dumped now."""
    if not record.external or record.policy != "refuse":
        return
    why = f": {record.reason}" if record.reason else ""
    raise Vetoed(
        f"PID {record.pid} fd {record.fd}: the connection {record.local or record.family} -> "
        f"{record.peer or '(unnamed)'}"
        f" may not be given up{why}",
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


def _dial(c: Connection) -> detect.Dial | None:
    """How to reach the peer of a connection from where the tree is."""
    record, pid = c.record, c.held.pid
    if record.family == "unix":
        if not record.peer:
            return None
        path = (
            "\0" + record.peer[1:]
            if record.peer.startswith("@")
            else f"/proc/{pid}/root{record.peer}"
        )
        return (lambda: namespace_socket(pid, socket.AF_UNIX, socket.SOCK_STREAM)), path
    host, port = endpoint(record.peer)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return (lambda: namespace_socket(pid, family, socket.SOCK_STREAM)), (host, port)
