"""Copies of whole groups: each set talks among itself, and to no other set or the original."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.asking import Asked, Team
from support.keeper import wait_until
from support.operating import TIMEOUT
from support.pauses import paused

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_sets_of_copies_talk_among_themselves(asked: Asked) -> None:
    team = Team(asked)
    asked.ask("agent", "kept[0].send(b'on its way')")
    body = asked("fork", "--group", "team", "-n", 2)
    assert body["from"] == "team" and body["frozen_ms"] > 0
    [warning] = body["warnings"]
    assert "random generators" in warning
    assert [one["group"] for one in body["forks"]] == ["team-1", "team-2"]
    members = [member for one in body["forks"] for member in one["members"]]
    assert {c["outcome"] for member in members for c in member["connections"]} == {"kept"}
    originals = set(Team.NAMES)
    assert team.groups() == {"team": originals, "team-1": Team.copies(1), "team-2": Team.copies(2)}
    assert asked("status", "db-2")["forked_from"] == "db"
    [stored] = asked("list", "--group", "team")
    assert stored["checkpoint"] == body["checkpoint"]

    # What was on its way came to each.
    copies = ("", "-1", "-2")
    assert {asked.ask(f"db{copy}", "kept[0].recv(99)") for copy in copies} == {"b'on its way'"}
    for copy in copies:
        asked.ask(f"agent{copy}", f"kept[0].send(b'of agent{copy}')")
    for copy in reversed(copies):
        assert asked.ask(f"db{copy}", "kept[0].recv(99)") == f"b'of agent{copy}'"
        team.talk("hello", copy)

    # A new connection leads to the same set, although its path leads others to the original.
    for copy in reversed(copies):
        team.connect_again(copy)

    # A set is a group like any other.
    asked("snapshot", "--group", "team-1")
    asked("kill", "--group", "team-1", "--timeout", 0)
    assert team.groups() == {"team": originals, "team-2": Team.copies(2)}
    asked("restore", "--group", "team-1")
    team.talk("again", "-1")
    team.connect_again("-1")
    team.talk("still")
    asked("kill", "--group", "team", "--timeout", 0)
    team.talk("alone", "-2")


def test_copies_of_a_stored_group(asked: Asked) -> None:
    """By its number, or the newest of a group that does not run."""
    team = Team(asked)
    asked("dump", "--group", "team")
    first = asked("fork", "--group", "team@1", "--prefix", "try")
    assert first["frozen_ms"] is None and first["number"] == 1
    tried = {f"try-{name}-1" for name in Team.NAMES}
    assert team.groups() == {"try-1": tried}
    second = asked("fork", "--group", "team", "--ttl", "1h")
    assert second["checkpoint"] == first["checkpoint"]
    assert asked("status", "db-1")["facts"]["ends"] > time.time()
    team.talk("hello", "-1")
    assert asked("fork", "--group", "other", check=False)["exit_code"] == 3


def test_they_have_a_network_of_their_own(asked: Asked) -> None:
    """TCP connections among them stay, and new ones are made within the set."""
    for name in ("db", "agent"):
        asked.begin(name, "--group", "team")
    server = "socket.create_server(('127.0.0.1', 0))"
    port = asked.ask("db", f"kept.append({server}) or kept[0].getsockname()[1]")
    connect = f"kept.append(socket.create_connection(('127.0.0.1', {port})))"
    asked.ask("agent", connect)
    asked.ask("db", "kept.append(kept[0].accept()[0])")
    body = asked("fork", "--group", "team", "-n", 2)
    for number, one in enumerate(body["forks"], 1):
        spaces = {os.readlink(f"/proc/{member['pid']}/ns/net") for member in one["members"]}
        assert len(spaces) == 1 and os.readlink("/proc/self/ns/net") not in spaces
        assert all("network of their own" in str(member["warnings"]) for member in one["members"])
        asked.ask(f"agent-{number}", f"kept[0].send(b'set {number}')")
    asked.ask("agent", "kept[0].send(b'original')")
    for name, words in (("db-1", "set 1"), ("db-2", "set 2"), ("db", "original")):
        assert asked.ask(name, "kept[1].recv(99)") == f"b'{words}'"
    for copy in ("", "-1"):
        asked.ask(f"agent{copy}", f"{connect} or kept[1].send(b'new{copy}')")
        asked.ask(f"db{copy}", "kept.append(kept[0].accept()[0])")
        assert asked.ask(f"db{copy}", "kept[2].recv(99)") == f"b'new{copy}'"

    # Also when it has gone with the set, and is made again.
    asked("dump", "--group", "team-1")
    asked("restore", "--group", "team-1")
    asked.ask("db-1", "kept[1].send(b'back')")
    assert asked.ask("agent-1", "kept[0].recv(99)") == "b'back'"


def test_one_set_fails(asked: Asked) -> None:
    """None of it is left, and the other runs; if all fail, the checkpoint goes, too."""
    team = Team(asked)
    asked.hook("db-1|*-2) exit 10;;")
    command = asked.start("fork", "--group", "team", "-n", 3)
    assert command.process.wait(TIMEOUT * 2) == 11, command.output()
    states = {one["group"]: one["state"] for one in command.json()["forks"]}
    assert states == {"team-1": "failed", "team-2": "failed", "team-3": "running"}
    assert {one["session"] for one in asked("ls")} == {*Team.NAMES, *Team.copies(3)}
    team.talk("hello", "-3")
    refused = asked("fork", "--group", "team", "-n", 2, check=False)
    assert refused["exit_code"] == 10 and "db-1" in refused["error"]["message"]
    assert [one["number"] for one in asked("list", "--group", "team")] == [1]
    assert len(asked("list", "db")) == 1
    team.talk("still")


def test_an_interrupted_fork_leaves_nothing(asked: Asked) -> None:
    """Whether the first set is about to run, or runs already."""
    team = Team(asked)
    with paused(asked, "group-decided", "fork", "--group", "team", "-n", "2") as held:
        held.kill(signal.SIGINT)
        held.go_on()
        assert held.command.process.wait(TIMEOUT * 2) == 130, held.command.output()
    assert {one["session"] for one in asked("ls")} == set(Team.NAMES)
    gate = asked.home.path / "gate"
    os.mkfifo(gate)
    asked.hook(f"db-2) read nothing < '{gate}';;")
    command = asked.start("fork", "--group", "team", "-n", 2)
    wait_until(lambda: Team.copies(1) <= asked.names(), TIMEOUT, "the first set runs")
    command.process.kill(signal.SIGINT)
    assert command.process.wait(TIMEOUT * 2) == 130, command.output()
    assert {one["session"] for one in asked("ls")} == set(Team.NAMES)
    assert asked("list", "--group", "team", check=False)["exit_code"] == 3
    team.talk("still")


def test_a_copy_alone_is_in_no_group(asked: Asked) -> None:
    """Else it would be stored and ended with its original's group."""
    asked.begin("one", "--group", "team", "--label", "tier=dev")
    asked("snapshot", "one")
    asked("restore", "one", "--as", "copied")
    asked("fork", "one", "--as", "forked")
    labels = {one["session"]: one["labels"] for one in asked("ls")}
    assert labels["one"] == {"tier": "dev", "group": "team"}
    assert labels["copied"] == labels["forked"] == {"tier": "dev"}
    asked("kill", "--group", "team", "--timeout", 0)
    assert asked.names() == {"copied", "forked"}


def test_what_it_refuses(asked: Asked) -> None:
    for options in (["one", "--group", "team"], ["--group", "team", "--as", "one"], []):
        assert asked("fork", *options, check=False)["exit_code"] == 2
    assert asked("fork", "--group", "no/name", check=False)["exit_code"] == 2
