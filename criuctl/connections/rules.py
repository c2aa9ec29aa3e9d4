"""The policy of each connection: the rules of the configuration, and the one place that decides.

``connection_rules`` is a list; the first rule whose every ``match`` key fits a connection is the
rule for it. Rules are read only here, and deciding is a pure function of a record, the rules, and
the command line. It serves the dump, where the record has no policy yet, and the restore, where the
record has the dump's decision. In order of precedence: the command line; the first matching rule;
at a restore, the dump's decision; the default policy. Not every request can be fulfilled: `decide`
returns the nearest policy, and the reason.

References to secrets in a rule are never written to a manifest: a restore takes them from its own
host's configuration. `secret_scope` decides which connections may use a secret.
"""

from __future__ import annotations

import ipaddress
import pwd
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord
from ..config import Config, ConnectionPolicy
from ..errors import ConfigError
from . import secret_scope
from .protocols.base import Settings
from .secret_scope import Owner, Terms

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

POLICIES = get_args(ConnectionPolicy)
TRANSPORTS = frozenset({"tcp", "udp", "unix"})
FALLBACKS = ("hangup", "refuse")
DEADLINE = 30.0  # seconds in which a connection must be back, unless a rule sets another time
JOURNAL = "journal"  # the application protocol of the output of services
_JOURNAL_DEADLINE = 5.0  # where journald runs, it is reachable at once
_QUEUED_DEADLINE = 2.0  # the server's queue has room at once, or not before the server runs
_SYN = 1  # bytes that are acknowledged before anything was sent
_RULE_KEYS = (
    "match",
    "policy",
    "application",
    "secret",
    "options",
    "on_failure",
    "deadline",
    "drain",
)
_MATCH_KEYS = ("peer", "local", "port", "host", "protocol", "process", "user", "direction", "path")
_SECRET_KEYS = ("env", "file", "command")
_MOST_SECONDS = 86400.0
UNKNOWN_USER = -1  # a user ID that no process has
_ALIVE = ("established", "syn-sent", "syn-recv")


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


# -- deciding


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


def owners_of(record: ConnectionRecord, owners: Mapping[int, Owner]) -> list[Owner]:
    """Return the credentials of the processes that hold it; none if they are not known for all."""
    pids = {pid for pid, _fd in record.holders or ((record.pid, record.fd),)}
    return [owners[pid] for pid in sorted(pids)] if pids <= owners.keys() else []


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


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of an internet address in a record; ("", 0) for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return "", 0
    return host.removeprefix("[").removesuffix("]"), int(port)


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
    from .detect import by_appearance

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


# -- reading


def parse(config: Config) -> Rules:
    """Read the rules of the configuration; `ConfigError` names file, rule and key."""
    return Rules(
        tuple(_rule(raw, where) for where, raw in config.connection_rules), config.connections
    )


def _rule(raw: Mapping[str, Any], where: str) -> Rule:
    _known(raw, _RULE_KEYS, where)
    match = raw.get("match", {})
    if not isinstance(match, Mapping):
        raise ConfigError(f"{where}: match must be a mapping, not {match!r}")
    options = raw.get("options", {})
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigError(f"{where}: options must be a mapping")
    application = raw.get("application", "")
    if not isinstance(application, str):
        raise ConfigError(
            f"{where}: application must be the name of a protocol or a hook, not {application!r}"
        )
    return Rule(
        where=where,
        match=_match(match, f"{where}.match"),
        policy=_choice(raw, "policy", POLICIES, "", where),
        application=application,
        settings=Settings(_secret(raw.get("secret", {}), f"{where}.secret"), dict(options)),
        on_failure=_choice(raw, "on_failure", FALLBACKS, "hangup", where),
        deadline=_seconds(raw, "deadline", DEADLINE, where),
        drain=_seconds(raw, "drain", 0.0, where),
    )


def _match(raw: Mapping[str, Any], where: str) -> Match:
    _known(raw, _MATCH_KEYS, where)
    directions = _texts(raw, "direction", where)
    for direction in directions:
        if direction not in ("accepted", "initiated"):
            raise ConfigError(f"{where}.direction must be accepted or initiated, not {direction!r}")
    return Match(
        peers=tuple(_network(text, f"{where}.peer") for text in _texts(raw, "peer", where)),
        locals=tuple(_network(text, f"{where}.local") for text in _texts(raw, "local", where)),
        ports=tuple(_ports(item, f"{where}.port") for item in _items(raw, "port")),
        hosts=_texts(raw, "host", where),
        protocols=_texts(raw, "protocol", where),
        processes=_texts(raw, "process", where),
        users=tuple(_user(item, f"{where}.user") for item in _items(raw, "user")),
        directions=directions,
        paths=_texts(raw, "path", where),
    )


def _known(raw: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r}", hint=f"Known keys: {', '.join(known)}."
            )


def _items(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key, [])
    return list(value) if isinstance(value, list | tuple) else [value]


def _texts(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    items = _items(raw, key)
    if not all(isinstance(item, str) and item for item in items):
        raise ConfigError(f"{where}.{key} must be text or a list of texts, not {raw[key]!r}")
    return tuple(items)


def _network(text: str, where: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        hint = "For a host name, use the key host."
        raise ConfigError(
            f"{where} must be an address or a network such as 10.0.0.0/8, not {text!r}", hint=hint
        ) from None


def _ports(item: Any, where: str) -> tuple[int, int]:
    text = str(item) if isinstance(item, int) and not isinstance(item, bool) else item
    if isinstance(text, str):
        low, dash, high = text.partition("-")
        if (
            low.isascii()
            and low.isdigit()
            and (high.isascii() and high.isdigit() if dash else True)
        ):
            first, last = int(low), int(high) if dash else int(low)
            if 0 < first <= last < 65536:
                return first, last
    raise ConfigError(
        f'{where} must be a port, a range such as "8000-8099", or a list of them, not {item!r}'
    )


def _user(item: Any, where: str) -> int:
    if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 32:
        return item
    if not isinstance(item, str) or not item:
        raise ConfigError(
            f"{where} must be a user's name or number, or a list of them, not {item!r}"
        )
    try:
        return pwd.getpwnam(item).pw_uid
    except KeyError:
        return UNKNOWN_USER  # a configuration may be shared by several hosts; `doctor` reports it


def _choice(
    raw: Mapping[str, Any], key: str, choices: Sequence[str], default: str, where: str
) -> str:
    value = raw.get(key, default)
    if key in raw and value not in choices:
        raise ConfigError(f"{where}: {key} must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _seconds(raw: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = raw.get(key, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= _MOST_SECONDS
    ):
        raise ConfigError(
            f"{where}: {key} must be a number of seconds from 0 to {_MOST_SECONDS:.0f}, not "
            f"{value!r}"
        )
    return float(value)


def _secret(raw: Any, where: str) -> dict[str, Any]:
    """Read a reference to a secret. A malformed one may be a secret itself, so its value is never
    repeated.
    """
    if raw == {}:
        return {}
    hint = (
        "Say where the secret is found: {env: NAME}, {file: PATH} or {command: [PROGRAM, "
        "ARGUMENT, ...]}."
    )
    if not isinstance(raw, Mapping) or len(raw) != 1 or next(iter(raw)) not in _SECRET_KEYS:
        raise ConfigError(
            f"{where} must be a mapping with one of the keys {', '.join(_SECRET_KEYS)}", hint=hint
        )
    ((kind, value),) = raw.items()
    if kind == "command":
        words = value.split() if isinstance(value, str) else value
        if (
            not isinstance(words, list)
            or not words
            or not all(isinstance(word, str) for word in words)
        ):
            raise ConfigError(f"{where}.command must be a list of texts", hint=hint)
        return {"command": words}
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}.{kind} must be text", hint=hint)
    return {kind: value}
