"""`criuctl ui` with real sessions: over its API as the page uses it, and in a real browser, on a
desk and on a phone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from playwright.sync_api import Browser, expect
from support.browsing import PATIENCE, Served, fits, looking, serving, shown, shows
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

# -- over its API
# -------------------------------------------------------------------------------------


class Window:
    """The page's terminal, without the page: the messages that it got, and what was shown."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.shown = b""
        self.received: list[dict[str, Any]] = []
        self.ended = ""
        self._came = asyncio.Event()

    async def listen(self) -> None:
        """Take whatever comes, whatever else goes on: a browser answers the server's pings at any
        time.
        """
        async for came in self.socket:
            if came.type is aiohttp.WSMsgType.BINARY:
                self.shown += came.data[8:]
            else:
                assert came.type is aiohttp.WSMsgType.TEXT, came
                self.received.append(json.loads(came.data))
            self._came.set()
        self.ended = f"closed with {self.socket.close_code}"
        self._came.set()

    async def more(self) -> None:
        """Wait for what comes next."""
        assert not self.ended, (self.ended, self.received)
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), TIMEOUT)

    async def hears(self, *, kind: str = "", text: bytes = b"") -> dict[str, Any]:
        """Wait until this was received or shown."""
        while True:
            for message in self.received:
                if kind and kind in (message.get("type"), message.get("event")):
                    self.received.remove(message)
                    return message
            if text and text in self.shown:
                return {}
            await self.more()


class Client:
    """Who has the token."""

    def __init__(self, served: Served, http: aiohttp.ClientSession) -> None:
        self._served, self._http = served, http
        self._headers = {"Authorization": f"Bearer {served.token}"}

    async def get(self, path: str) -> Any:
        """An answer, which is there."""
        async with self._http.get(f"/api/{path}", headers=self._headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def act(self, **wish: str) -> tuple[int, dict[str, Any]]:
        """Status and body of an action."""
        async with self._http.post("/api/actions", json=wish, headers=self._headers) as answer:
            return answer.status, await answer.json()

    @contextlib.asynccontextmanager
    async def window(self, name: str, query: str = "") -> AsyncIterator[Window]:
        """A terminal on a session."""
        words = ("criuctl", f"token.{self._served.token}")
        path = f"/api/sessions/{name}/terminal{query}"
        async with self._http.ws_connect(path, protocols=words, origin=self._served.root) as socket:
            assert socket.protocol == "criuctl"
            window = Window(socket)
            listening = asyncio.create_task(window.listen())
            try:
                yield window
            finally:
                await socket.close()  # which ends the listening
                await asyncio.wait([listening])


@contextlib.asynccontextmanager
async def client(served: Served) -> AsyncIterator[Client]:
    """A connection to the server."""
    async with aiohttp.ClientSession(served.root) as http:
        yield Client(served, http)


def test_who_writes_is_for_the_holder_to_say(operators: Operators) -> None:
    operators.shell("web")

    async def talk(served: Served) -> None:
        async with (
            client(served) as page,
            page.window("web") as one,
            page.window("web", "?take=1") as two,
        ):
            me = (await one.hears(kind="hello"))["operator"]
            await one.hears(kind="attached")
            assert (await two.hears(kind="attached"))["lease"]["soft"] is False
            await one.socket.send_bytes(b"echo from-$((6*7))-one\r")
            assert (await one.hears(kind="refused"))["error"]["code"] == "lease-held"
            await two.socket.send_bytes(b"echo from-$((6*7))-two\r")
            await one.hears(text=b"from-42-two")
            await two.socket.send_json({"op": "resize", "rows": 30, "cols": 99})
            assert (await one.hears(kind="resize"))["cols"] == 99
            # of a client that does not write: irrelevant
            await one.socket.send_json({"op": "resize", "rows": 5, "cols": 5})
            await two.socket.send_json({"op": "yield"})
            while (await one.hears(kind="lease"))["lease"] is not None:
                pass
            await one.socket.send_bytes(b"echo from-$((6*7))-one; tput cols\r")
            while ((await one.hears(kind="lease"))["lease"] or {}).get("operator") != me:
                pass
            await two.hears(text=b"from-42-one\r\n99\r\n")
            assert b"from-42-one" not in two.shown.partition(b"from-42-two")[0]

    async def look(served: Served) -> None:
        async with client(served) as page, page.window("web") as window:
            assert (await window.hears(kind="hello"))["role"] == "observe"
            await window.hears(text=b"from-42-one")
            await window.hears(kind="attached")
            await window.socket.send_bytes(b"echo not-$((6*7))\r")
            assert (await window.hears(kind="refused"))["error"]["code"] == "forbidden"
            assert (await page.act(action="pause", session="web"))[0] == 403
            async with page.window("web", "?take=1") as thief:
                assert (await thief.hears(kind="hello"))["role"] == "observe"
                await thief.socket.send_bytes(b"echo not-$((6*7))\r")
                assert (await thief.hears(kind="refused"))["error"]["code"] == "forbidden"
            assert [process["command"] for process in await page.get("sessions/web/tree")][
                -1
            ] == "bash"

    with serving(operators) as served:
        asyncio.run(talk(served))
    operators("wait", "web", "--prompt", "--timeout", TIMEOUT)  # nothing runs in it but the shell
    with serving(operators, "--read-only") as served:
        asyncio.run(look(served))
    operators("wait", "web", "--idle", "0.2")
    assert "not-42" not in operators.text("capture", "web", "--scrollback")


def test_a_page_that_does_not_keep_up_is_sent_no_more(operators: Operators) -> None:
    operators(
        "run",
        "-d",
        "--name",
        "flood",
        "--",
        "sh",
        "-c",
        "read go; yes | head -c 3000000; echo finished-$((6*7)); exec sleep 1000",
    )

    async def talk(served: Served) -> None:
        async with client(served) as page, page.window("flood") as window:
            await window.hears(kind="attached")
            await window.socket.send_bytes(b"\r")
            await asyncio.to_thread(
                operators, "wait", "flood", "--match", "finished-42", "--timeout", TIMEOUT
            )
            await window.socket.send_str("what?")
            await window.hears(kind="refused")
            assert len(window.shown) < 3_000_000
            confirmed = 0
            while b"finished-42" not in window.shown:
                shown = len(window.shown)
                await window.socket.send_json({"op": "shown", "bytes": shown - confirmed})
                confirmed = shown
                if len(window.shown) == shown:
                    await window.more()

    with serving(operators) as served:
        asyncio.run(talk(served))


def test_what_the_page_has_done_is_seen_in_its_terminal(operators: Operators) -> None:
    operators.shell("web")
    operators("run", "-d", "--name", "over", "--", "sh", "-c", "echo was-here; exit 3")
    wait_until(
        lambda: operators("status", "over")["state"] == "exited",
        TIMEOUT,
        "it has ended, and its exit status was not sent",
    )

    async def talk(served: Served) -> None:
        async with client(served) as page, page.window("web") as window:
            await window.hears(kind="attached")
            assert (await page.act(action="pause", session="web"))[1]["state"] == "paused"
            await window.hears(kind="paused")
            assert (await page.act(action="resume", session="web"))[1]["state"] == "running"
            status, dumped = await page.act(action="dump", session="web")
            assert status == 200, dumped
            assert (await window.hears(kind="checkpointed"))["checkpoint"] == dumped["checkpoint"]
            listed = (await page.get("sessions/web/checkpoints"))["checkpoints"]
            assert [c["id"] for c in listed] == [dumped["checkpoint"]]
            timed = await page.get("sessions/web/timings")
            assert [c["frozen_ms"] for c in timed] == [dumped["frozen_ms"]]
            shown = await page.get(f"checkpoints/{dumped['checkpoint']}")
            assert {image["kind"] for image in shown["memory"]} >= {"task"} and shown["processes"][
                -1
            ]["command"] == "bash"
            status, restored = await page.act(action="restore", checkpoint=dumped["checkpoint"])
            assert status == 200, restored
            assert (await window.hears(kind="restored"))["incarnation"] == 2
            await window.socket.send_bytes(b"echo again-$((6*7))\r")
            await window.hears(text=b"again-42")
            status, twice = await page.act(action="restore", checkpoint=dumped["checkpoint"])
            assert (status, twice["error"]["exit_code"]) == (409, 9)
            async with page.window("over") as last:
                await last.hears(text=b"was-here")
                assert (await last.hears(kind="ended"))["status"]["exit_code"] == 3
            async with page.window("nobody") as none:
                assert "nobody" in (await none.hears(kind="gone"))["error"]["message"]
            await asyncio.to_thread(operators, "kill", "web", "--timeout", 0)
            await window.hears(kind="exit")

    with serving(operators) as served:
        asyncio.run(talk(served))


# -- in a browser
# -------------------------------------------------------------------------------------


def test_a_session_in_the_browser(operators: Operators, browser: Browser, tmp_path: Path) -> None:
    operators.shell("web", "--label", "team=core")
    operators("step", "run", "charge-42", "--session", "web", "--", "true")
    operators("snapshot", "web")
    with serving(operators) as served:
        with looking(
            browser, tmp_path, viewport={"width": 1280, "height": 800}, color_scheme="dark"
        ) as page:
            page.goto(served.url)
            row = page.locator("[data-session=web]")
            expect(row.locator(".pill")).to_have_text("running", timeout=PATIENCE)
            expect(row).to_contain_text("1 checkpoint", timeout=PATIENCE)
            assert "token" not in page.url
            row.click()
            shows(page, "$")
            page.keyboard.type("echo desk-$((6*7)) $COLUMNS\n")
            shows(page, "desk-42")
            expect(page.locator(".writer")).to_have_text("you write", timeout=PATIENCE)
            page.keyboard.type("clear; tput cols\n")
            size = page.locator(".size").inner_text()
            shows(page, size.partition("×")[0])
            assert operators("status", "web")["cols"] == int(size.partition("×")[0]) > 80
            for tab, text in (
                ("Processes", "bash --norc"),
                ("Connections", "no connections"),
                ("Steps", re.compile("charge-42.*done")),
                ("Checkpoints", "web@1"),
            ):
                page.get_by_role("link", name=tab, exact=True).click()
                expect(page.locator(".tab")).to_contain_text(text, timeout=PATIENCE)
                fits(page)
            expect(page.locator(".chart.frozen strong")).to_have_text(
                re.compile(r"^\d+ ms$|^\d+\.\d+ s$"), timeout=PATIENCE
            )
            page.locator(".chart.memory .bar .hit").click()
            expect(page.locator("h1")).to_have_text("‹web@1", timeout=PATIENCE)
            expect(page.locator(".tree")).to_contain_text("bash --norc", timeout=PATIENCE)
        phone: dict[str, Any] = {
            "viewport": {"width": 390, "height": 844},
            "is_mobile": True,
            "has_touch": True,
        }
        with looking(
            browser, tmp_path, tolerated="401 (Unauthorized)", color_scheme="light", **phone
        ) as page:
            page.goto(served.url)
            page.locator("[data-session=web]").tap()
            page.locator(".keys").wait_for()
            shows(page, "$")
            page.locator(".glass").tap()
            page.keyboard.type("echo phone-$((6*7)) sleeps; sleep 1000\n")
            shows(page, "phone-42 sleeps")
            fits(page)
            page.locator("[data-key=Ctrl]").tap()
            page.keyboard.type("c")
            # who types before the prompt may lose a letter to the signal
            shows(page, re.compile(r"sleeps\s*\^C\s*\$"))
            page.keyboard.type("echo again-$((6*7))\n")
            shows(page, "again-42")
            page.locator("[data-key='↑']").tap()
            page.keyboard.type("-twice\n")
            shows(page, "again-42-twice")
            page.keyboard.type("echo dropped-$((6*7))")
            # the signal discards what was not read yet
            shows(page, "$ echo dropped-$((6*7))")
            page.locator("[data-key='^C']").tap()
            shows(page, re.compile(r"dropped-\S+\^C\s*\$"))
            page.keyboard.type("echo last-$((6*7))\n")
            shows(page, "last-42")
            assert "dropped-42" not in shown(page)
            for tab in ("Processes", "Connections", "Steps", "Checkpoints"):
                page.get_by_role("link", name=tab, exact=True).tap()
                expect(page.locator(".tab")).not_to_contain_text("asking", timeout=PATIENCE)
                fits(page)
            page.goto(f"{served.root}/#/s/100%/checkpoints")  # typed by a person: no encoding
            expect(page.locator("h1")).to_have_text("‹100%", timeout=PATIENCE)
            page.goto(f"{served.root}/#/")
            operators("pause", "web")
            expect(page.locator("[data-session=web] .pill")).to_have_text(
                "paused", timeout=PATIENCE
            )
            operators("kill", "web", "--timeout", 0)
            expect(page.locator("[data-session=web] .pill")).to_contain_text(
                "exited", timeout=PATIENCE
            )
            page.goto(f"{served.root}/#/s/web/checkpoints")
            expect(page.locator("[data-action=restore]")).to_be_visible(timeout=PATIENCE)
            page.evaluate("localStorage.clear()")
            page.reload()
            expect(page.get_by_label("token")).to_be_visible(timeout=PATIENCE)


def test_a_paste_that_is_too_large_is_refused_with_a_message(
    operators: Operators, browser: Browser, tmp_path: Path
) -> None:
    """It ended the connection, and was lost without a word."""
    operators.shell("web")
    paste = """length => {
        const data = new DataTransfer();
        data.setData("text/plain", "x".repeat(length));
        const paste = new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
        document.querySelector(".glass textarea").dispatchEvent(paste);
    }"""
    no_store = "503 (Service Unavailable)"
    how: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"}
    with (
        serving(operators) as served,
        looking(browser, tmp_path, tolerated=no_store, **how) as page,
    ):
        page.goto(served.url)
        page.locator("[data-session=web]").click()
        shows(page, "$")
        page.keyboard.type("echo before-$((6*7))\n")
        shows(page, "before-42")
        page.evaluate(paste, 1 << 20)
        expect(page.locator(".toast")).to_contain_text("too much at once", timeout=PATIENCE)
        expect(page.locator(".writer")).to_have_text("you write")
        page.keyboard.type("echo after-$((6*7))\n")
        shows(page, "after-42")
