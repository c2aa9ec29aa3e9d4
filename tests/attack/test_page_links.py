"""A link to one session's terminal, in the hands of a bearer who wants more than it allows."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from support.browsing import Served, serving
from support.operating import TIMEOUT, Operators

from criuctl.config import Config
from criuctl.web.access import Access
from criuctl.web.actions import Actions
from criuctl.web.connection_limits import Gate
from criuctl.web.links import ALLOWED
from criuctl.web.live import Live
from criuctl.web.server import application
from criuctl.web.views import Desk

pytestmark = pytest.mark.integration


class Bearer:
    """What is asked with one token."""

    def __init__(self, root: str, http: aiohttp.ClientSession, token: str, id: str = "") -> None:
        self._root, self._http, self.token, self.id = root, http, token, id

    def bearing(self, token: str, id: str = "") -> Bearer:
        """The same with another token."""
        return Bearer(self._root, self._http, token, id)

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer of a request."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self._http.request(method, f"/api/{path}", json=body, headers=headers) as answer:
            try:
                return answer.status, await answer.json()
            except (aiohttp.ContentTypeError, ValueError):
                return answer.status, None

    async def link(self, name: str, role: str, seconds: float = 600) -> Bearer:
        """Make a link."""
        wish = {"session": name, "role": role, "seconds": seconds}
        status, made = await self.ask("POST", "links", wish)
        assert status == 200, made
        return self.bearing(made["token"], made["id"])

    @contextlib.asynccontextmanager
    async def socket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket; one that is refused raises WSServerHandshakeError."""
        words = ("criuctl", f"token.{self.token}")
        async with self._http.ws_connect(
            f"/api/{path}", protocols=words, origin=self._root
        ) as socket:
            yield socket


async def _hears(socket: aiohttp.ClientWebSocketResponse, kind: str) -> dict[str, Any]:
    """The next message of this kind."""
    while True:
        message = await socket.receive(TIMEOUT)
        assert message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY), (kind, message)
        if message.type is aiohttp.WSMsgType.TEXT:
            body: dict[str, Any] = json.loads(message.data)
            if kind in (body.get("type"), body.get("event")) or kind in body:
                return body


async def _closed(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Wait until the server has closed it."""
    while not socket.closed:
        await socket.receive(TIMEOUT)


def _attacked(operators: Operators, attack: Callable[[Bearer], Awaitable[None]]) -> None:
    async def whole(served: Served) -> None:
        async with aiohttp.ClientSession(served.root) as http:
            await attack(Bearer(served.root, http, served.token))

    with serving(operators) as served:
        asyncio.run(whole(served))


def test_a_link_to_look_cannot_type(operators: Operators) -> None:
    operators.shell("web")
    before = operators("status", "web")

    async def attack(owner: Bearer) -> None:
        reader = await owner.link("web", "observe")
        for query in ("", "?take=1", "?take=1&role=admin", "?role=write"):
            async with reader.socket(f"sessions/web/terminal{query}") as socket:
                hello = await _hears(socket, "hello")
                assert (hello["role"], hello["status"]["id"]) == ("observe", before["id"])
                await _hears(socket, "attached")
                await socket.send_bytes(b"echo typed-$((6*7))\r")
                assert (await _hears(socket, "refused"))["error"]["code"] == "forbidden"
                await socket.send_bytes(b"\x1b[24;80R")  # as a terminal answers by itself
                for op in ("resize", "yield", "input", "lease-take", "signal", "kill", "cancel"):
                    await socket.send_json(
                        {"op": op, "rows": 7, "cols": 7, "signal": 9, "data": "eA=="}
                    )
                await socket.send_str("what?")
                assert (await _hears(socket, "refused"))["error"]["code"] == "bad-request"
        operators("wait", "web", "--idle", "0.2")

    _attacked(operators, attack)
    after = operators("status", "web")
    assert "typed-" not in operators.text("capture", "web", "--scrollback")
    assert [after[key] for key in ("rows", "cols", "lease", "pid", "state")] == [
        before[key] for key in ("rows", "cols", "lease", "pid", "state")
    ]


@pytest.mark.parametrize("role", ["observe", "write"])
def test_a_link_requests_nothing_else(operators: Operators, role: str) -> None:
    """Neither what is there now, nor what is added to the server later: all routes are asked."""
    operators.shell("web")
    operators.shell("other", "--label", "secret=label")
    operators("snapshot", "web")
    checkpoint = operators("list")[0]["id"]
    desk = Desk(Config())
    routes = application(desk, Access(), Live(desk), Actions(desk, []), Gate()).router.routes()
    known = {
        (route.method, route.resource.canonical)
        for route in routes
        if route.resource is not None and route.resource.canonical.startswith("/api/")
    }
    desk.close()
    assert len(known) > 15 and {path for _, path in known} > ALLOWED

    async def attack(owner: Bearer) -> None:
        link = await owner.link("web", role)
        body = {"action": "pause", "session": "web", "role": "write", "seconds": 60}
        for method, path in known:
            filled = path.replace("{id}", checkpoint).replace("{before}", checkpoint)
            filled = filled.replace("{after}", checkpoint).removeprefix("/api/")
            for name in ("web", "other", "%77eb", "web%2f..%2fother", "absent"):
                allowed = path in ALLOWED and method == "GET"
                if allowed and (name in ("web", "%77eb") or "{name}" not in path):
                    continue
                status, _ = await link.ask(method, filled.replace("{name}", name), body)
                assert status in (403, 404), (method, path, name, status)
                assert status == 403 or "%2f" in name, (method, path, name, status)
        for name in ("other", "absent"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with link.socket(f"sessions/{name}/terminal"):
                    pass
            assert refused.value.status == 403
        async with link.socket("live") as socket:
            seen = await _hears(socket, "sessions")
            assert [one["session"] for one in seen["sessions"]] == ["web"]
            await asyncio.to_thread(operators, "pause", "other")
            await asyncio.to_thread(operators, "pause", "web")
            news = await _hears(socket, "changed")
            assert [one["session"] for one in news["changed"]] == ["web"]
            assert "other" not in json.dumps([seen, news]) and "secret" not in json.dumps(seen)
        about = (await link.ask("GET", "about"))[1]
        assert about["link"]["session"] == "web" and "store" not in about
        assert operators("status", "other")["state"] == "paused"

    _attacked(operators, attack)


def test_a_link_that_has_ended_is_worth_nothing(operators: Operators) -> None:
    """Revoked, expired, or changed by a letter; and connections that are open are closed."""
    operators.shell("web")

    async def attack(owner: Bearer) -> None:
        revoked = await owner.link("web", "write")
        brief = await owner.link("web", "write", 1.5)
        async with (
            revoked.socket("sessions/web/terminal") as terminal,
            revoked.socket("live") as live,
            brief.socket("sessions/web/terminal") as short,
        ):
            await _hears(terminal, "attached")
            await _hears(short, "attached")
            assert (await owner.ask("DELETE", f"links/{revoked.id}"))[0] == 200
            await _closed(terminal)
            await _closed(live)
            await _closed(short)
        again = await owner.link("web", "write")
        letter = "A" if again.token[0] != "A" else "B"
        for token in (
            revoked.token,
            brief.token,
            letter + again.token[1:],
            again.token[:-1],
            again.token + "A",
            again.id,
            f"link-{again.id}",
        ):
            other = owner.bearing(token)
            assert (await other.ask("GET", "about"))[0] == 401
            for path in ("live", "sessions/web/terminal"):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    async with other.socket(path):
                        pass
                assert refused.value.status == 401
        assert (await again.ask("GET", "about"))[0] == 200
        assert [one["id"] for one in (await owner.ask("GET", "links"))[1]] == [again.id]
        assert all("token" not in one for one in (await owner.ask("GET", "links"))[1])

    _attacked(operators, attack)


def test_a_link_is_for_one_session_and_not_for_its_name(operators: Operators) -> None:
    operators.shell("web")

    async def attack(owner: Bearer) -> None:
        link = await owner.link("web", "write")
        assert (await link.ask("GET", "sessions/web/tree"))[0] == 200
        for arguments in (("kill", "web", "--timeout", "0"), ("forget", "web")):
            await asyncio.to_thread(operators, *arguments)
        await asyncio.to_thread(operators.shell, "web")
        assert (await link.ask("GET", "sessions/web/tree"))[0] == 403
        with pytest.raises(aiohttp.WSServerHandshakeError):
            async with link.socket("sessions/web/terminal"):
                pass

    _attacked(operators, attack)


def test_a_link_to_type_takes_nothing_from_others(operators: Operators) -> None:
    operators.shell("web")

    async def attack(owner: Bearer) -> None:
        link = await owner.link("web", "write")
        async with (
            owner.socket("sessions/web/terminal?take=1") as mine,
            link.socket("sessions/web/terminal?take=1") as theirs,
        ):
            await _hears(mine, "attached")
            assert (await _hears(theirs, "hello"))["role"] == "write"
            assert (await _hears(theirs, "attached"))["lease"]["soft"] is False
            await theirs.send_bytes(b"echo typed-$((6*7))\r")
            assert (await _hears(theirs, "refused"))["error"]["code"] == "lease-held"
            await mine.send_json({"op": "yield"})
            while (await _hears(theirs, "lease"))["lease"] is not None:
                pass
            await theirs.send_bytes(b"echo typed-$((6*7))\r")
            await asyncio.to_thread(
                operators, "wait", "web", "--match", "typed-42", "--timeout", TIMEOUT
            )
        assert f"link-{link.id}" in operators.text("log", "web")

    _attacked(operators, attack)
