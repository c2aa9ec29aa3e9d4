"""What is sent to journald about a service, and when; the integration tests use the real
journald.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.decision import decide
from criuctl.connections.protocols.base import CannotRebuild, PeerAway, Settings
from criuctl.connections.protocols.journal import PROTOCOL
from criuctl.connections.rules import Rules
from criuctl.proc.procfs import unit_in

SESSION = {"identifier": "web", "unit": "web.service"}
RECORD = ConnectionRecord(
    pid=os.getpid(),
    fd=1,
    family="unix",
    type="stream",
    state="established",
    peer="/run/systemd/journal/stdout",
    external=True,
).with_use(application="journal", direction="initiated", session=SESSION)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        yield ours, theirs


@pytest.mark.parametrize(
    ("groups", "unit"),
    [
        ("0::/system.slice/web.service\n", "web.service"),
        (
            "5:memory:/elsewhere\n1:name=systemd:/system.slice/web.service/below\n0::/\n",
            "web.service",
        ),
        ("0::/user.slice/user-1.slice/user@1.service/app.slice/app.service\n", "app.service"),
        ("0::/user.slice/user-1.slice/session-3.scope\n", "session-3.scope"),
        ("0::/system.slice/a:b.service\n", "a:b.service"),
        ("4:cpu:/system.slice/other.service\n0::/\n", ""),
        ("", ""),
    ],
)
def test_the_unit_comes_from_the_control_group(groups: str, unit: str) -> None:
    assert unit_in(groups) == unit


@pytest.mark.parametrize(
    ("session", "options", "message"),
    [
        (SESSION, {}, "web\nweb.service\n30\n1\n0\n0\n0\n"),
        (
            {"identifier": "web", "unit": ""},
            {"identifier": "shop", "priority": 3},
            "shop\n\n3\n1\n0\n0\n0\n",
        ),
        ({}, {}, f"{Path('/proc/self/comm').read_text().strip()}\n\n30\n1\n0\n0\n0\n"),
    ],
)
def test_the_message_to_journald(
    session: dict[str, Any],
    options: dict[str, Any],
    message: str,
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """And nothing can come from there, as before."""
    ours, theirs = pair
    PROTOCOL.reconnect(
        ours, RECORD.with_use(session=session), Settings(options=options, process=os.getpid()), 0.0
    )
    assert theirs.recv(4096).decode() == message
    with pytest.raises(BrokenPipeError):
        theirs.send(b"x", socket.MSG_NOSIGNAL)
    ours.send(b"a line\n")
    assert theirs.recv(4096) == b"a line\n"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"unit": "x"}, "knows no option unit"),
        ({"priority": 192}, "from 0 to 191"),
        ({"priority": True}, "from 0 to 191"),
        ({"identifier": 3}, "must be text"),
        ({"identifier": "a\nb"}, "more than one line"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], match: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(CannotRebuild, match=match):
        PROTOCOL.reconnect(pair[0], RECORD, Settings(options=options), 0.0)


def test_a_journal_that_takes_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(PeerAway):
        PROTOCOL.reconnect(pair[0], RECORD, Settings(), 0.0)


def test_what_is_recorded(pair: tuple[socket.socket, socket.socket]) -> None:
    found = PROTOCOL.inspect(pair[0], RECORD, Settings(), 0.0)
    assert found == {
        "identifier": Path("/proc/self/comm").read_text().strip(),
        "unit": unit_in(Path("/proc/self/cgroup").read_text()),
    }


@pytest.mark.parametrize(
    ("wish", "default", "policy"),
    [
        (None, "hangup", "reconnect"),
        (None, "refuse", "reconnect"),
        ("keep", "hangup", "reconnect"),
        ("reconnect", "hangup", "reconnect"),
        ("hangup", "reconnect", "hangup"),
        ("refuse", "hangup", "refuse"),
    ],
)
def test_it_is_connected_again_by_default(wish: str | None, default: str, policy: str) -> None:
    decided = decide(RECORD, Rules(default=default), wish)
    assert (decided.policy, decided.reason) == (policy, "")
    assert decided.deadline == 5
