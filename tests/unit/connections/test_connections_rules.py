"""Rules: what is read, what is refused and how it is said, and which connection gets which
policy.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.checkpoint.connection_record import ConnectionRecord, endpoint
from criuctl.config import Config, load
from criuctl.connections.decision import Decision, decide
from criuctl.connections.rule_parsing import POLICIES, parse
from criuctl.connections.rules import Rules
from criuctl.connections.secret_scope import Owner, Terms
from criuctl.errors import ConfigError

OF_ROOT = {pid: Owner(frozenset({0})) for pid in (10, 11)}
TCP: dict[str, Any] = {
    "pid": 10,
    "fd": 3,
    "holders": ((10, 3), (11, 4)),
    "family": "inet",
    "type": "stream",
    "protocol": "tcp",
    "state": "established",
    "local": "10.0.0.1:40000",
    "peer": "10.1.2.3:5432",
    "external": True,
    "direction": "initiated",
}


def record(**changes: Any) -> ConnectionRecord:
    return ConnectionRecord(**{**TCP, **changes})


def unix(**changes: Any) -> ConnectionRecord:
    return record(
        **{
            "family": "unix",
            "protocol": "",
            "local": "",
            "peer": "/run/db/.s.PGSQL.5433",
            **changes,
        }
    )


def rules(*each: dict[str, Any], default: str = "hangup") -> Rules:
    raw = tuple((f"here: connection_rules[{n}]", rule) for n, rule in enumerate(each, 1))
    return parse(Config(connections=default, connection_rules=raw))  # type: ignore[arg-type]  # any policy


@pytest.mark.parametrize(
    ("match", "meant"),
    [
        ({}, True),
        ({"peer": "10.1.2.3"}, True),
        ({"peer": "10.1.0.0/16"}, True),
        ({"peer": ["192.168.0.0/16", "10.0.0.0/8"]}, True),
        ({"peer": "10.1.2.4"}, False),
        ({"peer": "::/0"}, False),
        ({"local": "10.0.0.1"}, True),
        ({"local": ["10.0.0.0/24", "::1"]}, True),
        ({"local": "10.1.2.3"}, False),
        ({"port": 5432}, True),
        ({"port": "5000-5999"}, True),
        ({"port": [80, "443", 5432]}, True),
        ({"port": [80, "5433-6000"]}, False),
        ({"protocol": "tcp"}, True),
        ({"protocol": ["udp", "postgresql"]}, True),
        ({"protocol": "redis"}, False),
        ({"protocol": "unix"}, False),
        ({"process": "work*"}, True),
        ({"process": "main"}, True),
        ({"process": "other"}, False),
        ({"direction": "initiated"}, True),
        ({"direction": "accepted"}, False),
        ({"host": "db.example"}, True),
        ({"host": ["x.example", "db.example"]}, True),
        ({"host": "x.example"}, False),
        ({"path": "/run/*"}, False),
        ({"peer": "10.0.0.0/8", "port": 80}, False),
        ({"peer": "10.0.0.0/8", "port": 5432, "process": "main", "host": "db.example"}, True),
    ],
)
def test_what_a_rule_matches(match: dict[str, Any], meant: bool) -> None:
    made = rules({"match": match, "policy": "keep"})
    addresses = {"db.example": {"10.1.2.3", "::1"}, "x.example": {"10.1.2.9"}}
    decision = decide(record(), made, commands={10: "main", 11: "worker"}, addresses=addresses)
    assert decision.policy == ("keep" if meant else "hangup")
    assert decision.host == ("db.example" if meant and "host" in match else "")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"direction": "accepted", "local": "10.0.0.1:8080", "peer": "10.9.9.9:51000"},
            {"port": 8080},
        ),
        (
            {"family": "inet6", "local": "[fd00::1]:40000", "peer": "[fd00::2]:5432"},
            {"peer": "fd00::/8", "port": 5432},
        ),
        (
            {"family": "unix", "protocol": "", "local": "", "peer": "/run/db/.s.PGSQL.5433"},
            {"path": "/run/db/*"},
        ),
        (
            {"family": "unix", "protocol": "", "local": "", "peer": "/run/db/.s.PGSQL.5433"},
            {"protocol": "postgresql"},
        ),
        (
            {"family": "unix", "protocol": "", "local": "", "peer": "@bus"},
            {"path": "@b?s", "protocol": "unix"},
        ),
        (
            {
                "family": "unix",
                "protocol": "",
                "direction": "accepted",
                "local": "/run/me",
                "peer": "",
            },
            {"path": "/run/me"},
        ),
        ({"peer": "10.1.2.3:7777", "peer_process": "99 (redis-server)"}, {"protocol": "redis"}),
        ({"peer": "10.1.2.3:7777", "application": "postgresql"}, {"protocol": "postgresql"}),
    ],
)
def test_what_else_a_rule_matches(changes: dict[str, Any], match: dict[str, Any]) -> None:
    assert decide(record(**changes), rules({"match": match, "policy": "refuse"})).policy == "refuse"


def test_the_first_rule_wins() -> None:
    made = rules(
        {"match": {"port": 1}, "policy": "refuse"}, {"policy": "keep"}, {"policy": "hangup"}
    )
    decision = decide(record(), made)
    assert (decision.policy, decision.rule) == ("keep", "here: connection_rules[2]")


def test_precedence() -> None:
    """Command line, rule, what the dump decided, default."""
    made = rules({"match": {"port": 5432}, "policy": "keep"}, default="refuse")
    assert decide(record(), made).policy == "keep"
    assert decide(record(), made, "hangup").policy == "hangup"
    other = record(peer="10.1.2.3:80")
    assert decide(other, made).policy == "refuse"
    assert decide(record(peer="10.1.2.3:80", policy="hangup"), made).policy == "hangup"
    assert decide(record(policy="hangup"), made).policy == "keep"


def test_a_rule_without_a_policy_leaves_the_dumps() -> None:
    made = rules({"secret": {"env": "PW"}, "deadline": 5})
    decision = decide(record(policy="reconnect", application="redis"), made, owners=OF_ROOT)
    assert (decision.policy, decision.application, decision.deadline) == ("reconnect", "redis", 5.0)
    assert decision.settings.secret == {"env": "PW"}


def test_what_a_rule_says_comes_through() -> None:
    rule = {
        "policy": "reconnect",
        "application": "postgresql",
        "secret": {"command": "pass show db"},
        "options": {"user": "me"},
        "on_failure": "refuse",
        "deadline": 7,
        "drain": 2.5,
    }
    decision = decide(record(), rules(rule), owners=OF_ROOT)
    assert decision == Decision(
        "reconnect",
        "postgresql",
        decision.settings,
        on_failure="refuse",
        deadline=7.0,
        drain=2.5,
        rule="here: connection_rules[1]",
        terms=Terms(),
    )
    assert decision.settings.secret == {"command": ["pass", "show", "db"]}
    assert decision.settings.options == {"user": "me"}


@pytest.mark.parametrize(
    ("what", "wish", "policy", "said"),
    [
        (record(direction="accepted"), "reconnect", "hangup", "accepted"),
        (record(direction="accepted"), "keep", "keep", ""),
        (record(direction="accepted"), "refuse", "refuse", ""),
        (record(state="close-wait"), "reconnect", "hangup", "close-wait"),
        (record(protocol="udp", type="dgram"), None, "keep", ""),
        (record(protocol="udp", type="dgram"), "reconnect", "keep", ""),
        (record(protocol="udp", type="dgram"), "hangup", "hangup", ""),
        (unix(type="dgram"), None, "keep", ""),
        (unix(), None, "hangup", ""),
        (unix(), "keep", "hangup", "unix"),
        (unix(), "reconnect", "reconnect", ""),
        (unix(peer=""), "reconnect", "hangup", "no name"),
        (
            record(policy="hangup", reason="a transaction is open"),
            None,
            "hangup",
            "a transaction is open",
        ),
    ],
)
def test_what_cannot_be_had_becomes_something_honest(
    what: ConnectionRecord, wish: str | None, policy: str, said: str
) -> None:
    decision = decide(what, Rules(), wish)
    assert decision.policy == policy
    assert said in decision.reason if said else decision.reason == ""


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({"tcp": {"bytes_acked": 1}}, "reconnect"),
        ({"tcp": {"bytes_acked": 2}}, "hangup"),
        ({"tcp": {"bytes_acked": 1}, "wqueue": 1}, "hangup"),
        ({"tcp": {"bytes_acked": 1}, "state": "fin-wait-2"}, "hangup"),
    ],
)
@pytest.mark.parametrize("wish", [None, *POLICIES])
def test_what_its_own_server_has_not_accepted(
    changes: dict[str, Any], policy: str, wish: str | None
) -> None:
    decided = decide(record(queued=True, **changes), rules({"match": {}, "policy": "refuse"}), wish)
    assert decided.policy == policy
    assert "had not accepted it" in decided.reason


def test_what_the_dump_found_out_is_not_overruled_by_a_rule() -> None:
    """A session that could not be learned cannot be set up, though the rule would like to."""
    lost = record(policy="hangup", reason="a transaction is open")
    decision = decide(lost, rules({"policy": "reconnect"}))
    assert (decision.policy, decision.reason) == ("hangup", "a transaction is open")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("{}", "must be a list of mappings"),
        ("[1]", "must be a list of mappings"),
        ("[{police: keep}]", r"connection_rules\[1\]: unknown key 'police'"),
        ("[{policy: keep}, {policy: perhaps}]", r"connection_rules\[2\]: policy must be one of"),
        ("[{match: [a]}]", r"connection_rules\[1\]: match must be a mapping"),
        ("[{match: {pear: 1.2.3.4}}]", r"connection_rules\[1\]\.match: unknown key 'pear'"),
        ("[{match: {peer: db.example}}]", r"match\.peer must be an address or a network"),
        ("[{match: {peer: 5}}]", r"match\.peer must be text"),
        ("[{match: {port: 70000}}]", r"match\.port must be a port"),
        ("[{match: {port: 9-3}}]", r"match\.port must be a port"),
        ("[{match: {port: true}}]", r"match\.port must be a port"),
        ("[{match: {direction: in}}]", r"match\.direction must be accepted or initiated"),
        ("[{match: {host: ''}}]", r"match\.host must be text"),
        ("[{application: 5}]", "application must be the name"),
        ("[{options: [a]}]", "options must be a mapping"),
        ("[{on_failure: keep}]", "on_failure must be one of hangup, refuse"),
        ("[{deadline: soon}]", "deadline must be a number of seconds"),
        ("[{drain: -1}]", "drain must be a number of seconds"),
        ("[{secret: {env: A, file: B}}]", r"secret must be a mapping with one of the keys"),
        ("[{secret: {command: []}}]", r"secret\.command must be a list"),
    ],
)
def test_errors_name_file_rule_and_key(raw: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"connection_rules: {raw}\n")
    with pytest.raises(ConfigError) as raised:
        parse(load(str(path), {"HOME": str(tmp_path)}))
    assert str(path) in raised.value.message
    assert re.search(words, raised.value.message)


def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("connection_rules: [{secret: hunter2}, ]\n")
    with pytest.raises(ConfigError) as raised:
        parse(load(str(path), {"HOME": str(tmp_path)}))
    assert "hunter2" not in f"{raised.value.message}{raised.value.hint}"


def test_rules_from_a_variable() -> None:
    config = load(
        None,
        {"HOME": "/nowhere", "CRIUCTL_CONNECTION_RULES": "[{match: {port: 5432}, policy: keep}]"},
    )
    assert decide(record(), parse(config)).policy == "keep"
    with pytest.raises(ConfigError, match="CRIUCTL_CONNECTION_RULES"):
        load(None, {"HOME": "/nowhere", "CRIUCTL_CONNECTION_RULES": "[{"})


def test_hosts_are_each_reported_once() -> None:
    assert rules({"match": {"host": ["a", "b"]}}, {"match": {"host": "a"}}).hosts == ("a", "b")


addresses = st.ip_addresses()
ports = st.integers(1, 65535)
records = st.builds(
    record,
    family=st.sampled_from(["inet", "inet6", "unix"]),
    type=st.sampled_from(["stream", "dgram", "seqpacket"]),
    protocol=st.sampled_from(["tcp", "udp", ""]),
    state=st.sampled_from(["established", "close-wait", "syn-sent", "close"]),
    local=st.text(max_size=30),
    peer=st.one_of(
        st.text(max_size=30),
        st.builds(lambda a, p: f"[{a}]:{p}" if a.version == 6 else f"{a}:{p}", addresses, ports),
    ),
    direction=st.sampled_from(["accepted", "initiated", ""]),
    policy=st.sampled_from(["", *POLICIES]),
    reason=st.sampled_from(["", "because"]),
    application=st.sampled_from(["", "redis", "anything"]),
    peer_process=st.text(max_size=30),
)


@given(what=records, wish=st.sampled_from([None, *POLICIES]), default=st.sampled_from(POLICIES))
def test_every_record_gets_a_policy_that_it_can_have(
    what: ConnectionRecord, wish: str | None, default: str
) -> None:
    """Also records from a manifest that is not trusted."""
    made = rules(
        {"match": {"peer": "10.0.0.0/8", "port": "1-40000", "path": "/x*"}, "policy": "keep"},
        default=default,
    )
    decision = decide(what, made, wish)
    assert decision.policy in POLICIES
    if decision.policy == "reconnect":
        assert what.direction != "accepted"
        assert what.type != "dgram"
    if decision.policy == "keep" and what.type != "dgram":
        assert what.family != "unix"
    if wish is not None and decision.policy != wish and what.type != "dgram":
        assert decision.reason


@given(address=addresses, port=ports)
def test_endpoints_are_read_back(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    text = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    assert endpoint(text) == (str(address), port)
