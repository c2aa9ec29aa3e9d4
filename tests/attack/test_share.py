"""A share: an evil relay, a guest who wants more, and strangers at its port."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators, ended
from support.relaying import Relay

from criuctl.errors import CriuctlError, Forbidden, SessionGone
from criuctl.session.client.session import Session
from criuctl.share.admission import Admission
from criuctl.share.guest import Guest
from criuctl.share.invitation import Invitation, encode, private_key, public_key, raw_key
from criuctl.share.server import ALGORITHMS, SUBSYSTEM

pytestmark = pytest.mark.integration

_OPERATIONS = [
    name
    for line in Path("criuctl/session/PROTOCOL.md").read_text().splitlines()
    if line.startswith("### ")
    for name in line.removeprefix("### ").partition(" (")[0].split(", ")
]
_LOOKS = {"hello", "status", "attach", "detach", "read", "screen", "heartbeat", "cancel", "bye"}
_TYPES = {*_LOOKS, "input", "resize", "lease-yield"}


@pytest.fixture(autouse=True)
def _guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRIUCTL_KIND", "human")


def _enter(guests: list[Guest], line: str) -> tuple[Guest, Session]:
    guests.append(guest := Guest(Invitation.parse(line)))
    return guest, guest.connect()


def _again(guest: Guest, session: Session) -> Session:
    """Come back as `attach` does."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return guest.connect((session.operator, session.token))
        except SessionGone:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _gone(session: Session) -> None:
    """Wait until the connection is cut."""
    deadline = time.monotonic() + TIMEOUT
    with suppress(SessionGone):
        while time.monotonic() < deadline:
            session.receive(1.0)
        pytest.fail("it is still connected")


def _screen(operators: Operators, name: str = "web") -> str:
    return operators.text("capture", name, "--scrollback")


def _login(made: dict[str, Any], key: asyncssh.SSHKey | None = None, **options: Any) -> Any:
    """Log in with a client that is not criuctl's; the one-time key by default."""
    there = Invitation.parse(made["invitation"])
    own = private_key(secrets.token_bytes(32))
    wanted: dict[str, Any] = {
        **ALGORITHMS,
        "username": encode(raw_key(own)),
        "client_keys": [key or private_key(there.secret)],
        "known_hosts": ([public_key(there.host_key)], [], []),
        "agent_path": None,
    }
    return asyncssh.connect(there.host, there.port, **(wanted | options))


# -- the relay ------------------------------------------------------------------------------------


def test_the_relay_sees_ciphertext(operators: Operators, relay: Relay, guests: list[Guest]) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    proxy = relay.between(made)
    _, session = _enter(guests, proxy.invitation)
    session.attach(0)
    session.send(b"echo typed-$((6*7))\r")
    session.wait_match("typed-42", since=0, timeout=TIMEOUT)
    there = Invitation.parse(made["invitation"])
    for seen in (bytes(proxy.from_guest), bytes(proxy.to_guest)):
        assert len(seen) > 500
        secret = (there.secret, encode(there.secret).encode(), session.token.encode())
        for word in (b"typed-", b"web", b"criuctl-session", *secret):
            assert word not in seen


def test_a_relay_with_its_own_key_is_told_nothing(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    """It has the address, and a server of its own there that accepts everyone."""
    operators.shell("web")
    made = relay.share("web")
    tried: list[str] = []

    class Evil(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            tried.append(username)
            return False

    async def attack() -> None:
        server = await asyncssh.listen(
            "127.0.0.1",
            server_factory=Evil,
            server_host_keys=[private_key(secrets.token_bytes(32))],
            **ALGORITHMS,
        )
        there = Invitation.parse(made["invitation"])
        port = server.get_port()
        line = Invitation("127.0.0.1", port, there.id, there.host_key, there.secret).line()
        guests.append(guest := Guest(Invitation.parse(line)))
        with pytest.raises(Forbidden, match="not the share's host"):
            await asyncio.to_thread(guest.connect)
        window = operators.window("attach", line)
        assert await asyncio.to_thread(ended, window) == 10
        server.close()

    asyncio.run(attack())
    assert not tried
    _enter(guests, made["invitation"])  # and the invitation is still good


def test_a_relay_that_changes_or_repeats_bytes_types_nothing(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    evil: list[str] = []

    def change(data: bytes, from_guest: bool) -> bytes:
        if not evil or not from_guest:
            return data
        how = evil.pop()
        if how == "flip":
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data + data if how == "repeat" else os.urandom(400) + data

    proxy = relay.between(made, change)
    guest, session = _enter(guests, proxy.invitation)
    for how in ("flip", "repeat", "insert"):
        evil.append(how)
        session.submit_input(f"echo {how}-$((6*7))\r".encode())
        _gone(session)
        session = _again(guest, session)
    recorded = bytes(proxy.from_guest)
    for data in (recorded, recorded[: len(recorded) // 3]):
        with socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
    session.send(b"echo last-$((6*7))\r")
    operators("wait", "web", "--match", "last-42", "--timeout", TIMEOUT)
    found = _screen(operators)
    # what came before the repeated bytes was the guest's own, once
    assert "flip-42" not in found and "insert-42" not in found
    assert found.count("repeat-42") <= 1


# -- keys -----------------------------------------------------------------------------------------


def test_an_invitation_is_used_once(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    proxy = relay.between(made)
    guest, session = _enter(guests, proxy.invitation)
    for line in (made["invitation"], proxy.invitation):
        guests.append(thief := Guest(Invitation.parse(line)))
        with pytest.raises(Forbidden, match="used already"):
            thief.connect()
    window = operators.window("attach", made["invitation"])
    assert ended(window) == 10
    for _ in range(2):  # the guest itself comes back, as the same operator
        proxy.cut()
        _gone(session)
        before, session = session, _again(guest, session)
        assert session.operator == before.operator
    session.send(b"echo typed-$((6*7))\r")
    operators("wait", "web", "--match", "typed-42", "--timeout", TIMEOUT)


def test_only_the_guest_s_own_key_comes_back() -> None:
    """Whatever a thief who knows the invitation claims in the name of the user."""
    once, own, other = (raw_key(private_key(secrets.token_bytes(32))) for _ in range(3))
    admission = Admission(once)
    user = encode(own)
    assert not admission.admits(user, own) and not admission.admits(user, other)
    assert not admission.admits(encode(once), once)  # that key would stay good for ever
    for name in ("", "root", user + "=", user[:-1], "A" * 1000, "é" * 43):
        assert not admission.admits(name, once)
    assert admission.enter(user, once)
    for key, name in ((once, user), (once, encode(other)), (other, user), (own, encode(other))):
        assert not admission.admits(name, key) and not admission.enter(name, key)
    assert admission.enter(user, own) and admission.enter(user, own)


def test_strangers_are_not_let_in(operators: Operators, relay: Relay, guests: list[Guest]) -> None:
    operators.shell("web")
    made, other = relay.share("web"), relay.share("web")

    async def attack() -> None:
        there = Invitation.parse(other["invitation"])
        for key in (
            private_key(secrets.token_bytes(32)),
            private_key(there.secret),  # another share's
            asyncssh.generate_private_key("ecdsa-sha2-nistp256"),
        ):
            algorithms = {"signature_algs": ["ssh-ed25519", "ecdsa-sha2-nistp256"]}
            with pytest.raises((asyncssh.PermissionDenied, asyncssh.ConnectionLost)):
                await _login(made, key, **algorithms)
        for user in ("root", "", encode(Invitation.parse(made["invitation"]).host_key) + "x"):
            with pytest.raises((asyncssh.PermissionDenied, asyncssh.ConnectionLost)):
                await _login(made, username=user)
        for method in ("password", "keyboard-interactive", "none"):
            with pytest.raises((asyncssh.PermissionDenied, asyncssh.ConnectionLost)):
                await _login(made, client_keys=None, password="x", preferred_auth=method)

    asyncio.run(attack())
    _enter(guests, made["invitation"])


# -- its end --------------------------------------------------------------------------------------


def test_a_share_that_has_ended_cuts_its_guest_off(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    """Revoked, expired, and with a keeper that is stopped and then killed."""
    operators.shell("web")
    for how in ("revoked", "expired", "killed"):
        made = relay.share("web", "--role", "write", "--for", "8s" if how == "expired" else "1h")
        guest, session = _enter(guests, made["invitation"])
        session.attach(0)
        if how == "revoked":
            assert operators("share", "revoke", made["id"])[0]["why"] == "revoked"
        elif how == "killed":
            keeper = operators.home.run / "shares" / made["id"] / "state.json"
            pid = int(re.findall(r'"pid":(\d+)', keeper.read_text())[0])
            os.kill(pid, 19)
            assert operators("share", "revoke", made["id"])[0]["why"] == "revoked"
        _gone(session)
        if how == "killed":
            with pytest.raises(SessionGone):
                guest.connect((session.operator, session.token))
        else:
            with pytest.raises(Forbidden, match=how):
                _again(guest, session)
        with pytest.raises(SessionGone):
            _enter(guests, made["invitation"])
        wait_until(lambda: relay.of(made)["state"] == "ended", TIMEOUT, "it has ended")  # noqa: B023
        door = operators.home.run / "shares" / made["id"] / "socket"
        if how != "killed":
            wait_until(lambda: not door.exists(), TIMEOUT, "its socket is gone")  # noqa: B023
        ours = [one for one in operators("status", "web")["operators"] if made["id"] in one["name"]]
        assert not any(one["attached"] for one in ours)


def test_a_share_is_for_one_session_and_not_for_its_name(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    guest, session = _enter(guests, made["invitation"])
    operators("kill", "web", "--timeout", 0)
    operators("forget", "web")
    operators.shell("web")
    _gone(session)
    with pytest.raises(CriuctlError):
        guest.connect()
    wait_until(lambda: relay.of(made)["state"] == "ended", 2 * TIMEOUT, "it has ended")
    assert "share-" not in str(operators("status", "web")["operators"])


# -- a guest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["observe", "write"])
def test_a_guest_requests_nothing_else(
    operators: Operators, relay: Relay, guests: list[Guest], role: str
) -> None:
    """Each operation of the protocol, also those that are added later."""
    operators.shell("web")
    before = operators("status", "web")
    _, session = _enter(guests, relay.share("web", "--role", role)["invitation"])
    assert {"kill", "spawn", "shutdown", *_TYPES} < set(_OPERATIONS)
    allowed = _TYPES if role == "write" else _LOOKS
    body: dict[str, Any] = {
        "argv": ["touch", "/x"],
        "kind": "new",
        "signal": 9,
        "role": "admin",
        "name": "*",
    }
    strange: list[Any] = ["", "no-such", None, 7, ["input"]]
    for op in [*_OPERATIONS, *strange]:
        if isinstance(op, str) and op in allowed:
            continue
        with pytest.raises(Forbidden, match="does not allow"):
            session._await(session.submit(op, **body), str(op), TIMEOUT)
    after = operators("status", "web")
    for key in ("pid", "state", "rows", "cols", "roles", "lease"):
        assert after[key] == before[key], key


def test_a_guest_who_looks_cannot_type(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    operators.shell("web")
    _, session = _enter(guests, relay.share("web", "--role", "observe")["invitation"])
    assert session.role == "observe"
    session.attach(0, size=(7, 7), write=True)
    for send in (
        lambda: session.send(b"echo typed-$((6*7))\r"),
        lambda: session.request("input", text="echo typed-$((6*7))\r"),
        lambda: session.resize(7, 7),
        session.lease_request,
        session.lease_take,
        lambda: session.signal("INT"),
    ):
        with pytest.raises(Forbidden):
            send()
    session.submit_input(b"echo typed-$((6*7))\r")  # without an answer
    session.status()
    status = operators("status", "web")
    assert (status["rows"], status["cols"], status["lease"]) == (24, 80, None)
    assert "typed-" not in _screen(operators)


def test_a_guest_does_not_say_who_it_is(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    """It has one name, the log has it under that, and it is no other operator."""
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    owner = Session.connect(
        "web", kind="human", config=_config(operators), operator="owner", role="admin"
    )
    with owner:
        guest, session = _enter(guests, made["invitation"])
        assert session.role == "write"
        stolen = guest.connect((owner.operator, owner.token))
        assert stolen.operator not in (owner.operator, session.operator)
        names = {one["operator"]: one["name"] for one in stolen.status()["operators"]}
        assert names[stolen.operator] == names[session.operator] == f"share-{made['id']}"
        owner.lease_request()
        with pytest.raises(CriuctlError):
            session.send(b"echo typed-$((6*7))\r")  # takes nothing from another writer
        owner.request("lease-yield")
        session.send(b"echo mine-$((6*7))\r")
        operators("wait", "web", "--match", "mine-42", "--timeout", TIMEOUT)
    assert "typed-42" not in _screen(operators)
    log = operators.text("log", "web")
    assert re.search(rf"share-{made['id']} \(human, \S+\) +input", log), log
    how = [one.get("how") for one in operators("events") if one["operation"] == "share"]
    assert how == ["made", "guest"]


def test_a_guest_s_ssh_carries_nothing_else(operators: Operators, relay: Relay) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")

    async def attack() -> None:
        async with _login(made) as login:
            refused = (asyncssh.ChannelOpenError, asyncssh.ChannelListenError)
            for command in ("id", "", "scp -t /tmp", "criuctl attach --stdio web"):
                with pytest.raises(asyncssh.ChannelOpenError):
                    await login.create_process(command)
            for how in ({}, {"term_type": "xterm"}, {"subsystem": "sftp"}, {"subsystem": "shell"}):
                with pytest.raises(asyncssh.ChannelOpenError):
                    await login.create_process(**how)
            with pytest.raises(asyncssh.ChannelOpenError):
                await login.create_process(subsystem=SUBSYSTEM, term_type="xterm")
            with pytest.raises(asyncssh.ChannelOpenError):
                await login.start_sftp_client()
            with pytest.raises(asyncssh.ChannelOpenError):
                await login.open_connection("127.0.0.1", relay.port)
            with pytest.raises(asyncssh.ChannelOpenError):
                await login.open_unix_connection(
                    str(operators.home.run / "holders" / "web" / "socket")
                )
            for listen in (
                login.start_server(lambda *_: None, "127.0.0.1", 0),
                login.forward_remote_port("127.0.0.1", 0, "127.0.0.1", relay.port),
                login.start_unix_server(lambda *_: None, str(operators.home.path / "made")),
            ):
                with pytest.raises(refused):
                    await listen
            assert not (operators.home.path / "made").exists()
            async with asyncio.timeout(TIMEOUT):
                writer, reader, _ = await login.open_session(subsystem=SUBSYSTEM, encoding=None)
                assert (await reader.readline()).startswith(b"criuctl-session")
                for request in (
                    (b"auth-agent-req@openssh.com",),
                    (b"x11-req", b"\0" + (b"\0\0\0\1x" * 2) + b"\0\0\0\0"),
                    (b"pty-req", b"\0\0\0\1x" + b"\0" * 16 + b"\0\0\0\0"),
                    (b"exec", b"\0\0\0\2id"),
                ):
                    assert not await writer.channel._make_request(*request)
                writer.close()

    asyncio.run(attack())


def test_a_guest_s_nonsense_and_size_are_bounded(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    guest, session = _enter(guests, made["invitation"])
    huge = (1 << 31).to_bytes(4, "big") + b"J" + b"x" * (4 << 20)
    deep = b"[" * 500_000
    deep = (len(deep) + 1).to_bytes(4, "big") + b"J" + deep
    for bad in (
        huge,
        deep,
        b"\0\0\0\0",
        b"\0\0\0\1X",
        b"\0\0\0\3J[]",
        b"\0\0\0\3J{}",
        b"\0\0\0\2I1",
    ):
        one = guest.connect()
        with suppress(OSError):
            one._socket.sendall(bad)
        with suppress(CriuctlError, OSError):
            for _ in range(1000):
                one.request("status", timeout=TIMEOUT)
            pytest.fail(f"it is still answered after {bad[:20]!r}")
    for _ in range(100):  # answers that are not read
        session.submit("no-such", padding="x" * 10_000)
    with ExitStack() as stack:
        many: list[Session] = []
        with suppress(CriuctlError):
            while len(many) < 100:
                many.append(stack.enter_context(guest.connect()))
        assert len(many) < 20
    assert _keeper_peak(operators, made) < 150
    session.status()


# -- strangers at the port ------------------------------------------------------------------------


def test_strangers_keep_no_guest_out(
    operators: Operators, relay: Relay, guests: list[Guest]
) -> None:
    """Hundreds of silent connections, some of them slow, some loud."""
    operators.shell("web")
    made = relay.share("web", "--role", "write")
    port = int(made["address"].rpartition(":")[2])
    with ExitStack() as stack:

        def stranger(say: bytes = b"") -> socket.socket:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT))
            with suppress(OSError):
                sock.sendall(say)
            return sock

        for say in (b"", b"S", b"SSH-2.0-x\r\n", b"SSH-2.0-x\r\n\0\0\0", b"GET / HTTP/1.1\r\n\r\n"):
            for _ in range(60):
                stranger(say)
        _, session = _enter(guests, made["invitation"])
        loud = stranger(b"SSH-2.0-x\r\n")
        with suppress(OSError):
            loud.settimeout(TIMEOUT)
            for _ in range(64):
                loud.sendall(b"\xff" * (1 << 20))
        with suppress(OSError):
            for line in _lines(loud):
                assert line is not None
        for _ in range(40):
            stranger(b"S")
        session.send(b"echo typed-$((6*7))\r")
        operators("wait", "web", "--match", "typed-42", "--timeout", TIMEOUT)
    assert _keeper_peak(operators, made) < 150


def _lines(sock: socket.socket) -> Iterator[bytes]:
    while data := sock.recv(1 << 16):
        yield data


def _keeper_peak(operators: Operators, made: dict[str, Any]) -> int:
    """The most memory that the keeper has had, in MiB."""
    state = (operators.home.run / "shares" / made["id"] / "state.json").read_text()
    pid = re.findall(r'"pid":(\d+)', state)[0]
    return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) >> 10


def _config(operators: Operators) -> Any:
    from criuctl.config import Config

    return Config(run_dir=str(operators.home.run))
