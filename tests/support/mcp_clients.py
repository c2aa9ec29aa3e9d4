"""Clients of `criuctl mcp`: the official SDK's own, over standard streams and over HTTP."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import Implementation

from .keeper import wait_until
from .operating import TIMEOUT, Operators


class Agent:
    """A client, by whose name its answers are asked for."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool that succeeds; return its answer."""
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        answer: dict[str, Any] | None = result.structured_content
        assert answer is not None
        return answer

    async def fails(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool that fails as foreseen; return its error."""
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error, result.structured_content
        text = result.content[0].text  # type: ignore[union-attr]
        error: dict[str, Any] = json.loads(text[text.index("{") :])["error"]
        return error

    async def shell(self, name: str, **arguments: Any) -> None:
        """Run a session with a shell that is at its prompt."""
        await self("run", name=name, command=["bash", "--norc", "--noprofile"], **arguments)
        while (await self("wait", name=name, until="prompt"))["running"]:
            pass

    async def read(self, uri: str) -> dict[str, Any]:
        """Read a resource."""
        found = await self.client.read_resource(uri)
        body: dict[str, Any] = json.loads(found.contents[0].text)  # type: ignore[union-attr]
        return body


@dataclass
class Http:
    """A `criuctl mcp --http` that listens."""

    url: str
    token: str


@contextmanager
def listening(operators: Operators, *options: str, **env: str) -> Iterator[Http]:
    """A server for as long as the block lasts, which ends cleanly."""
    command = operators.start("mcp", "--http", "127.0.0.1:0", *options, env=env)
    try:
        wait_until(lambda: command.out.read_bytes().endswith(b"\n"), TIMEOUT, "criuctl mcp listens")
        body = json.loads(command.out.read_text())
        yield Http(body["url"], body["token"])
        command.process.kill(signal.SIGINT)
        assert command.process.wait(TIMEOUT) == 0, command.output()
        assert command.err.read_text() == ""
    finally:
        command.process.kill()


@asynccontextmanager
async def over_http(http: Http, name: str = "agent", **options: Any) -> AsyncIterator[Agent]:
    """A client of a server that listens."""
    headers = {"Authorization": f"Bearer {http.token}"}
    async with create_mcp_http_client(headers=headers) as connection:
        transport = streamable_http_client(http.url, http_client=connection)
        about = Implementation(name=name, version="1")
        async with Client(transport, client_info=about, **options) as client:
            yield Agent(client)


@asynccontextmanager
async def over_stdio(
    operators: Operators, *arguments: str, name: str = "agent", **options: Any
) -> AsyncIterator[Agent]:
    """A client with a server of its own."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "criuctl", "mcp", *arguments],
        env=operators.environment(),
        cwd=str(operators.home.path),
    )
    about = Implementation(name=name, version="1")
    async with Client(server, client_info=about, **options) as client:
        yield Agent(client)
