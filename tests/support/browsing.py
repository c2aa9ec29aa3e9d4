"""The page of `criuctl ui` as a test sees it: a server that listens, and Debian's Chromium,
headless, with what it shows as text and as pixels.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .command import Command, Home
from .keeper import Keeper, wait_until
from .operating import TIMEOUT, Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = "/usr/bin/chromium"
# Chromium looks for updates and the like at every start, on networks that a test has no business
# with.
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]
FLAGS += ["--disable-sync", "--disable-dev-shm-usage"]
PATIENCE = TIMEOUT * 1000
DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
}


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


@dataclass
class Served:
    """A `criuctl ui` that listens."""

    command: Command
    url: str

    @property
    def root(self) -> str:
        """The address without the token."""
        return self.url.partition("/#")[0]

    @property
    def token(self) -> str:
        """The token alone."""
        return self.url.partition("#token=")[2]

    def end(self) -> None:
        """As ^C does."""
        self.command.process.kill(signal.SIGINT)
        assert self.command.process.wait(TIMEOUT) == 0, self.command.output()


@contextlib.contextmanager
def serving(operators: Operators, *options: str) -> Iterator[Served]:
    """A server for as long as the block lasts; it ends cleanly, and has given its token only to
    us.
    """
    command = operators.start("ui", "--listen", "127.0.0.1:0", *options)
    try:
        wait_until(lambda: command.out.read_bytes().endswith(b"\n"), TIMEOUT, "criuctl ui listens")
        served = Served(command, json.loads(command.out.read_text())["url"])
        yield served
        served.end()
        assert command.err.read_text() == ""
    finally:
        command.process.kill()


@pytest.fixture
def browser(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """Debian's Chromium, headless; all of its processes bear the test's token, and its profile lies
    in the test's folder.  `tmp_path` is made before TMPDIR changes: pytest keeps the place.
    """
    from playwright.sync_api import sync_playwright

    monkeypatch.setenv("CZOO_TOKEN", home.token)
    monkeypatch.setenv("TMPDIR", str(home.path))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, chromium_sandbox=False, timeout=PATIENCE
        )
        yield browser
        browser.close()
    assert not list(home.path.glob("playwright*"))


@contextlib.contextmanager
def looking(
    browser: Browser, pictures: Path, *, tolerated: str | tuple[str, ...] = (), **how: Any
) -> Iterator[Page]:
    """A page that must complain of nothing else than `tolerated`; a picture of how it ended is left
    for who wants to see it.
    """
    context: BrowserContext = browser.new_context(**how)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.screenshot(path=pictures / f"{how['viewport']['width']}-{how['color_scheme']}.png")
    parts = (tolerated,) if isinstance(tolerated, str) else tolerated
    assert [said for said in complaints if not any(part in said for part in parts)] == []
    context.close()


def shown(page: Page) -> str:
    """What the terminal shows, as text."""
    return page.locator(".xterm-rows").inner_text().replace("\xa0", " ")


def shows(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until the terminal shows it."""
    from playwright.sync_api import expect

    expect(page.locator(".xterm-rows")).to_contain_text(text, timeout=PATIENCE)


def fits(page: Page) -> None:
    """The page is not wider than the screen, however narrow that is."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), page.url


def pixels(page: Page, picture: bytes) -> list[bytes]:
    """The rows of a PNG, three bytes a pixel; an empty page of the same browser decodes it."""
    other = page.context.new_page()
    try:
        found = other.evaluate(
            """async data => {
                const image = new Image();
                image.src = `data:image/png;base64,${data}`;
                await image.decode();
                const canvas = new OffscreenCanvas(image.width, image.height);
                const drawing = canvas.getContext("2d");
                drawing.drawImage(image, 0, 0);
                const bytes = drawing.getImageData(0, 0, image.width, image.height).data;
                let text = "";
                for (let i = 0; i < bytes.length; i += 4)
                    text += String.fromCharCode(bytes[i], bytes[i + 1], bytes[i + 2]);
                return [image.width, btoa(text)];
            }""",
            base64.b64encode(picture).decode(),
        )
    finally:
        other.close()
    row, data = found[0] * 3, base64.b64decode(found[1])
    return [data[at : at + row] for at in range(0, len(data), row)]
