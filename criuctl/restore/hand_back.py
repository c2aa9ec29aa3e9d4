"""Give external connections back, while the restored tree has not run one instruction yet.

A connection to outside the tree has its other half in another kernel.  With policy ``keep`` CRIU
has restored it as it was.  With ``reconnect`` and ``hangup`` its socket was restored without a peer
(`ImageSet.give_up`): the same descriptor numbers, duplicates, children's copies and epoll
registrations.  Here that very socket is borrowed with pidfd_getfd, and connected again, or shut
down so that the program sees the end at once: EOF on read, EPIPE on write, EPOLLHUP on poll, never
a hang.

The report contains what was found out, not what was planned: a connection is called kept when its
socket has its peer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.connection_record import UNCONNECTED, ConnectionRecord, endpoint
from ..config import Config
from ..connections import sockopts
from ..connections.protocols.known import find
from ..connections.reconnect import Engine, Job
from ..errors import CriuctlError, RestoreFailed
from ..proc import connecting
from ..proc.credentials import Credentials
from ..proc.syscalls import borrow_socket
from ..proc.tree import read_tree
from ..report import Reporter
from .connection_plan import ConnectionPlan, about

_BIND_ADDRESS_NO_PORT = 24


def _lost(record: ConnectionRecord) -> str:
    """Return what is lost of its receive queue.

    CRIU saves those of TCP and of unix sockets, which only some outcomes can use.
    """
    if not record.rqueue:
        return ""
    if record.family != "unix" and record.datagrams:
        # the kernel counts memory here, not bytes
        return "datagrams that had come and were not read are lost"
    return f"{record.rqueue} bytes that had come and were not read are lost with it"


def set_options(
    records: Iterable[ConnectionRecord], pids: Mapping[int, int], reporter: Reporter
) -> None:
    """Set options that CRIU does not restore on its sockets; report those that cannot be set."""
    for record in records:
        if not (record.options or record.state == UNCONNECTED) or record.pid not in pids:
            continue
        try:
            pidfd = os.pidfd_open(pids[record.pid])
            try:
                with borrow_socket(pidfd, record.fd) as sock:
                    refused = sockopts.apply(sock, record.options) + _bound_again(sock, record)
            finally:
                os.close(pidfd)
        except OSError:
            refused = sorted(record.options)
        if refused:
            reporter.warning(
                f"PID {record.pid} fd {record.fd}: socket {record.local}: not restored: "
                f"{', '.join(refused)}"
            )


def _bound_again(sock: socket.socket, record: ConnectionRecord) -> list[str]:
    """Give a socket its address if it was bound to an address but no port
    (IP_BIND_ADDRESS_NO_PORT): CRIU binds ports only.
    """
    host, port = endpoint(record.local)
    if (
        record.state != UNCONNECTED
        or record.protocol not in ("tcp", "udp")
        or port
        or host in ("", "0.0.0.0", "::")
    ):
        return []
    try:
        without_port = sock.getsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT)
        sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        sock.bind((host, 0))
        sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, without_port)
    except OSError as error:
        return [f"its address ({error.strerror})"]
    return []


def outer_pids(root: int) -> dict[int, int]:
    """Return PID in the tree -> PID on this host, for the restored tree of `root`."""
    return {p.ns_pid: p.pid for p in read_tree(root)}


def endings(plans: Sequence[ConnectionPlan]) -> dict[tuple[int, int], bool]:
    """Return the sockets that CRIU is to restore without their peer, for `ImageSet.give_up`."""
    gone = [c for c in plans if c.policy in ("reconnect", "hangup")]
    return {(c.record.pid, c.record.fd): c.policy == "hangup" for c in gone}


class HandBack(Struct):
    """All external connections of one restore."""

    config: Config
    plans: Sequence[ConnectionPlan]
    pids: Mapping[int, int]  # PID in the tree -> PID on this host
    facts: Mapping[str, Any]  # facts about the restore, for hooks
    # the future credentials of the processes, by their PIDs in the tree
    users: Mapping[int, Credentials] = field(default_factory=dict)

    def run(self) -> list[dict[str, Any]]:
        """Carry out the plan; return one report per connection.

        Raises `RestoreFailed` when a rule requires a connection that is not back.
        """
        reports = {id(c): self._settle(c) for c in self.plans if c.policy != "reconnect"}
        reports |= self._reconnect([c for c in self.plans if c.policy == "reconnect"])
        return [reports[id(c)] for c in self.plans]

    def borrow(self, record: ConnectionRecord) -> socket.socket:
        """Return a duplicate of the program's socket; the caller closes it."""
        pidfd = os.pidfd_open(self._pid(record))
        try:
            return borrow_socket(pidfd, record.fd)
        finally:
            os.close(pidfd)

    def _pid(self, record: ConnectionRecord) -> int:
        if record.pid not in self.pids:
            raise RestoreFailed(
                f"PID {record.pid}, which holds a connection to {record.peer}, was not restored",
                pid=record.pid,
            )
        return self.pids[record.pid]

    def _settle(self, plan: ConnectionPlan) -> dict[str, Any]:
        """Settle what needs no peer: kept, or hung up."""
        began = time.monotonic()
        record, reason = plan.record, plan.decision.reason
        try:
            with self.borrow(record) as sock:
                if plan.policy == "keep":
                    why = _not_kept(sock, record)
                    reason = _and(
                        reason,
                        _lost(record) if record.family != "unix" and record.datagrams else "",
                    )
                    return _report(
                        plan,
                        "failed" if why else "kept",
                        why or reason,
                        seconds=time.monotonic() - began,
                    )
                # CRIU has ended a unix stream
                if sock.family != socket.AF_UNIX or sock.type == socket.SOCK_DGRAM:
                    connecting.hang_up(sock)
                    reason = _and(reason, _lost(record))
        except OSError as error:
            raise RestoreFailed(
                f"PID {record.pid} fd {record.fd}: its connection to {record.peer} cannot be "
                f"given back: {error.strerror}",
                pid=record.pid,
                fd=record.fd,
            ) from error
        return _report(plan, "hangup", reason, seconds=time.monotonic() - began)

    def _reconnect(self, plans: Sequence[ConnectionPlan]) -> dict[int, dict[str, Any]]:
        if not plans:
            return {}
        jobs = []
        for plan in plans:
            decided, record = plan.decision, plan.record
            jobs.append(
                Job(
                    record=replace(record, host=decided.host),
                    protocol=find(self.config, decided.application, self.facts)
                    if decided.application
                    else None,
                    settings=decided.settings,
                    seconds=decided.deadline,
                    # the record is bound now, not when called
                    borrow=lambda record=record: self.borrow(record),  # type: ignore[misc]
                    pid=self._pid(record),
                    user=self.users.get(record.pid),
                )
            )
        reports = {}
        for plan, result in zip(plans, Engine(jobs).run(), strict=True):
            reason, details = result.reason, dict(result.facts)
            if result.connected:
                reason = _and(plan.decision.reason, self._after(plan.record, details))
            elif plan.decision.on_failure == "refuse":
                remedy = result.hint or "Restore when the peer is there."
                raise RestoreFailed(
                    f"PID {plan.record.pid} fd {plan.record.fd}: the connection to "
                    f"{plan.record.peer} is not back: {reason}",
                    hint=(
                        f"{remedy} The rule for it says on_failure: refuse; --connections hangup "
                        "goes on without."
                    ),
                    pid=plan.record.pid,
                    fd=plan.record.fd,
                )
            else:
                reason = f"{reason}; hung up"
            outcome = "reconnected" if result.connected else "failed"
            reports[id(plan)] = _report(
                plan, outcome, reason, result.attempts, result.seconds, details, result.hint
            )
        return reports

    def _after(self, record: ConnectionRecord, details: dict[str, Any]) -> str:
        """Set options that CRIU does not know on a connected socket, and report what was in its
        queues.
        """
        try:
            with self.borrow(record) as sock:
                refused = sockopts.apply(sock, record.options)
        except (OSError, CriuctlError):
            refused = sorted(record.options)
        if refused:
            details["options_lost"] = refused
        return _lost(record)


def _not_kept(sock: socket.socket, record: ConnectionRecord) -> str:
    """Return why a connection that was to be kept is not; "" for one that is."""
    try:
        sock.getpeername()
    except OSError as error:
        return f"CRIU has restored its socket without {record.peer}: {error.strerror}"
    return ""


def _and(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _report(
    plan: ConnectionPlan,
    outcome: str,
    reason: str,
    attempts: int = 0,
    seconds: float = 0.0,
    details: Mapping[str, Any] | None = None,
    hint: str = "",
) -> dict[str, Any]:
    return {
        **about(plan.record),
        "policy": plan.policy,
        "outcome": outcome,
        "reason": reason,
        "hint": hint,
        "application": plan.decision.application,
        "attempts": attempts,
        "seconds": round(seconds, 3),
        "details": dict(details or {}),
    }
