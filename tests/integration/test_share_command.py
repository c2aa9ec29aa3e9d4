"""`criuctl share` as people use it, with a real sshd as the relay."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators, ended
from support.relaying import Relay

pytestmark = pytest.mark.integration


def _tunnel(relay: Relay, made: dict[str, Any]) -> int:
    """The PID of the ssh that has this share's tunnel now."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0] == b"ssh" and any(made["id"].encode() in word for word in words):
                return int(entry.name)
    return 0


def _back(relay: Relay, made: dict[str, Any], before: int) -> None:
    """Wait until the guest is back, by another ssh than `before`.  What is typed at the moment of
    a loss may be lost.
    """
    wait_until(lambda: _tunnel(relay, made) not in (0, before), TIMEOUT, "another ssh runs")
    wait_until(lambda: relay.of(made)["state"] == "up", TIMEOUT, "the tunnel is up again")
    wait_until(lambda: relay.of(made)["guest"] == "here", TIMEOUT, "the guest is back")
    assert relay.of(made)["address"] == made["address"]


def _says(window: pexpect.spawn[bytes], number: int) -> None:
    window.sendline(f"echo said-$(({number}*2))")
    window.expect(rf"said-{number * 2}\b".encode())


def test_it_outlives_its_terminal_and_its_tunnel(operators: Operators, relay: Relay) -> None:
    operators.shell("web")
    desk = operators.window("share", "web", "--via", relay.url, "--role", "write", columns=200)
    desk.expect(rb"criuctl attach '(share://\S+)'")
    assert isinstance(desk.match, re.Match)
    line = desk.match[1].decode()
    desk.expect(rb"write until \S+, for one guest, once")
    ended(desk)  # the terminal hangs up
    (made,) = operators("share", "list")
    assert (made["session"], made["role"], made["state"]) == ("web", "write", "up")
    assert (made["guest"], made["operator"]) == ("none", f"share-{made['id']}")

    guest = operators.window("attach", "share:")
    guest.expect(b"Invitation: ")
    guest.sendline(line)
    guest.expect(rb"\$")  # what is typed before that is dropped with the echo's return
    _says(guest, 21)
    assert relay.of(made)["guest"] == "here"
    os.kill(tunnel := _tunnel(relay, made), signal.SIGKILL)
    _back(relay, made, tunnel)
    _says(guest, 34)
    guest.send(b"\x1d")
    guest.expect(rb"detached from web")
    assert ended(guest) == 0
    wait_until(lambda: relay.of(made)["guest"] == "away", TIMEOUT, "the guest has left")
    assert re.search(rf"{made['id']} +web +write +up +away", operators.text("share", "list"))
    assert "revoked" in operators.text("share", "revoke", made["id"])
    assert (relay.of(made)["state"], relay.of(made)["why"]) == ("ended", "revoked")
    wait_until(lambda: not _tunnel(relay, made), TIMEOUT, "the tunnel is gone")


def test_a_relay_that_runs_no_commands(operators: Operators, relay: Relay) -> None:
    operators.shell("web")
    relay.allow('restrict,port-forwarding,command="/bin/false"')
    made = relay.share("web")
    assert made["reachable"]
    first = _tunnel(relay, made)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: _tunnel(relay, made) not in (0, first), TIMEOUT, "another ssh runs")
    wait_until(lambda: relay.of(made)["state"] == "up", TIMEOUT, "it is up again")
    assert relay.of(made)["address"] == made["address"]


def test_a_relay_that_comes_back(operators: Operators, relay: Relay) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    guest = operators.window("attach", made["invitation"])
    _says(guest, 21)
    relay.end()
    os.kill(tunnel := _tunnel(relay, made), signal.SIGKILL)
    wait_until(lambda: relay.of(made)["trouble"], TIMEOUT, "it is noticed")
    assert relay.of(made)["state"] == "connecting"
    relay.begin()
    _back(relay, made, tunnel)
    _says(guest, 34)


def test_what_is_refused(operators: Operators, relay: Relay) -> None:
    operators.shell("web")
    for code, *words in (
        (2, "share", "web"),
        (2, "share", "web", "--via", "nowhere"),
        (2, "share", "web", "--via", relay.url, "--for", "8d"),
        (2, "share", "web", "--via", relay.url, "--address", "a b"),
        (2, "share", "web", "--via", relay.url, "--role", "admin"),
        (3, "share", "nothing", "--via", relay.url),
        (7, "share", "web", "--via", "ssh://root@127.0.0.1:9"),
        (3, "share", "revoke", "00000000"),
        (2, "ui", "--host", "share://x:1/y#z"),
    ):
        found = operators(*words, check=False)
        assert found["exit_code"] == code, (words, found)
    assert operators("share", "list") == []
    for line in ("share://x", "share://h:1/00000000#" + "A" * 43 + "." + "A" * 42):
        window = operators.window("attach", line)
        assert ended(window) == 2
    relay.allow('restrict,command="/bin/false"')  # no forwarding either
    found = operators("share", "web", "--via", relay.url, check=False)
    assert found["exit_code"] == 7 and found["error"]["hint"], found
    assert operators("share", "list") == []


def test_not_from_inside_a_session(operators: Operators, relay: Relay) -> None:
    operators.shell("web")
    command = f"{sys.executable} -m criuctl share web --via {relay.url}; echo code-$?"
    operators("send", "web", "--text", command, "--enter")
    operators("wait", "web", "--match", "code-9", "--timeout", TIMEOUT)
    assert operators("share", "list") == []
