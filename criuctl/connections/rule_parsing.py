"""Reading the rules of the configuration.

``connection_rules`` is a list of mappings; `parse` checks every key and value of each and returns
`Rules`. A `ConfigError` names the file, the rule and the key. A malformed reference to a secret may
be a secret itself, so no error repeats its value.
"""

from __future__ import annotations

import ipaddress
import pwd
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from ..config import Config, ConnectionPolicy
from ..errors import ConfigError
from .protocols.base import Settings
from .rules import DEADLINE, Match, Network, Rule, Rules

POLICIES = get_args(ConnectionPolicy)
FALLBACKS = ("hangup", "refuse")
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
