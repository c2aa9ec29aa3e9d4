"""Ports that anybody may reach: connections that ask nothing, or ask slowly, keep no one else out
and come to an end.
"""

from __future__ import annotations

import asyncio
import re
import select
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from support.command import Criuctl

from criuctl.config import Config
from criuctl.ops import metrics_server
from criuctl.proc.idle_connections import MOST, MOST_OF_ONE, Waiting
from criuctl.web.access import Access
from criuctl.web.actions import Actions
from criuctl.web.connection_limits import Gate
from criuctl.web.live import Live
from criuctl.web.server import application
from criuctl.web.views import Desk

FLOOD = 300
HALF = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


@contextmanager
def flood(host: str, port: int, count: int = FLOOD) -> Iterator[list[socket.socket]]:
    """So many connections, every other one in the middle of a head."""
    with ExitStack() as stack:
        made = []
        for n in range(count):
            sock = stack.enter_context(closing(socket.create_connection((host, port), 10)))
            if n % 2:
                sock.sendall(HALF)
            made.append(sock)
        yield made


def ended(sockets: list[socket.socket]) -> int:
    """How many of them the server has cut off."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return len(poll.poll(0))


def within(seconds: float, sockets: list[socket.socket], wanted: int) -> int:
    """Wait until so many are cut off."""
    until = time.monotonic() + seconds
    while (count := ended(sockets)) < wanted and time.monotonic() < until:
        time.sleep(0.05)
    return count


@pytest.fixture(params=["ui", "metrics"])
def served(request: pytest.FixtureRequest, criuctl: Criuctl) -> Iterator[SimpleNamespace]:
    """A criuctl that serves on a port: its address, and a question that it answers without a
    password.
    """
    command = criuctl.start(request.param, "--listen", "127.0.0.1:0", json_output=False)
    pattern = re.compile(r"http://127\.0\.0\.1:(\d+)/\S*")
    until = time.monotonic() + 60
    while not (found := pattern.search(command.output())):
        assert time.monotonic() < until, command.output()
        time.sleep(0.05)
    url = urlsplit(found[0])
    path = "/metrics" if request.param == "metrics" else "/static/app.js"
    most = metrics_server.MOST_OF_ONE if request.param == "metrics" else MOST_OF_ONE
    yield SimpleNamespace(
        port=int(found[1]), url=f"http://{url.netloc}{path}", most=most, pid=command.process.pid
    )
    command.process.kill(signal.SIGTERM)
    command.process.wait(30)


def test_a_client_is_served_while_hundreds_of_others_say_nothing(served: SimpleNamespace) -> None:
    with flood("127.0.0.1", served.port) as half:
        began = time.monotonic()
        with urllib.request.urlopen(served.url, timeout=30) as answer:
            assert answer.status == 200 and answer.read()
        assert time.monotonic() - began < 20
        assert within(20, half, FLOOD - served.most) >= FLOOD - served.most
        assert len(list(Path(f"/proc/{served.pid}/fd").iterdir())) < served.most + 60
        assert len(list(Path(f"/proc/{served.pid}/task").iterdir())) < served.most + 60


def drip(sockets: list[socket.socket], seconds: float) -> float:
    """Send a byte of a head again and again on each; when the last of them was cut off."""
    began = time.monotonic()
    left = list(sockets)
    while left and time.monotonic() - began < seconds:
        for sock in list(left):
            try:
                sock.send(b"a")
            except OSError:
                left.remove(sock)
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[Gate, Access, web.Application]]:
    """The page's server with a short deadline."""
    folders = {
        name: str(tmp_path / name)
        for name in ("store", "state_dir", "run_dir", "cache_dir", "key_dir")
    }
    desk, access = Desk(Config(**folders), read_only=False), Access()  # type: ignore[arg-type]
    gate = Gate(Waiting(deadline=1.0))
    yield (
        gate,
        access,
        application(desk, access, Live(desk), Actions(desk, ["/nonexistent/criuctl"]), gate),
    )
    desk.close()


def test_a_head_that_comes_byte_by_byte_has_one_deadline(
    page: tuple[Gate, Access, web.Application],
) -> None:
    gate, _access, app = page

    async def conversation() -> float:
        runner = web.AppRunner(app)
        await runner.setup()
        assert runner.server is not None
        async with gate.opened(runner.server, host="127.0.0.1", port=0) as server:
            port = server.sockets[0].getsockname()[1]
            sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            for sock in sockets:
                sock.sendall(HALF)
            took = await asyncio.to_thread(drip, sockets, 20)
            for sock in sockets:
                sock.close()
        await runner.cleanup()
        return took

    assert 0.5 < asyncio.run(conversation()) < 10
    assert len(gate.waiting) == 0


def test_a_body_that_does_not_come_is_not_waited_for(
    page: tuple[Gate, Access, web.Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, access, app = page
    monkeypatch.setattr("criuctl.web.connection_limits.BODY", 1.0)

    async def conversation() -> bytes:
        runner = web.AppRunner(app)
        await runner.setup()
        assert runner.server is not None
        async with gate.opened(runner.server, host="127.0.0.1", port=0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                f"POST /api/actions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer "
                f"{access.token}\r\n"
            )
            writer.write(
                head.encode() + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
            )
            answer = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
        await runner.cleanup()
        return answer

    assert b" 408 " in asyncio.run(conversation())


def _nothing(_environ: Any, start: Any) -> list[bytes]:
    start("200 OK", [])
    return []


def test_metrics_have_one_deadline_for_a_head() -> None:
    port = metrics_server.Port("127.0.0.1", 0, _nothing, Waiting(deadline=1.0))
    with closing(port):
        sockets = [socket.create_connection(("127.0.0.1", port.server_port)) for _ in range(20)]
        for sock in sockets:
            sock.sendall(HALF)
        assert 0.5 < drip(sockets, 20) < 10
        for sock in sockets:
            sock.close()
    assert len(port.waiting) == 0


def test_who_asks_at_once_is_never_the_one_that_has_to_go() -> None:
    waiting: Waiting[int] = Waiting(most=6, of_one=4, deadline=60)
    assert [waiting.begin(n, "a") for n in range(6)] == [[], [], [], [], [0], [1]]
    assert [waiting.begin(n, "b") for n in range(10, 12)] == [[], []]
    assert waiting.begin(12, "b") == [2], "the oldest of all"
    assert waiting.end(12) and not waiting.end(12)
    assert not waiting.overdue()
    assert MOST_OF_ONE < MOST
