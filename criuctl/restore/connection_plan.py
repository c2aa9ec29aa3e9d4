"""Decide what is done with each external connection of a checkpoint on this host.

`criuctl.connections.rules` has the requested policy (command line, rule, decision of the dump,
default); this module adapts it to the host.  A kept internet connection needs its local address,
and no other socket may have the same pair of addresses.  A kept datagram socket needs no more than
that, so without its address it is reconnected from another one; a unix datagram socket is kept
where its peer's path exists.  Pure, as the rest of the plan: it knows what `HostFacts` contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord
from ..connections.decision import JOURNAL, Decision, decide
from ..connections.protocols import BUILT_IN
from ..connections.secret_scope import UNKNOWN, Owner
from ..criu.images import ImageSet, read
from ..namespaces.network_choice import NetMode, is_new
from ..report import Finding
from .host_facts import HostFacts, PlanOptions

_HALF_CLOSED = {
    "close-wait": "the peer had closed it before the dump",
    "fin-wait-1": "the program had closed its side before the dump",
    "fin-wait-2": "the program had closed its side before the dump",
    "last-ack": "both sides had closed it before the dump",
    "closing": "both sides had closed it before the dump",
}
_ENDED = "it ended with the tree at the dump, which was made without keeping it"
_ALONE = "the tree gets a new network namespace, from which nothing outside can be reached"


class ConnectionPlan(Struct, frozen=True):
    """One external connection and what is done with it."""

    record: ConnectionRecord
    decision: Decision

    @property
    def policy(self) -> str:
        """keep | reconnect | hangup | refuse."""
        return self.decision.policy

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``restore --dry-run``."""
        return {
            **about(self.record),
            "policy": self.policy,
            "application": self.decision.application,
            "reason": self.decision.reason,
            "rule": self.decision.rule,
        }


def owners_in(images: ImageSet) -> dict[int, Owner]:
    """Return the credentials that CRIU will give each process of the tree.

    They are needed before a process has them: until then it has those of CRIU.  For a tree with
    user namespaces of its own the users are not known here.
    """
    if any(name.startswith("userns-") for name in images.names()):
        return dict.fromkeys(images.pids(), UNKNOWN)
    found = {}
    for pid in images.pids():
        core = read(images.folder, f"core-{pid}.img", "CORE")[0]
        if core.HasField("thread_core"):
            held = core.thread_core.creds
            found[pid] = Owner(frozenset({held.uid, held.euid, held.suid, held.fsuid}))
    return found


def about(record: ConnectionRecord) -> dict[str, Any]:
    """Return the fields that every report begins with."""
    names = {"pid": record.pid, "fd": record.fd, "local": record.local, "peer": record.peer}
    return {**names, "protocol": record.protocol or record.family}


def plan_connections(
    connections: tuple[ConnectionRecord, ...],
    facts: HostFacts,
    options: PlanOptions,
    commands: Mapping[int, str],
    net: NetMode,
    findings: list[Finding],
) -> tuple[ConnectionPlan, ...]:
    """Return the plan for each external connection; what cannot be done is added to `findings`.

    In a `net` namespace that is made for this tree there is no peer to connect to.
    """
    made = []
    ended: dict[str, list[ConnectionRecord]] = {}
    for record in connections:
        if not record.external or record.family not in ("inet", "inet6", "unix"):
            continue
        if record.linked and options.grouped:
            linked = Decision("keep", reason=f"session {record.linked} is restored with it")
            made.append(ConnectionPlan(record, linked))
            if net != "shared":  # the other end comes there as well
                _report(record, linked, facts, net, findings)
            continue
        if record.linked:
            record = _unlinked(record, asked=options.connections)
        decided = decide(
            record, options.rules, options.connections, commands=commands, owners=facts.owners
        )
        if options.deadline is not None:
            decided = replace(decided, deadline=options.deadline)
        asked = options.connections is not None
        decided = _hooked(_here(record, decided, facts, asked=asked), options.hooks)
        if is_new(net) and not record.queued and not record.peer.startswith("/"):
            decided = _alone(decided, asked=asked)
        made.append(ConnectionPlan(record, decided))
        if decided.policy == "hangup" and decided.reason:
            ended.setdefault(decided.reason, []).append(record)
        else:
            _report(record, decided, facts, net, findings)
    for reason, alike in ended.items():
        first = alike[0]
        name = f"{first.local} -> {first.peer}" if len(alike) == 1 else f"{len(alike)} connections"
        findings.append(
            Finding(
                "warning",
                "connection-hangup",
                f"{name} will be hung up: {reason}",
                "",
                first.pid,
                first.fd,
            )
        )
    return tuple(made)


def _unlinked(record: ConnectionRecord, *, asked: str | None) -> ConnectionRecord:
    """Return the record of a connection between members of a group, for a restore of one alone.

    The other end is not there: what was decided for the group does not apply.
    """
    if asked == "keep":
        return record
    return replace(record, policy="", linked="", ended=True, reason="")


def in_use(record: ConnectionRecord, facts: HostFacts) -> bool:
    """Return whether a socket of this host has this one's address: a listener's, or a pair's inside
    the tree.
    """
    if record.waits:
        return f"{record.protocol} {record.local}" in facts.listening
    return (
        not record.external
        and bool(record.peer)
        and (record.local, record.peer) in facts.open_pairs
    )


def _here(
    record: ConnectionRecord, decided: Decision, facts: HostFacts, *, asked: bool
) -> Decision:
    if record.datagrams:
        return _datagram(record, decided, facts, asked=asked)
    if decided.policy == "keep" and record.ended and not asked:
        return replace(decided, policy="hangup", reason=_ENDED)
    if decided.policy != "reconnect":
        return decided
    if record.state in _HALF_CLOSED:
        return replace(decided, policy="hangup", reason=_HALF_CLOSED[record.state])
    if record.family == "unix" and not record.peer:
        return replace(decided, policy="hangup", reason="its peer has no name to connect to")
    if decided.application == JOURNAL and record.peer in facts.missing_peers:
        return replace(decided, policy="hangup", reason="there is no journal here")
    return replace(decided, application=decided.application or "tcp")


def _hooked(decided: Decision, hooks: frozenset[str] | None) -> Decision:
    """Replace a policy whose rule names a hook that this host does not have."""
    name = decided.application
    if (
        decided.policy != "reconnect"
        or hooks is None
        or not name
        or name in BUILT_IN
        or name in hooks
    ):
        return decided
    return replace(
        decided, policy=decided.on_failure, reason=f"there is no reconnect hook {name!r} here"
    )


def _datagram(
    record: ConnectionRecord, decided: Decision, facts: HostFacts, *, asked: bool
) -> Decision:
    """Decide for a datagram socket.

    The peer keeps no state of it, so a new connection from another address is as good, if the peer
    has a name.
    """
    if decided.policy not in ("keep", "reconnect"):
        return decided
    if record.family == "unix":
        if not record.peer:
            return replace(decided, policy="hangup", reason="its peer has no name to connect to")
        missing = record.peer in facts.missing_peers
        if decided.policy == "keep" and not missing:
            return decided
        return replace(
            decided,
            policy="reconnect",
            application="",
            reason=f"CRIU cannot connect it to {record.peer}" if missing else "",
        )
    why = _not_here(record, facts)
    if decided.policy == "keep" and (not why or asked):
        return decided
    return replace(decided, policy="reconnect", application="", reason=why)


def _not_here(record: ConnectionRecord, facts: HostFacts) -> str:
    """Return why the connection cannot be kept here; "" if it can."""
    if record.local not in facts.local_addresses:
        return f"{record.local} is not an address of this host"
    if (record.local, record.peer) in facts.open_pairs:
        return f"another socket of this host is {record.local} connected to {record.peer}"
    return ""


def _alone(decided: Decision, *, asked: bool) -> Decision:
    """Decide for a new network namespace, with only a loopback interface."""
    if decided.policy == "reconnect" or (decided.policy == "keep" and not asked):
        return replace(decided, policy=decided.on_failure, reason=_ALONE)
    return decided


def _report(
    record: ConnectionRecord,
    decided: Decision,
    facts: HostFacts,
    net: NetMode,
    findings: list[Finding],
) -> None:
    if decided.policy == "refuse":
        why = f": {decided.reason}" if decided.reason else ""
        hint = (
            "Restore with --connections "
            f"reconnect{' or hangup' if record.ended else ', hangup or keep'}."
        )
        text = f"the connection {record.local} -> {record.peer} may not be given up{why}"
        findings.append(Finding("error", "connection-refuse", text, hint, record.pid, record.fd))
    elif decided.policy == "keep" and record.ended:
        text = f"the connection to {record.peer} cannot be kept: {_ENDED}"
        hint = (
            "Restore with --connections reconnect or hangup. To keep connections, dump with "
            "--connections keep too."
        )
        findings.append(Finding("error", "connection-ended", text, hint, record.pid, record.fd))
    elif decided.policy == "keep" and record.family != "unix":
        why = _ALONE if is_new(net) else _not_here(record, facts)
        if why:
            code = (
                "address-in-use"
                if not is_new(net) and record.local in facts.local_addresses
                else "address"
            )
            hint = "Move the address here, or restore with --connections reconnect or hangup."
            text = f"{why}, so the connection to {record.peer} cannot be kept"
            findings.append(Finding("error", code, text, hint, record.pid, record.fd))
