"""The wire as strangers use it: a client in another language, other versions, and clients that send
nonsense.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.holding import TIMEOUT, Holders

from criuctl.errors import SessionGone, UsageError
from criuctl.session import names, protocol
from criuctl.session.client.session import Session
from criuctl.session.holder.command_operations import CommandOperations
from criuctl.session.holder.environment import SessionEnvironment
from criuctl.session.holder.event_operations import EventOperations
from criuctl.session.holder.holder_operations import HolderOperations
from criuctl.session.holder.inside_operations import InsideOperations
from criuctl.session.holder.output_operations import OutputOperations
from criuctl.session.holder.presence_operations import PresenceOperations
from criuctl.session.holder.step_operations import StepOperations
from criuctl.session.holder.tree_operations import TreeOperations
from criuctl.session.holder.write_operations import WriteOperations
from criuctl.session.sessions import forget

pytestmark = pytest.mark.integration

GROUPS: list[Any] = [
    PresenceOperations,
    OutputOperations,
    EventOperations,
    CommandOperations,
    WriteOperations,
    TreeOperations,
    HolderOperations,
    StepOperations,
    InsideOperations,
    SessionEnvironment,
]
OPERATIONS_OF_THE_HOLDER = sorted(
    name
    for kind in GROUPS
    for name in kind(
        **dict.fromkeys(kind.__init__.__annotations__.keys() - {"return"}, MagicMock())
    ).operations
)


@pytest.fixture
def socket_path(holders: Holders) -> Path:
    """The socket of a session that only its own program may change."""
    started = holders.start("sh", "-c", "stty raw; echo ready; exec cat")
    holders.connect().wait_match("ready", since="start", timeout=TIMEOUT)
    return Path(started.socket)


def raw(path: Path, hello: dict[str, Any] | None = None) -> socket.socket:
    """A connection with the preface sent and read."""
    sock = names.connect(path)
    sock.settimeout(TIMEOUT)
    sock.sendall(protocol.preface("raw/1"))
    line = b""
    while not line.endswith(b"\n"):
        line += sock.recv(1)
    assert protocol.common_version(line.rstrip(b"\n")) == 1
    if hello is not None:
        sock.sendall(protocol.json_frame({"id": 1, "op": "hello", **hello}))
    return sock


def answers(sock: socket.socket) -> list[dict[str, Any]]:
    """Every message until the holder closes."""
    decoder = protocol.Decoder()
    decoder.version = 1
    found = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            decoder.feed(data)
            found += [json.loads(body) for kind, body in decoder.frames() if kind == protocol.JSON]
    return found


def talk(sock: socket.socket, frames: list[bytes]) -> list[dict[str, Any]]:
    """Send all of it and read until the holder closes."""
    with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(b"".join(frames))
        sock.shutdown(socket.SHUT_WR)
        return answers(sock)
    return []


def test_a_client_in_another_language(holders: Holders) -> None:
    started = holders.start("sh", "-c", "read line; echo heard: $line; exit 42")
    script = Path(__file__).with_name("client.pl")
    done = subprocess.run(
        ["perl", str(script), started.socket], capture_output=True, timeout=TIMEOUT, check=False
    )
    assert (done.returncode, done.stderr) == (42, b"")
    assert done.stdout == b"spoken from perl\r\nheard: spoken from perl\r\n"


def test_a_client_in_javascript(holders: Holders) -> None:
    """It attaches, types when it has read that the program is ready, and waits for its end."""
    program = "stty -echo; echo ready; read -r line; echo heard: $line; exit 42"
    started = holders.start("sh", "-c", program)
    script = Path(__file__).with_name("client.mjs")
    done = subprocess.run(
        ["node", str(script), started.socket, "spoken from node: é\n"],
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout.decode()) == (
        42,
        "ready\r\nheard: spoken from node: é\r\n",
    ), done.stderr
    said = done.stderr.decode().splitlines()
    assert "exit" in said and "typed at 7" in said


def test_every_operation_is_documented_and_every_documented_one_exists() -> None:
    text = (Path(protocol.__file__).parent / "PROTOCOL.md").read_text()
    headings = [line[4:].split("(")[0] for line in text.splitlines() if line.startswith("### ")]
    documented = {word.strip() for heading in headings for word in heading.split(",")} - {""}

    assert {*OPERATIONS_OF_THE_HOLDER, "hello"} == documented


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"criuctl-session 7 9 future/1\n",
        b"x" * 200,
        protocol.preface("raw/1") + b"\xff\xff\xff\xffJ",
        protocol.preface("raw/1") + b"\0\0\0\0\0",
        protocol.preface("raw/1") + b"\0\0\0\x03Zab",
        protocol.preface("raw/1") + b"\0\0\0\x03I\0\0",
        protocol.preface("raw/1") + b"\0\0\0\x03J[]",
        protocol.preface("raw/1") + protocol.json_frame({"op": "hello"}),
        protocol.preface("raw/1") + protocol.json_frame({"id": 0, "op": "hello"}),
        protocol.preface("raw/1") + protocol.json_frame({"id": 1 << 32, "op": "hello"}),
        protocol.preface("raw/1") + protocol.json_frame({"id": True, "op": "hello"}),
    ],
)
def test_a_client_of_another_protocol_gets_an_error_and_is_cut_off(
    holders: Holders, socket_path: Path, stream: bytes
) -> None:
    with names.connect(socket_path) as sock:
        sock.settimeout(TIMEOUT)
        sock.sendall(stream)
        data = b""
        while piece := sock.recv(65536):
            data += piece
    assert data.startswith(b"criuctl-session 1 1 ") and b'"code":"protocol"' in data
    assert holders.connect().status()["state"] == "running"


def test_nothing_is_done_for_who_did_not_say_hello(holders: Holders, socket_path: Path) -> None:
    with raw(socket_path) as sock:
        sock.sendall(
            protocol.json_frame({"id": 9, "op": "kill"})
            + protocol.input_frame(10, b"x")
            + protocol.input_frame(0, b"y")
        )
        sock.shutdown(socket.SHUT_WR)
        found = answers(sock)
    assert [(m["id"], m["error"]["code"]) for m in found] == [
        (9, "hello-first"),
        (10, "hello-first"),
        (0, "hello-first"),
    ]


def test_a_client_that_does_not_say_what_it_is_is_refused(
    holders: Holders, socket_path: Path
) -> None:
    """A halt would have to guess whether to stop it."""
    with raw(socket_path, {"name": "mute", "role": "write"}) as sock:
        sock.shutdown(socket.SHUT_WR)
        (refused,) = answers(sock)
    assert refused["error"]["code"] == "bad-request"
    assert "'kind' is missing" in refused["error"]["message"]
    assert "human, agent, service" in refused["error"]["hint"]
    assert "mute" not in {one["name"] for one in holders.connect().status()["operators"]}


def test_unexpected_descriptors_are_closed(holders: Holders, socket_path: Path) -> None:
    client = holders.connect()
    pid = client.status()["holder_pid"]
    before = len(os.listdir(f"/proc/{pid}/fd"))
    reader, writer = os.pipe()
    for _ in range(20):
        client.request("status", fds=[writer] * 10)
    os.close(writer)
    assert os.read(reader, 1) == b"" and len(os.listdir(f"/proc/{pid}/fd")) == before
    os.close(reader)
    hostile = holders.connect()
    frame = protocol.json_frame({"id": 1, "op": "status"})
    with contextlib.suppress(OSError):
        for at in range(len(frame)):  # a frame that takes for ever, with descriptors on every byte
            socket.send_fds(hostile._socket, [frame[at : at + 1]], [0] * 8)
    with pytest.raises(SessionGone):
        hostile.receive(TIMEOUT)
    assert len(os.listdir(f"/proc/{pid}/fd")) == before


def test_descriptors_are_of_the_frame_that_they_come_with_whatever_came_before_it(
    holders: Holders, socket_path: Path
) -> None:
    """A client may ask again before it is answered: the kernel gives both requests at once, with
    the descriptors.
    """
    pid = holders.state()["holder"]["pid"]
    hello = {"id": 1, "op": "hello", "kind": "agent", "name": "eager", "role": "admin"}
    argv = ["sh", "-c", "echo there >&7"]
    spawn = {
        "id": 2,
        "op": "spawn",
        "argv": argv,
        "env": {"PATH": os.environ["PATH"]},
        "numbers": [7],
    }
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, names.connect(socket_path) as client:
        os.kill(pid, signal.SIGSTOP)
        client.sendall(protocol.preface("eager") + protocol.json_frame(hello))
        socket.send_fds(client, [protocol.json_frame(spawn)], [writing])
        os.kill(pid, signal.SIGCONT)
        os.close(writing)
        assert reader.read() == b"there\n"


WORDS = [
    "start",
    "now",
    "observe",
    "write",
    "admin",
    "human",
    "exit",
    "output",
    "state",
    "session",
    "op-1",
    "op-2",
    "INT",
]
KEYS = [
    *(
        "from",
        "to",
        "max",
        "size",
        "write",
        "for",
        "offset",
        "states",
        "since",
        "limit",
        "rows",
        "cols",
        "signal",
        "ttl",
        "queue",
    ),
    *(
        "request",
        "kind",
        "name",
        "role",
        "operator",
        "token",
        "text",
        "base64",
        "checkpoint",
        "ended",
        "pid",
        "incarnation",
    ),
    *("master", "argv", "env", "numbers", "grace", "force", "code", "executable"),
]
OPERATIONS = [*OPERATIONS_OF_THE_HOLDER, "hello", "no-such"]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.sampled_from(WORDS),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
MESSAGES = st.builds(
    lambda identifier, op, rest: protocol.json_frame({**rest, "id": identifier, "op": op}),
    st.one_of(st.integers(1, 9), VALUES),
    st.one_of(st.sampled_from(OPERATIONS), VALUES),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5),
)
FRAMES = st.one_of(
    MESSAGES,
    MESSAGES,
    st.binary(max_size=40),
    st.builds(
        lambda kind, body: struct.pack(">IB", len(body) + 1, kind) + body,
        st.sampled_from(b"JODIx"),
        st.binary(max_size=40),
    ),
)
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(frames=st.lists(FRAMES, max_size=12), hello=st.booleans())
def test_an_observer_who_sends_nonsense_has_no_effect(
    holders: Holders, socket_path: Path, frames: list[bytes], hello: bool
) -> None:
    """No crash, no hang, no unauthorised effect: the session is as it was, and its holder
    answers.
    """
    witness = Session.connect(
        "s", config=holders.config, kind="human", role="observe", operator="witness"
    )
    before = witness.status()
    greeting = {"kind": "agent", "name": "fuzz", "role": "observe"} if hello else None
    # Without a greeting its own hello could ask for any role; that is not what is tested here.
    talk(
        raw(socket_path, greeting), [frame for frame in frames if hello or b'"hello"' not in frame]
    )
    after = witness.status()
    for key in (
        "state",
        "pid",
        "holder_pid",
        "incarnation",
        "rows",
        "cols",
        "offset",
        "lease",
        "held_input",
        "queued_input",
        "checkpointing",
    ):
        assert after[key] == before[key], key
    witness.leave()


@FUZZ
@given(
    frames=st.lists(
        MESSAGES.filter(lambda frame: b'"shutdown"' not in frame and b'"kill"' not in frame),
        max_size=12,
    )
)
def test_an_admin_who_sends_nonsense_breaks_nothing(
    holders: Holders, socket_path: Path, frames: list[bytes]
) -> None:
    """Allowed operations with senseless arguments: whatever they do, the holder lives and
    answers.
    """
    talk(raw(socket_path, {"kind": "human", "name": "fuzz", "role": "admin"}), frames)
    with Session.connect("s", config=holders.config, kind="human", role="admin") as witness:
        witness.resume()
        witness.set_role("human", "fuzz", None)
        assert witness.status()["state"] == "running"


def test_no_answer_is_longer_than_a_frame_may_be(holders: Holders) -> None:
    """However long the command is, whatever was typed, and however much of it is not read."""
    started = holders.start(
        "sh", "-c", "stty raw; echo ready; exec sleep 600", "sh", *["x" * 1000] * 1500
    )
    client = holders.connect()
    client.wait_match("ready", since="start", timeout=TIMEOUT)
    command = client.status()["command"]
    assert command[:4] == ["sh", "-c", "stty raw; echo ready; exec sleep 600", "sh"] and command[
        -1
    ].endswith("...")
    assert holders.state()["command"] == command
    for _ in range(14):
        client.submit_input(b"z" * (64 << 10))
    waiting = client.request("checkpoint-begin")["pending_input"]
    assert waiting and client.status()["queued_input"] > 800_000
    client.request("checkpoint-abort")
    client.kill(grace=0)
    client.shutdown()
    holders.gone(started)
    assert forget(holders.config, "s")


def test_an_audit_log_in_any_script_is_sent_in_parts(holders: Holders) -> None:
    holders.start("sh", "-c", "stty raw; echo ready; exec cat >/dev/null")
    client = holders.connect()
    client.wait_match("ready", since="start", timeout=TIMEOUT)
    for _ in range(250):
        client.send("я" * 2000)
    entries: list[dict[str, Any]] = []
    while part := client.audit(since=entries[-1]["sequence"] if entries else 0):
        entries += part
    assert sum(entry["what"] == "input" for entry in entries) == 250


@pytest.mark.parametrize("what", [{"base64": "é"}, {"base64": "a"}, {"text": "\ud800"}])
def test_input_that_is_no_text_is_the_clients_fault(holders: Holders, what: dict[str, Any]) -> None:
    holders.start("cat")
    with pytest.raises(UsageError, match=next(iter(what))):
        holders.connect().request("input", **what)


def test_a_wait_of_a_year_is_accepted(holders: Holders) -> None:
    started = holders.start("sh", "-c", "read line")
    waiting, typing = holders.connect(), holders.connect()
    threading.Timer(0.2, lambda: typing.send("\n")).start()
    assert waiting.wait_exit(31536000)["exit_code"] == 0
    for client in (waiting, typing):
        client.leave()
    holders.gone(started)
