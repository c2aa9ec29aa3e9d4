"""A link for a colleague, in two browsers: the one that makes it, and the one that opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from support.browsing import DESK, PATIENCE, PHONE, fits, looking, serving, shows
from support.operating import Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration


def _make(page: Page, role: str) -> str:
    """Make a link in the dialog that is open; its address."""
    page.locator("dialog [name=role]").select_option(role)
    before = page.locator(".links li").count()
    page.locator("[data-action=link]").click()
    expect(page.locator(".links li")).to_have_count(before + 1, timeout=PATIENCE)
    return page.get_by_label("the link").input_value()


def test_a_link_is_made_used_and_revoked(
    operators: Operators, browser: Browser, tmp_path: Path
) -> None:
    operators.shell("web")
    operators("snapshot", "web")
    ended = ("401 (Unauthorized)", "WebSocket connection to")  # that the page gives up, too
    with (
        serving(operators) as served,
        looking(browser, tmp_path, color_scheme="dark", **DESK) as owner,
    ):
        owner.goto(served.url)
        owner.goto(f"{served.root}/#/s/web/checkpoints")
        owner.locator("[data-action=share]").click()
        look, write = _make(owner, "observe"), _make(owner, "write")
        with looking(browser, tmp_path, tolerated=ended, color_scheme="light", **PHONE) as reader:
            reader.goto(look)
            shows(reader, "$")
            assert "token" not in reader.url
            expect(reader.locator(".badge")).to_have_text("read-only")
            assert reader.locator(".tabs a").all_inner_texts() == ["Terminal", "Processes"]
            assert reader.locator(".actions button").count() == 0
            fits(reader)
            reader.locator(".glass").tap()
            reader.keyboard.type("echo typed-$((6*7))\n")
            for elsewhere in ("#/", "#/events", "#/s/other/checkpoints"):
                reader.goto(f"{served.root}/{elsewhere}")
                expect(reader.locator("h1")).to_have_text("web", timeout=PATIENCE)
            owner.locator(".links li", has_text="may look,").locator("button").click()
            expect(owner.locator(".links li")).to_have_count(1, timeout=PATIENCE)
            expect(reader.get_by_label("token")).to_be_visible(timeout=PATIENCE)
        with looking(browser, tmp_path, color_scheme="light", **DESK) as writer:
            writer.goto(write)
            shows(writer, "$")
            writer.keyboard.type("echo wrote-$((6*7))\n")
            shows(writer, "wrote-42")
    assert "typed-42" not in operators.text("capture", "web", "--scrollback")
