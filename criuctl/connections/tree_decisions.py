"""The decisions for the connections of one tree, and what they depend on besides the rules.

`decision` decides by a record and what the caller knows. This module finds that out: the addresses
of the host names in the rules (`resolve`), the protocols of unrecognised peers (`probe`), and the
credentials of the processes. Each name is resolved and each peer asked once; the answers are kept
for the decisions that are made again on the frozen tree.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord, endpoint
from ..proc.namespace_sockets import namespace_socket
from ..proc.tree import Process
from ..report import Reporter
from . import detect
from .decision import Decision, decide
from .record import Connection, Look
from .rules import TRANSPORTS, Rules
from .secret_scope import Owner, of_tree

_RESOLVE_SECONDS = 2.0  # for all host names together
TCP_ONLY = "tcp"  # the answer for a peer with an unknown protocol


class TreeDecisions:
    """Decides for the connections of one tree."""

    def __init__(self, rules: Rules, requested: str | None, reporter: Reporter) -> None:
        """Set up; `requested` is the command line's policy for all."""
        self._rules, self._requested, self._reporter = rules, requested, reporter
        self._addresses: dict[str, frozenset[str]] = {}
        self._spoken: dict[str, str] = {}  # peer -> application protocol, as probed
        # of the tree at the last look
        self._owned: tuple[Sequence[Process], dict[int, Owner]] | None = None

    def resolve(self) -> None:
        """Resolve every host name in the rules, all at once and only once."""
        names = [name for name in self._rules.hosts if name not in self._addresses]
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
                self._reporter.warning(
                    f"the host name {name!r} of connection_rules cannot be resolved; rules with "
                    "it do not match"
                )

    def probe(self, found: Look, tree: Sequence[Process]) -> None:
        """Ask the peers whose protocol matters."""
        peers: dict[str, detect.Dial] = {}
        for c in found.external:
            if (
                c.record.type != "stream"
                or c.record.direction != "initiated"
                or c.held.waiting
                or c.record.queued
            ):
                continue
            _record, decision = self.decided(c, tree)
            unknown = not decision.application and c.record.peer not in self._spoken
            if unknown and (decision.policy == "reconnect" or self._speech_matters(c.record)):
                dial = _dial(c)
                if dial is not None:
                    peers[c.record.peer] = dial
        self._spoken.update(detect.probe(peers))

    def decided(self, c: Connection, tree: Sequence[Process]) -> tuple[ConnectionRecord, Decision]:
        """Return the record with its policy, and the decision; listening and internal sockets have
        no policy.
        """
        record = c.record
        if not record.external:
            return record, Decision("")
        if record.linked:
            return replace(record, policy="keep"), Decision("keep")
        spoken = self._spoken.get(record.peer, "") if record.direction == "initiated" else ""
        application = record.application or detect.by_appearance(record) or spoken
        commands = {p.ns_pid: p.command for p in tree}
        record = replace(record, application=application, policy="", reason="")
        owners = self._owners_of(tree)
        decision = decide(
            record,
            self._rules,
            self._requested,
            commands=commands,
            addresses=self._addresses,
            owners=owners,
        )
        if decision.policy == "reconnect" and not decision.application:
            decision = replace(
                decision, application=TCP_ONLY if record.peer in self._spoken else ""
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
        """Return the owners in the tree, read only for rules that need them."""
        if not any(rule.lends or rule.match.users for rule in self._rules.rules):
            return {}
        if self._owned is None or self._owned[0] is not tree:
            self._owned = tree, of_tree(tree)
        return self._owned[1]

    def _speech_matters(self, record: ConnectionRecord) -> bool:
        return any(p not in TRANSPORTS for rule in self._rules.rules for p in rule.match.protocols)


def _dial(c: Connection) -> detect.Dial | None:
    """Return how to reach the peer of a connection from the tree's network namespace."""
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
