"""The page of one host with the sessions of another, over a real ssh: listed, shown, typed into."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from hosts_lab.host import Host
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

_TIMEOUT = 60


class Reader:
    """A page, as far as the server sees it, on the host of the server."""

    def __init__(self, host: Host, root: str, token: str) -> None:
        self._host, self._root, self._token = host, root, token
        self.http = aiohttp.ClientSession(
            root, connector=aiohttp.TCPConnector(socket_factory=self._socket)
        )

    def _socket(self, _info: Any) -> socket.socket:
        sock = self._host.open_socket()
        sock.setblocking(False)
        return sock

    async def until(self, host: str, state: str) -> dict[str, Any]:
        """Ask until a host is in this state."""
        headers = {"Authorization": f"Bearer {self._token}"}
        async with asyncio.timeout(_TIMEOUT):
            while True:
                async with self.http.get("/api/hosts", headers=headers) as answer:
                    found = {one["host"]: one for one in await answer.json()}
                if found[host]["state"] == state:
                    one: dict[str, Any] = found[host]
                    return one
                await asyncio.sleep(0.1)

    async def terminal(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """Open a terminal."""
        words = ("criuctl", f"token.{self._token}")
        return await self.http.ws_connect(
            f"/api/hosts/{path}/terminal", protocols=words, origin=self._root
        )


async def _shows(socket: aiohttp.ClientWebSocketResponse, wanted: bytes) -> None:
    """Wait until the terminal has shown it."""
    seen = b""
    while wanted not in seen:
        message = await socket.receive(_TIMEOUT)
        assert message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY), message
        if message.type is aiohttp.WSMsgType.BINARY:
            seen += message.data[8:]
        else:
            assert json.loads(message.data).get("type") != "gone", message.data


def test_a_session_of_another_host_is_listed_shown_and_typed_into(hosts: Hosts) -> None:
    hosts.b.criuctl("run", "-d", "--name", "work", "--", "bash", "--norc", "--noprofile")
    there = hosts.b.ssh_url.removeprefix("ssh://")
    options = ["--host", hosts.b.ssh_url, "--host", f"{hosts.b.ssh_url}:9"]
    command = hosts.a.start_criuctl("ui", "--listen", "127.0.0.1:0", *options)
    wait_until(lambda: command.out.read_bytes().endswith(b"\n"), _TIMEOUT, "criuctl ui listens")
    url = command.json()["url"]
    root, _, token = url.partition("/#token=")

    async def look() -> None:
        reader = Reader(hosts.a, root, token)
        async with reader.http:
            found = await reader.until(there, "ok")
            assert [(one["session"], one["state"]) for one in found["sessions"]] == [
                ("work", "running")
            ]
            refused = await reader.until(f"{there}:9", "unreachable")
            assert "refused" in refused["error"]["message"]
            socket = await reader.terminal(f"{there}/sessions/work")
            await _shows(socket, b"bash-")
            assert hosts.b.criuctl("status", "work")["lease"] is None  # looking takes nothing
            await socket.send_bytes(b"echo $((40 + 2)) here\r")
            await _shows(socket, b"42 here")
            assert hosts.b.criuctl("status", "work")["lease"]["kind"] == "human"
            await socket.close()

    try:
        asyncio.run(look())
        wait_until(
            lambda: not hosts.b.criuctl("status", "work")["operators"], _TIMEOUT, "it has left"
        )
    finally:
        command.process.kill()
        command.process.wait(_TIMEOUT)
    assert hosts.b.criuctl("status", "work")["state"] == "running"
