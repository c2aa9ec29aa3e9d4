"""What a person has the page do: each action behind a question, and as the command line does it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from support.browsing import DESK, PATIENCE, looking, serving, shows
from support.operating import Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration


def _do(page: Page, action: str, **fields: str) -> None:
    """Press the button of an action, fill in its question, and confirm."""
    page.locator(f"[data-action={action}]").click()
    for name, value in fields.items():
        page.locator(f"dialog [name={name}]").fill(value)
    page.locator("dialog button[value=yes]").click()


def test_a_life_of_a_session(operators: Operators, browser: Browser, tmp_path: Path) -> None:
    with (
        serving(operators) as served,
        looking(browser, tmp_path, tolerated="503", color_scheme="dark", **DESK) as page,
    ):
        page.goto(served.url)
        _do(page, "run", session="web", command="bash --norc --noprofile -c 'read x; sleep 1000'")
        expect(page.locator("h1")).to_have_text("‹web", timeout=PATIENCE)
        expect(page.locator(".tabs [aria-current]")).to_have_text("Terminal", timeout=PATIENCE)
        _do(page, "snapshot")
        expect(page.locator(".toast").last).to_contain_text("web@1 is stored", timeout=PATIENCE)
        page.locator(".glass").click()
        page.keyboard.type("a line\n")
        shows(page, "a line")
        operators.runs("web", "sleep")
        operators("snapshot", "web")
        page.get_by_role("link", name="Checkpoints").click()
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("h1")).to_have_text("‹web@1 → web@2", timeout=PATIENCE)
        expect(page.locator("main")).to_contain_text("Processes: 1 different", timeout=PATIENCE)
        page.get_by_role("link", name="web@1", exact=True).click()
        _do(page, "copy", **{"as": "twin"})
        expect(page.locator("h1")).to_have_text("‹twin", timeout=PATIENCE)
        assert operators("status", "twin")["state"] == "running"
        _do(page, "fork")
        toast = page.locator(".toast").filter(has_text="twin-1 runs, PID")  # next to a warning
        expect(toast.first).to_be_visible(timeout=PATIENCE)
        assert operators("status", "twin-1")["forked_from"] == "twin"
        operators("kill", "--forks-of", "twin")
        operators("forget", "twin-1")
        operators("rm", "twin@1")
        page.locator("[data-action=kill]").click()
        expect(page.locator("dialog button", has_text="Cancel")).to_be_focused()
        page.keyboard.press("Enter")  # what ends something is not what Enter does
        expect(page.locator("dialog")).to_have_count(0)
        assert operators("status", "twin")["state"] == "running"
        _do(page, "kill")
        expect(page.locator(".heading .pill")).to_contain_text("exited", timeout=PATIENCE)
        _do(page, "forget")
        expect(page.locator("[data-session=web]")).to_be_visible(timeout=PATIENCE)
        expect(page.locator("[data-session=twin]")).to_have_count(0, timeout=PATIENCE)
        assert {body["session"] for body in operators("ls")} == {"web"}
