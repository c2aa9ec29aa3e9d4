"""The rules for connections, and which rule fits a connection.

The configuration's ``connection_rules`` is a list; the first rule whose every ``match`` key fits a
connection is the rule for it (`find`). `rule_parsing` reads the rules, `decision` decides by them.

References to secrets in a rule are never written to a manifest: a restore takes them from its own
host's configuration. `secret_scope` decides which connections may use a secret.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, field

from ..checkpoint.connection_record import ConnectionRecord, endpoint
from . import secret_scope
from .detect import by_appearance
from .protocols.base import Settings
from .secret_scope import Owner, Terms

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

TRANSPORTS = frozenset({"tcp", "udp", "unix"})
DEADLINE = 30.0  # seconds in which a connection must be back, unless a rule sets another time


class Match(Struct, frozen=True):
    """The conditions of a rule; an empty tuple matches everything."""

    peers: tuple[Network, ...] = ()
    locals: tuple[Network, ...] = ()  # the tree's address
    ports: tuple[tuple[int, int], ...] = ()  # of the peer; of accepted connections, the tree's
    hosts: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()  # tcp, udp, unix, or an application protocol
    processes: tuple[str, ...] = ()  # globs of the command of a process that holds it
    # of every process that holds it; -1 for a name that does not exist here
    users: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    # globs of the unix path: the peer's, of accepted connections the tree's
    paths: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether it names the peer, and does not match any peer."""
        anywhere = any(not network.prefixlen for network in self.peers) or any(
            glob[0] in "*?[" for glob in self.paths
        )
        return bool(self.peers or self.hosts or self.paths) and not anywhere


class Rule(Struct, frozen=True):
    """One rule; `where` is how errors and reports name it."""

    where: str
    match: Match = field(default_factory=Match)
    policy: str = ""  # "" leaves it to the dump's decision and the default
    application: str = ""
    settings: Settings = field(default_factory=Settings)
    on_failure: str = "hangup"
    deadline: float = DEADLINE
    drain: float = 0.0

    @property
    def lends(self) -> bool:
        """Whether it has a secret."""
        return secret_scope.has_secret(self.settings)

    @property
    def terms(self) -> Terms | None:
        """The conditions for the use of its secret; None if it has none."""
        return Terms(self.match.users, self.match.pinned) if self.lends else None


class Rules(Struct, frozen=True):
    """All rules, in order, and the policy of connections that no rule matches."""

    rules: tuple[Rule, ...] = ()
    default: str = "hangup"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names that a dump has to resolve, each once."""
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.match.hosts))


def owners_of(record: ConnectionRecord, owners: Mapping[int, Owner]) -> list[Owner]:
    """Return the credentials of the processes that hold it; none if they are not known for all."""
    pids = {pid for pid, _fd in record.holders or ((record.pid, record.fd),)}
    return [owners[pid] for pid in sorted(pids)] if pids <= owners.keys() else []


def find(
    record: ConnectionRecord,
    rules: Rules,
    commands: Mapping[int, str],
    addresses: Mapping[str, Collection[str]],
    owners: Mapping[int, Owner],
) -> tuple[Rule | None, str]:
    """Return the first rule that matches, and the host name by which it does."""
    for rule in rules.rules:
        if rule.match.users:
            holders = owners_of(record, owners)
            if not holders or not all(holder.uids <= set(rule.match.users) for holder in holders):
                continue
        host = _matches(rule.match, record, commands, addresses)
        if host is not None:
            return rule, host
    return None, ""


def _matches(
    match: Match,
    record: ConnectionRecord,
    commands: Mapping[int, str],
    addresses: Mapping[str, Collection[str]],
) -> str | None:
    """Return the host name that matched ("" for a match without one); None for no match."""
    accepted = record.direction == "accepted"
    unix = record.family == "unix"
    peer_host, peer_port = ("", 0) if unix else endpoint(record.peer)
    if match.directions and record.direction not in match.directions:
        return None
    if match.protocols and not _speaks(record, match.protocols):
        return None
    if match.peers and not _within(peer_host, match.peers):
        return None
    if match.locals and (unix or not _within(endpoint(record.local)[0], match.locals)):
        return None
    if match.ports:
        port = 0 if unix else endpoint(record.local)[1] if accepted else peer_port
        if not any(low <= port <= high for low, high in match.ports):
            return None
    if match.paths:
        path = record.local if accepted else record.peer
        if not unix or not any(fnmatchcase(path, glob) for glob in match.paths):
            return None
    if match.processes:
        held_by = {
            commands.get(pid, "") for pid, _fd in record.holders or ((record.pid, record.fd),)
        }
        if not any(fnmatchcase(command, glob) for command in held_by for glob in match.processes):
            return None
    if not match.hosts:
        return ""
    return next(
        (
            name
            for name in match.hosts
            if record.host == name or peer_host in addresses.get(name, ())
        ),
        None,
    )


def _speaks(record: ConnectionRecord, protocols: Iterable[str]) -> bool:
    transport = "unix" if record.family == "unix" else record.protocol
    return any(
        p == transport if p in TRANSPORTS else p == (record.application or by_appearance(record))
        for p in protocols
    )


def _within(host: str, networks: Sequence[Network]) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return any(address in network for network in networks)
