"""Protocols without a session: connecting again is all there is to do, and their clients never
notice.
"""

from __future__ import annotations

import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from support.command import Criuctl, Home
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

PACKAGES = {"PYTHONPATH": next(path for path in sys.path if path.endswith("site-packages"))}


class Web(BaseHTTPRequestHandler):
    """Answers with the path; notes each connection and the paths asked over it."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[list[str]]] = []
    slow = threading.Event()
    late = threading.Event()

    def setup(self) -> None:
        super().setup()
        self.asked: list[str] = []
        Web.connections.append(self.asked)

    def do_GET(self) -> None:  # the base class names it
        self.asked.append(self.path)
        if Web.slow.is_set():
            Web.late.set()
            time.sleep(300)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Memcached(socketserver.StreamRequestHandler):
    """As much of memcached's text protocol as a client needs to set and get."""

    values: ClassVar[dict[bytes, bytes]] = {}

    def handle(self) -> None:
        while words := self.rfile.readline().split():
            if words[0] == b"set":
                self.values[words[1]] = self.rfile.read(int(words[4]) + 2)[:-2]
                self.wfile.write(b"STORED\r\n")
            else:
                value = self.values[words[1]]
                self.wfile.write(b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (words[1], len(value), value))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients end in all sorts of ways."""


class WebServer(Server, ThreadingHTTPServer):
    pass


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    Web.connections.clear()
    Web.slow.clear()
    Web.late.clear()
    servers = [WebServer(("127.0.0.1", 0), Web), Server(("127.0.0.1", 0), Memcached)]
    threads = [
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        for server in servers
    ]
    for thread in threads:
        thread.start()
    yield servers[0].server_address[1], servers[1].server_address[1]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def animal(ports: tuple[int, int], zoo: Zoo, home: Home) -> Animal:
    rule = f"{{match: {{port: [{ports[0]}, {ports[1]}]}}, policy: reconnect, application: tcp}}"
    (home.path / "config.yaml").write_text(f"connection_rules:\n  - {rule}\n")
    animal = zoo.launch("keepalive.py", *map(str, ports), quiet=False, env=PACKAGES)
    animal.ask()
    return animal


def test_http_and_memcached_clients_go_on(
    animal: Animal, zoo: Zoo, criuctl: Criuctl, home: Home
) -> None:
    config = home.path / "config.yaml"
    report = criuctl("dump", animal.pid, "--config", config)
    answer = criuctl("restore", report["checkpoint"], "--config", config)
    assert [c["outcome"] for c in answer["connections"]] == ["reconnected"] * 3
    restored = zoo.adopt(answer["pid"], animal)
    assert restored.ask()["connections"] == 1  # urllib3 has never made a second one
    restored.ask()
    # One connection of each client before and one after, the latter made by the restore: no client
    # made one of its own.
    assert sorted(Web.connections) == [
        ["/plain/1"],
        ["/plain/2", "/plain/3"],
        ["/pool/1"],
        ["/pool/2", "/pool/3"],
    ]


def test_a_client_that_waits_for_an_answer_is_not_left_waiting(
    animal: Animal, zoo: Zoo, criuctl: Criuctl, home: Home
) -> None:
    """The answer would never come over a new connection: hung up instead, and the program hears of
    it at once.
    """
    config = home.path / "config.yaml"
    time.sleep(0.05)  # "sent last" comes from a clock that ticks every few milliseconds
    Web.slow.set()
    with pytest.raises(TimeoutError):
        animal.ask(timeout=1)
    assert Web.late.wait(60)
    report = criuctl("dump", animal.pid, "--config", config)
    began = time.monotonic()
    answer = criuctl("restore", report["checkpoint"], "--config", config)
    hung_up = [c for c in answer["connections"] if c["outcome"] == "hangup"]
    assert ["not answered" in c["reason"] for c in hung_up] == [True]
    restored = zoo.adopt(answer["pid"], animal)
    while not (error_file := next(restored.folder.glob("report-*.json"), None)):
        assert time.monotonic() - began < 120  # the server would have taken five minutes
        time.sleep(0.02)
    assert "RemoteDisconnected" in error_file.read_text()
