"""A shared session in the guest's own page: listed, shown and typed into, through the relay."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from support.browsing import Served, serving
from support.operating import TIMEOUT, Operators
from support.relaying import Relay

pytestmark = pytest.mark.integration


async def _hears(socket: aiohttp.ClientWebSocketResponse, kind: str) -> dict[str, Any]:
    while True:
        message = await socket.receive(TIMEOUT)
        assert message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY), (kind, message)
        if message.type is aiohttp.WSMsgType.TEXT:
            body: dict[str, Any] = json.loads(message.data)
            if kind in (body.get("type"), body.get("event")):
                return body


@pytest.mark.parametrize("role", ["observe", "write"])
def test_a_guest_s_page(operators: Operators, relay: Relay, role: str) -> None:
    operators.shell("web", "--label", "team=core")
    made = relay.share("web", "--role", role)
    proxy = relay.between(made)
    host = f"share-{made['id']}"

    async def look(served: Served) -> None:
        words = ("criuctl", f"token.{served.token}")
        headers = {"Authorization": f"Bearer {served.token}"}
        async with aiohttp.ClientSession(served.root) as http:
            one: dict[str, Any] = {"state": "asking"}
            while one["state"] == "asking":
                async with http.get("/api/hosts", headers=headers) as answer:
                    (one,) = await answer.json()
                await asyncio.sleep(0.05)
            assert (one["host"], one["state"], one["command"]) == (host, "ok", ""), one
            (session,) = one["sessions"]
            assert (session["session"], session["labels"]) == ("web", {"team": "core"})
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(
                    f"/api/hosts/{host}/sessions/other/terminal",
                    protocols=words,
                    origin=served.root,
                )
            path = f"/api/hosts/{host}/sessions/web/terminal"
            async with http.ws_connect(path, protocols=words, origin=served.root) as socket:
                assert (await _hears(socket, "hello"))["role"] == role
                await _hears(socket, "attached")
                await socket.send_bytes(b"echo typed-$((6*7))\r")
                if role == "observe":
                    assert (await _hears(socket, "refused"))["error"]["code"] == "forbidden"
                else:
                    await asyncio.to_thread(
                        operators, "wait", "web", "--match", "typed-42", "--timeout", TIMEOUT
                    )
                await asyncio.to_thread(operators, "share", "revoke", made["id"])
                await _hears(socket, "gone")

    with serving(operators, "--host", proxy.invitation) as served:
        asyncio.run(look(served))
        carried = bytes(proxy.from_guest + proxy.to_guest)
        assert served.token.encode() not in carried and b"<html" not in carried
