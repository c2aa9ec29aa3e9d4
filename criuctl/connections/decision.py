"""The one place that decides the policy of a connection.

`decide` is a pure function of a record, the rules, and the command line. It serves the dump, where
the record has no policy yet, and the restore, where the record has the dump's decision. In order of
precedence: the command line; the first matching rule; at a restore, the dump's decision; the
default policy. Not every request can be fulfilled: `decide` returns the nearest policy, and the
reason.

A rule's secret serves only a connection whose processes may have it (`secret_scope`): for any other
the decision is without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord
from . import secret_scope
from .protocols.base import Settings
from .rules import DEADLINE, Rules, find, owners_of
from .secret_scope import Owner, Terms

JOURNAL = "journal"  # the application protocol of the output of services
_JOURNAL_DEADLINE = 5.0  # where journald runs, it is reachable at once
_QUEUED_DEADLINE = 2.0  # the server's queue has room at once, or not before the server runs
_SYN = 1  # bytes that are acknowledged before anything was sent
_ALIVE = ("established", "syn-sent", "syn-recv")


class Decision(Struct, frozen=True):
    """The decision for one connection."""

    policy: str  # keep | reconnect | hangup | refuse
    # with policy reconnect: postgresql, redis, journal, tcp, or the name of a hook; "" is not known
    # yet
    application: str = ""
    settings: Settings = field(default_factory=Settings)
    on_failure: str = "hangup"  # hangup | refuse: the policy if a reconnect is not possible
    deadline: float = DEADLINE  # seconds a reconnect may take
    drain: float = 0.0  # seconds a dump may wait for it to become idle
    reason: str = ""  # why the policy differs from the requested one
    # the rule that decided; "" for the command line, the dump's decision or the default
    rule: str = ""
    host: str = ""  # the name of the peer in that rule
    terms: Terms | None = None  # of the rule's secret


def decide(
    record: ConnectionRecord,
    rules: Rules,
    requested: str | None = None,
    *,
    commands: Mapping[int, str] | None = None,
    addresses: Mapping[str, Collection[str]] | None = None,
    owners: Mapping[int, Owner] | None = None,
) -> Decision:
    """Return the policy for an external connection, and everything that a reconnect needs.

    `requested` is the command line's policy for all. `commands` are the commands of the tree's
    processes by the PIDs that the record uses, `owners` their credentials according to the kernel;
    `addresses` are those of `Rules.hosts`, at a dump (later `record.host` is used).
    """
    if record.queued:
        return _not_accepted(record)
    owners = owners or {}
    rule, host = find(record, rules, commands or {}, addresses or {}, owners)
    policy = requested or (rule.policy if rule else "") or record.policy or _default(record, rules)
    deadline = _JOURNAL_DEADLINE if record.application == JOURNAL else DEADLINE
    # A rule that matches by the address is about that address, whatever name the record has for it.
    named = host or ("" if rule is not None and rule.match.peers else record.host)
    decided = Decision(policy, record.application, deadline=deadline, host=named)
    if rule is not None:
        decided = replace(
            decided,
            application=rule.application or record.application,
            settings=rule.settings,
            on_failure=rule.on_failure,
            deadline=rule.deadline,
            drain=rule.drain,
            rule=rule.where,
            terms=rule.terms,
        )
    if not decided.application and decided.policy == "reconnect":
        from .detect import by_appearance

        decided = replace(decided, application=by_appearance(record))
    return unless_lent(_possible(record, decided, asked=bool(requested)), owners_of(record, owners))


def unless_lent(decided: Decision, holders: Sequence[Owner]) -> Decision:
    """Return `decided`, without a secret that the connection's `holders` may not use."""
    if decided.terms is None or secret_scope.may_have(decided.terms, holders):
        return decided
    decided = replace(decided, settings=secret_scope.without_secret(decided.settings))
    return (
        _instead(decided, secret_scope.refusal(decided.rule, holders))
        if decided.policy == "reconnect"
        else decided
    )


def _not_accepted(record: ConnectionRecord) -> Decision:
    """Decide for a connection within the tree that was not accepted. No policy applies: its server
    does not know it, and gets a similar one if no data is lost.

    Data that was sent is in the queue of the server's end, which cannot be read before it is
    accepted.
    """
    sent = record.wqueue or record.state != "established" or record.tcp.get("bytes_acked", 0) > _SYN
    if sent:
        return Decision(
            "hangup", reason="its server had not accepted it, and what was sent on it is lost"
        )
    return Decision("reconnect", deadline=_QUEUED_DEADLINE, reason="its server had not accepted it")


def _default(record: ConnectionRecord, rules: Rules) -> str:
    # A datagram socket has no state in another kernel: connected to the same address it is what it
    # was.
    if record.datagrams:
        return "keep"
    # Nor has a service's socket to the journal; without it the service ends as soon as it prints
    # something, or its output is lost.
    return "reconnect" if record.application == JOURNAL else rules.default


def _possible(record: ConnectionRecord, decided: Decision, *, asked: bool) -> Decision:
    """Return the possible policy for such a connection that is nearest to `decided`."""
    if record.datagrams:
        return replace(decided, policy="keep") if decided.policy == "reconnect" else decided
    if decided.policy == "keep" and record.application == JOURNAL:
        decided = replace(decided, policy="reconnect")
    if decided.policy == "keep" and record.family == "unix":
        return _instead(
            decided,
            "the other half of a unix connection cannot be kept: it is closed when the tree ends",
        )
    if decided.policy != "reconnect":
        # If the dump could not fulfil a request, its reason still applies.
        return (
            replace(decided, reason=record.reason) if decided.policy == record.policy else decided
        )
    if record.state and record.state not in _ALIVE:
        return replace(
            decided, policy="hangup", reason=f"one side has closed it already ({record.state})"
        )
    if record.direction == "accepted":
        return replace(
            decided,
            policy="hangup",
            reason="it was accepted: only the client outside can connect again",
        )
    if record.family == "unix" and not record.peer:
        return _instead(decided, "the peer has no name to connect to")
    if record.reason and not asked:
        return _instead(decided, record.reason)  # the dump found that it cannot be rebuilt
    return decided


def _instead(decided: Decision, reason: str) -> Decision:
    return replace(decided, policy=decided.on_failure, reason=reason)
