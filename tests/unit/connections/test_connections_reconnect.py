"""The hand-back engine on sockets of our own: deadlines, retries, misbehaving protocols, and what
it leaves of a socket.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from support.keeper import wait_until
from support.obstacles import running

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.protocols.base import (
    ApplicationProtocol,
    CannotRebuild,
    PeerAway,
    Settings,
)
from criuctl.connections.protocols.tcp import PROTOCOL as TCP
from criuctl.connections.reconnect import Engine, Job, Result
from criuctl.proc import connecting, namespace_sockets


class Protocol:
    """Does what the test says."""

    name = "test"

    def __init__(self, act: Callable[[socket.socket, float], dict[str, Any]]) -> None:
        self.act = act

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        return {}

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        return self.act(sock, deadline)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    """The program's socket."""
    with socket.socket() as made:
        yield made


def job(
    sock: socket.socket,
    peer: str,
    protocol: ApplicationProtocol | None = None,
    seconds: float = 60,
    **options: Any,
) -> Job:
    host = options.pop("host", "")
    record = ConnectionRecord(
        pid=1, fd=3, family="inet", type="stream", protocol="tcp", peer=peer, host=host
    )
    return Job(record, protocol, Settings(options=options), seconds, sock.dup, os.getpid())


def peer_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def run(*jobs: Job) -> list[Result]:
    results = Engine(jobs).run()
    assert [
        t.name
        for t in threading.enumerate()
        if t.name.startswith("criuctl-reconnect") and not t.daemon
    ] == []
    return results


def ended(sock: socket.socket) -> bool:
    """Whether its program sees the end, in every way."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    ((_, events),) = poller.poll(0)
    with pytest.raises(BrokenPipeError):
        sock.send(b"x")
    return bool(events & select.POLLHUP) and sock.recv(1) == b""


@pytest.mark.parametrize("blocking", [True, False])
def test_connected(blocking: bool, listener: socket.socket, sock: socket.socket) -> None:
    """The program's file flags are as they were, and its epoll registration sees the new
    connection.
    """
    sock.setblocking(blocking)
    flags = fcntl.fcntl(sock, fcntl.F_GETFL)
    with select.epoll() as epoll:
        epoll.register(sock, select.EPOLLIN)
        (result,) = run(job(sock, peer_of(listener), TCP))
        assert (result.connected, result.attempts, result.reason) == (True, 1, "")
        assert fcntl.fcntl(sock, fcntl.F_GETFL) == flags
        with listener.accept()[0] as other:
            other.sendall(b"news")
            assert epoll.poll(60) == [(sock.fileno(), select.EPOLLIN)]
            assert sock.recv(64) == b"news"


def test_a_socket_that_was_shut_down_and_a_name(
    listener: socket.socket, sock: socket.socket
) -> None:
    """A name is resolved again; the address of the record may be another host's by now."""
    port = listener.getsockname()[1]
    assert run(job(sock, f"192.0.2.1:{port}", host="localhost"))[0].connected
    assert sock.getpeername() == ("127.0.0.1", port)
    # too long for a name: no name server is asked, which might take its time
    unknown = ".".join(["no-such-name"] * 30)
    with socket.socket() as other:
        (result,) = run(job(other, f"192.0.2.1:{port}", seconds=2, host=unknown))
        assert (result.connected, unknown in result.reason) == (False, True)


def test_away_and_back(listener: socket.socket, sock: socket.socket) -> None:
    """Refused, then connected and turned away, then served; every try starts on a socket without
    remains.
    """
    tries = []

    def act(sock: socket.socket, deadline: float) -> dict[str, Any]:
        tries.append(
            sock.recv(64, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            if select.select([sock], [], [], 0)[0]
            else b""
        )
        with listener.accept()[0] as other:
            if len(tries) < 3:
                other.sendall(b"go away")
                select.select([sock], [], [], 60)
                raise PeerAway("turned away")
        return {"tries": len(tries)}

    (result,) = run(job(sock, peer_of(listener), Protocol(act)))
    assert (result.connected, result.attempts, result.facts) == (True, 3, {"tries": 3})
    assert tries == [b"", b"", b""]


def test_never(listener: socket.socket, sock: socket.socket) -> None:
    """Given up within the deadline and hung up, and the report says why."""
    peer = peer_of(listener)
    listener.close()
    began = time.monotonic()
    (result,) = run(job(sock, peer, TCP, seconds=4))
    assert 0.5 < time.monotonic() - began < 40
    assert not result.connected
    assert result.attempts > 1
    assert "refused" in result.reason
    assert ended(sock)


@pytest.mark.parametrize(
    "error", [CannotRebuild("a transaction is open"), ZeroDivisionError("oops")]
)
def test_no_second_try(error: Exception, listener: socket.socket, sock: socket.socket) -> None:
    """What cannot be rebuilt, and a bug of a protocol, cost one connection one try; the program
    reads nothing of it.
    """

    def act(sock: socket.socket, deadline: float) -> dict[str, Any]:
        with listener.accept()[0] as other:
            other.sendall(b"half an answer")
        select.select([sock], [], [], 60)
        raise error

    with socket.socket() as fine, socket.create_server(("127.0.0.1", 0)) as better:
        result, second = run(
            job(sock, peer_of(listener), Protocol(act)), job(fine, peer_of(better))
        )
        assert (result.connected, result.attempts) == (False, 1)
        assert str(error) in result.reason
        assert second.connected
    assert ended(sock)


def test_a_try_that_the_deadline_cuts_off_does_not_hide_what_was_known(
    listener: socket.socket, sock: socket.socket
) -> None:
    tries = []

    def act(sock: socket.socket, deadline: float) -> dict[str, Any]:
        tries.append(deadline)
        if len(tries) == 1:
            raise PeerAway("too many clients")
        time.sleep(max(0.0, deadline - time.monotonic()) + 0.01)
        raise CannotRebuild("no time was left")

    (result,) = run(job(sock, peer_of(listener), Protocol(act), seconds=4))
    assert (result.connected, result.reason, result.attempts) == (False, "too many clients", 2)


def test_a_protocol_that_hangs(
    listener: socket.socket, sock: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left behind with a dead socket; the restore goes on."""
    monkeypatch.setattr("criuctl.connections.reconnect._GRACE", 0.3)
    release = threading.Event()
    try:
        (result,) = run(
            job(
                sock,
                peer_of(listener),
                Protocol(lambda s, d: {"late": release.wait(60)}),
                seconds=0.3,
            )
        )
    finally:
        release.set()
    assert not result.connected
    assert ended(sock)


def test_interrupted(listener: socket.socket, sock: socket.socket) -> None:
    """^C while peers are away ends it at once, and its threads."""
    peer = peer_of(listener)
    listener.close()
    sockets = [socket.socket() for _ in range(20)]
    main = threading.main_thread().ident
    assert main is not None

    def trying() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("criuctl-reconnect")]

    def interrupt() -> None:
        """Once there is something to be interrupted, and a little later."""
        wait_until(lambda: len(trying()) == len(sockets), 60, "all are tried")
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Engine([job(one, peer) for one in sockets]).run()
    assert time.monotonic() - began < 15
    thread.join()
    assert trying() == []
    for one in sockets:
        one.close()


@pytest.mark.parametrize(
    ("options", "answer", "reason"),
    [
        ({"preamble": "HELLO\r\n", "expect": "OK [0-9]+\r\n"}, b"OK 17\r\n", ""),
        ({"preamble": {"base64": "AAE="}, "expect": {"base64": "/w=="}}, b"\xff", ""),
        (
            {"preamble": "HELLO\r\n", "expect": "OK", "within": 2},
            b"NO",
            "did not answer what the rule expects: 2 bytes",
        ),
        ({"expect": {"base64": "/w=="}, "preamble": "x"}, b"\xfe", "something else"),
        ({"preamble": "x", "expect": "OK", "within": 0.2}, b"", "in time"),
        ({"preamble": 5}, b"", "preamble must be"),
        ({"expect": "("}, b"", "regular expression"),
        ({"greet": "x"}, b"", "does not know"),
    ],
)
def test_preamble_and_answer(
    options: dict[str, Any],
    answer: bytes,
    reason: str,
    listener: socket.socket,
    sock: socket.socket,
) -> None:
    heard = []
    others = []

    def serve() -> None:
        # the listener is shut down at the end, and bad options hang up at once
        with suppress(OSError):
            while True:
                others.append(listener.accept()[0])
                heard.append(others[-1].recv(64))
                others[-1].sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    (result,) = run(job(sock, peer_of(listener), TCP, seconds=4 if reason else 60, **options))
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert result.connected == (not reason)
    assert reason in result.reason
    if not reason:
        assert heard == [b"HELLO\r\n"] if isinstance(options["preamble"], str) else [b"\0\1"]
        # nothing of the answer is left for the program
        assert not select.select([sock], [], [], 0)[0]
    for other in others:
        other.close()


def test_unix_paths_as_the_program_sees_them(tmp_path: Path) -> None:
    """Longer than a socket's address may be, through a link, and relative to its working folder."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(deep)
    before = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(deep)
        try:
            listener.bind("server.sock")
            listener.listen()
            for name in (
                str(deep / "server.sock"),
                str(tmp_path / "link" / "server.sock"),
                "server.sock",
            ):
                with socket.socket(socket.AF_UNIX) as sock:
                    record = ConnectionRecord(pid=1, fd=3, family="unix", type="stream", peer=name)
                    (result,) = run(Job(record, None, Settings(), 60, sock.dup, os.getpid()))
                    assert result.connected, result.reason
        finally:
            os.chdir(before)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_unix_socket_whose_server_is_gone(kind: int, tmp_path: Path) -> None:
    """It never had a peer in this life, and its program must see an end all the same."""
    with socket.socket(socket.AF_UNIX, kind) as sock:
        name = {socket.SOCK_DGRAM: "dgram"}.get(socket.SocketKind(kind), "stream")
        record = ConnectionRecord(
            pid=1, fd=3, family="unix", type=name, peer=str(tmp_path / "nobody")
        )
        (result,) = run(Job(record, None, Settings(), 0.3, sock.dup, os.getpid()))
        assert not result.connected
        assert ended(sock)


def test_a_unix_server_that_is_still_starting(tmp_path: Path) -> None:
    """It takes connections and turns them away: that must not use up the program's sockets, which
    can be connected but once.
    """
    path = str(tmp_path / "server.sock")
    ours: list[socket.socket] = []

    def act(sock: socket.socket, deadline: float) -> dict[str, Any]:
        ours.append(sock)
        with server.accept()[0]:
            if len(ours) < 3:
                raise PeerAway("still starting up")
        return {}

    with (
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as two,
    ):
        server.bind(path)
        server.listen()
        record = ConnectionRecord(pid=1, fd=3, family="unix", type="stream", peer=path)
        jobs = [
            Job(record, Protocol(act), Settings(), 60, sock.dup, os.getpid()) for sock in (one, two)
        ]
        assert [r.connected for r in run(*jobs)] == [True, True]
        assert len(ours) == 5  # twice in vain, once rehearsed, then in earnest
        assert one.getpeername() == two.getpeername() == path


def test_an_abstract_name_of_another_net_namespace(tmp_path: Path) -> None:
    """A server of ours with the same name cannot be rehearsed with: it would receive the program's
    password.
    """
    name = f"criuctl-test-{os.urandom(8).hex()}"
    seen: list[int] = []

    def act(sock: socket.socket, deadline: float) -> dict[str, Any]:
        with server.accept()[0]:
            seen.append(os.fstat(sock.fileno()).st_ino)
        return {}

    with ExitStack() as stack:
        program = stack.enter_context(running("again(0x40000000)", tmp_path))
        namespace = os.open(f"/proc/{program.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, namespace)
        server, sock = (
            stack.enter_context(
                namespace_sockets.socket_inside(namespace, socket.AF_UNIX, socket.SOCK_STREAM)
            )
            for _ in "12"
        )
        server.settimeout(30)
        other = stack.enter_context(socket.socket(socket.AF_UNIX))
        for each in (server, other):
            each.bind(f"\0{name}")
            each.listen()
        record = ConnectionRecord(pid=1, fd=3, family="unix", type="stream", peer=f"@{name}")
        (result,) = run(Job(record, Protocol(act), Settings(), 30, sock.dup, os.getpid()))
        assert result.connected, result.reason
        assert len(seen) == 2
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_unix_server_that_changes_its_mind(tmp_path: Path) -> None:
    """Ready when it was asked, gone when it counted: the reported reason is its own, not that of an
    attempt that cannot work.
    """
    path = str(tmp_path / "server.sock")
    tries = []

    def act(sock: socket.socket, deadline: float) -> dict[str, Any]:
        tries.append(sock)
        if len(tries) > 1:
            raise PeerAway("shutting down")
        server.accept()[0].close()
        return {}

    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as sock:
        server.bind(path)
        server.listen()
        record = ConnectionRecord(pid=1, fd=3, family="unix", type="stream", peer=path)
        (result,) = run(Job(record, Protocol(act), Settings(), 60, sock.dup, os.getpid()))
        assert (result.connected, result.reason) == (False, "shutting down")
        assert ended(sock)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (socket.AF_INET, socket.SOCK_STREAM),
        (socket.AF_INET6, socket.SOCK_STREAM),
        (socket.AF_INET, socket.SOCK_DGRAM),
        (socket.AF_INET6, socket.SOCK_DGRAM),
        (socket.AF_UNIX, socket.SOCK_STREAM),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET),
        (socket.AF_UNIX, socket.SOCK_DGRAM),
    ],
)
def test_every_kind_can_be_hung_up(family: socket.AddressFamily, kind: socket.SocketKind) -> None:
    with socket.socket(family, kind) as sock:
        connecting.hang_up(sock)
        assert ended(sock)


def test_what_a_peer_said_in_vain_is_not_read() -> None:
    """A unix stream that was connected and given up on cannot be connected again; its program reads
    only the end.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"half an answer")
        connecting.hang_up(ours)
        assert ended(ours)


def test_no_socket_is_its_own_peer(sock: socket.socket) -> None:
    """A free port of the range that the kernel itself picks from can be met by its own caller."""
    sock.bind(("127.0.0.1", 0))
    with pytest.raises(ConnectionRefusedError):
        connecting.connect(sock, sock.getsockname(), time.monotonic() + 5)
