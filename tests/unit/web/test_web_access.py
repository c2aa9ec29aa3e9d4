"""The page's server: who may ask, what every answer says, and that nothing but questions is
answered.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponse, WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer

from criuctl.config import Config
from criuctl.errors import UsageError
from criuctl.web.access import Access
from criuctl.web.actions import _COMMANDS, Actions
from criuctl.web.bridge import Bridge
from criuctl.web.connection_limits import Gate
from criuctl.web.live import Live
from criuctl.web.rules import Address, hostname, is_loopback
from criuctl.web.server import STATIC, application
from criuctl.web.views import Desk

ASKED = ["about", "sessions/web/tree", "sessions/web/connections", "sessions/web/checkpoints"]
ASKED += [
    "sessions/web/timings",
    "sessions/web/steps",
    "newest",
    "events",
    "store",
    "differences/" + "0" * 32 + "/" + "1" * 32,
    "checkpoints/" + "0" * 32,
    "live",
    "hosts",
    "hosts/gamma/sessions/web/terminal",
    "sessions/web/terminal",
    "nothing",
]


class Page:
    """A server in this process, and a browser's view of it."""

    def __init__(self, client: TestClient[Any, Any], access: Access) -> None:
        self.client, self.token = client, access.token
        self.origin = str(client.make_url("/")).rstrip("/")

    async def get(self, path: str, *, token: str | None = "", **headers: str) -> ClientResponse:
        """Ask; with the token unless another one, or None, is given."""
        return await self.client.get(path, headers=self._headers(token, headers))

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        """Have something done."""
        return await self.client.post(path, json=body, headers=self._headers("", headers))

    async def socket(self, path: str, *protocols: str, **headers: str) -> int:
        """The status with which a WebSocket is refused; 101 when it is not."""
        try:
            async with self.client.ws_connect(path, protocols=protocols, headers=headers):
                return 101
        except WSServerHandshakeError as refused:
            return refused.status

    def _headers(self, token: str | None, headers: Mapping[str, str]) -> dict[str, str]:
        return (
            dict(headers)
            if token is None
            else {"Authorization": f"Bearer {token or self.token}", **headers}
        )


Talk = Callable[[Callable[[Page], Awaitable[None]]], None]


@pytest.fixture(params=[False])
def talk(tmp_path: Path, request: pytest.FixtureRequest) -> Talk:
    """Runs a conversation with a server, read-only or not, that has no session and no store."""
    folders = {
        name: str(tmp_path / name)
        for name in ("store", "state_dir", "run_dir", "cache_dir", "key_dir")
    }

    def run(conversation: Callable[[Page], Awaitable[None]]) -> None:
        async def whole() -> None:
            config = Config(**folders)  # type: ignore[arg-type]
            desk = Desk(config, read_only=request.param)
            access = Access(["proxy.example.org"])
            app = application(
                desk, access, Live(desk), Actions(desk, ["/proc/nonexistent/criuctl"]), Gate()
            )
            async with TestClient(TestServer(app)) as client:
                await conversation(Page(client, access))
            desk.close()

        asyncio.run(whole())

    return run


def test_nothing_is_answered_without_the_token(talk: Talk) -> None:
    async def conversation(page: Page) -> None:
        for path in ASKED:
            for token in (None, "wrong", page.token[:-1], page.token + "x", "é"):
                answer = await page.get(f"/api/{path}", token=token)
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "token"), (
                    path,
                    token,
                )
        assert (await page.client.post("/api/actions", json={})).status == 401
        assert (await page.get("/api/about", Authorization=f"Basic {page.token}")).status == 401
        assert (await page.get(f"/api/about?token={page.token}", token=None)).status == 401
        assert (await page.get("/api/about")).status == 200

    talk(conversation)


def test_a_name_that_may_be_a_stranger_s_is_refused(talk: Talk) -> None:
    async def conversation(page: Page) -> None:
        for path in ("/", "/static/app.js", "/api/about"):
            for host in (
                "evil.example",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "proxy.example.org:x",
                "a@localhost",
                "",
            ):
                assert (await page.get(path, Host=host)).status in (400, 403), (path, host)
            for host in (
                "localhost:9000",
                "127.0.0.1",
                "[::1]:8765",
                "192.0.2.7:8765",
                "proxy.example.org",
                "PROXY.example.org",
            ):
                assert (await page.get(path, Host=host)).status == 200, (path, host)

    talk(conversation)


def test_another_site_s_page_is_refused(talk: Talk) -> None:
    async def conversation(page: Page) -> None:
        right = ("criuctl", f"token.{page.token}")
        for origin in (
            "https://evil.example",
            "null",
            "http://[",
            page.origin.replace("127.0.0.1", "localhost"),
            page.origin + "0",
        ):
            assert (await page.get("/api/about", Origin=origin)).status == 403, origin
            assert (await page.post("/api/actions", {}, Origin=origin)).status == 403, origin
            assert await page.socket("/api/live", *right, Origin=origin) == 403, origin
        # a browser always says where it comes from
        assert await page.socket("/api/live", *right) == 403
        assert await page.socket("/api/live", "criuctl", Origin=page.origin) == 401
        assert await page.socket("/api/live", "criuctl", "token.wrong", Origin=page.origin) == 401
        assert await page.socket("/api/live", *right, Origin=page.origin) == 101

    talk(conversation)


def test_every_answer_tells_the_browser_to_be_strict(talk: Talk) -> None:
    async def conversation(page: Page) -> None:
        for path in ("/", "/static/app.js", "/api/about", "/api/nothing", "/nothing"):
            answer = await page.get(path)
            rules = dict(
                rule.strip().split(" ", 1)
                for rule in answer.headers["Content-Security-Policy"].split(";")
            )
            assert (
                rules["default-src"] == "'none'"
                and rules["script-src"] == "'self'"
                and rules["frame-ancestors"] == "'none'"
            ), path
            assert (
                answer.headers["X-Content-Type-Options"] == "nosniff"
                and answer.headers["Referrer-Policy"] == "no-referrer"
            )
            assert "Set-Cookie" not in answer.headers and "aiohttp" not in answer.headers["Server"]

    talk(conversation)


def test_only_the_page_and_answers_are_served(talk: Talk) -> None:
    async def conversation(page: Page) -> None:
        assert (await page.get("/", token=None)).status == 200
        script = await page.get("/static/vendor/xterm.mjs", token=None)
        assert script.status == 200 and script.content_type.endswith("javascript")
        for path in (
            "/static/",
            "/static/../server.py",
            "/static/%2e%2e/server.py",
            "/server.py",
            "/api/sessions/..%2f..%2fx/tree",
        ):
            assert (await page.get(path)).status in (400, 403, 404), path
        for reference in ("web", "..%2f..%2fetc%2fpasswd", "0" * 31, "%2fetc"):
            assert (await page.get(f"/api/checkpoints/{reference}")).status == 404, reference
        unmade = await page.get("/api/newest")
        assert (unmade.status, (await unmade.json())["error"]["code"]) == (503, "no-such-bucket")
        assert (await page.post("/", {})).status == 405

    talk(conversation)


@pytest.mark.parametrize(
    ("wish", "status"),
    [
        ({"action": "format", "session": "web"}, 400),
        ({"action": "restore", "checkpoint": "/etc/passwd"}, 404),
        ({"action": "restore", "checkpoint": "--help"}, 404),
        ({"action": "dump", "session": "--help"}, 400),
        ({"action": "dump", "session": "4711"}, 400),
        ({"action": ["dump"], "session": "web"}, 400),
        ({"action": "pause", "session": "../x"}, 404),
        ({"action": "kill", "session": "--help"}, 400),
        ({"action": "kill"}, 400),
        ({"action": "forget", "session": "--ended-before=1s"}, 400),
        ({"action": "run", "command": " "}, 400),
        ({"action": "run", "command": "'"}, 400),
        ({"action": "run", "command": "bash", "session": "--host-pids"}, 400),
        ({"action": "restore", "checkpoint": "0" * 32, "as": "--lazy"}, 400),
        (["dump"], 400),
        ("x" * 70_000, 400),
    ],
)
def test_a_wish_that_makes_no_sense_starts_nothing(talk: Talk, wish: Any, status: int) -> None:
    async def conversation(page: Page) -> None:
        assert (await page.post("/api/actions", wish)).status == status

    talk(conversation)


def test_what_is_nested_without_end_is_no_bug(talk: Talk) -> None:
    messages: list[dict[str, Any]] = []

    async def tell(message: dict[str, Any]) -> None:
        messages.append(message)

    async def visit(page: Page) -> None:
        headers = {"Authorization": f"Bearer {page.token}"}
        assert (
            await page.client.post("/api/actions", data=b"[" * 60_000, headers=headers)
        ).status == 400
        bridge: Any = SimpleNamespace(_tell=tell)
        await Bridge._obey(bridge, "[" * 100_000)

    talk(visit)
    assert [message["error"]["code"] for message in messages] == ["bad-request"]


@pytest.mark.parametrize("talk", [True], indirect=True)
def test_a_page_that_may_only_look_starts_nothing(talk: Talk) -> None:
    async def conversation(page: Page) -> None:
        for action in (*_COMMANDS, "pause", "resume", "format"):
            answer = await page.post(
                "/api/actions", {"action": action, "session": "web", "checkpoint": "0" * 32}
            )
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "forbidden"), (
                action
            )

    talk(conversation)


def test_the_page_has_no_inline_script_and_calls_no_other_host() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""] and not re.search(
        r"\son\w+=", page
    )
    ours = [
        *STATIC.glob("*.js"),
        *STATIC.glob("*.css"),
        *STATIC.glob("*.html"),
        STATIC / "vendor/xterm.css",
    ]
    for file in ours:
        found = set(re.findall(r"https?://[^\s\"'`)]+", file.read_text())) - {
            "http://www.w3.org/2000/svg"
        }
        assert all(
            url.startswith(("http://bellard.org", "https://github.com", "http://www.microsoft.com"))
            for url in found
        ), file
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", file.read_text()
        ), file


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("127.0.0.1:8765", "127.0.0.1", 8765, "http://127.0.0.1:8765/"),
        ("8765", "127.0.0.1", 8765, "http://127.0.0.1:8765/"),
        ("[::1]:0", "::1", 0, "http://[::1]:0/"),
        ("0.0.0.0:80", "0.0.0.0", 80, "http://127.0.0.1:80/"),
        ("localhost:1", "localhost", 1, "http://localhost:1/"),
    ],
)
def test_addresses(text: str, host: str, port: int, url: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.url()) == (host, port, url)
    assert address.loopback == (host != "0.0.0.0")


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", ":80", "1.2.3.4:99999", "1.2.3.4:-1", "1.2.3.4:٣"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError):
        Address.parse(text)


def test_hosts() -> None:
    assert [hostname(text) for text in ("A:1", "[::1]", "a:x", "u@a", "a/b", "a?b")] == [
        "a",
        "::1",
        None,
        None,
        None,
        None,
    ]
    assert [
        is_loopback(host) for host in ("localhost", "127.9.9.9", "::1", "10.0.0.1", "example.org")
    ] == [True] * 3 + [False] * 2


def test_what_is_done_knows_what_the_server_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule may name a variable as the secret of a connection, and the store may be behind a
    proxy.
    """
    monkeypatch.setenv("PGPASSWORD", "canary")
    monkeypatch.setenv("PATH", "/usr/bin")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    actions = Actions(Desk(Config(state_dir=str(tmp_path))), [sys.executable, "-c", program])
    body, code = asyncio.run(actions._commands.run(["restore"]))
    assert (code, body["PGPASSWORD"]) == (0, "canary") and "/usr/sbin" in body["PATH"].split(":")
