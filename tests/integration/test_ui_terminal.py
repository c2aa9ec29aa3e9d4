"""The terminal of the page as a person sees it: every line in full, and each sign in its line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browsing import DESK, PHONE, looking, pixels, serving, shows
from support.operating import Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration

_FULL = "clear; for i in $(seq 99); do echo; done; printf '%s\\n' ________ bottom-$((6*7))\n"


def _box(page: Page, selector: str) -> dict[str, Any]:
    box = page.locator(selector).bounding_box()
    assert box is not None, selector
    return dict(box)


def _underscores(page: Page) -> int:
    """The pixel rows in which the line of underscores has a colour from its left to its right."""
    line = page.locator(".xterm-rows > div", has_text="________").last
    rows = pixels(page, line.screenshot())
    width = int(
        page.locator(".xterm-rows span", has_text="________").last.evaluate(
            "span => span.getBoundingClientRect().width"
        )
    )
    background = rows[0][:3]
    return sum(
        all(row[3 * x : 3 * x + 3] != background for x in range(2, width - 2)) for row in rows
    )


def test_every_line_is_seen_in_full(operators: Operators, browser: Browser, tmp_path: Path) -> None:
    """Underscores were below the lines that the terminal shows, and the last line below its
    frame.
    """
    operators.shell("web")
    operators("snapshot", "web")
    seen = [(DESK, "dark", None), (PHONE, "light", None), (DESK, "light", 10)]
    with serving(operators) as served:
        for how, scheme, font in seen:
            with looking(browser, tmp_path, color_scheme=scheme, **how) as page:
                if font is not None:
                    page.add_init_script(f"localStorage.setItem('criuctl-font', '{font}')")
                page.goto(f"{served.url}")
                page.locator("[data-session=web]").click()
                shows(page, "$")
                page.get_by_role("button", name="Write").click()
                page.keyboard.type(_FULL)
                shows(page, "bottom-42")
                glass, rows = _box(page, ".glass"), _box(page, ".xterm-rows")
                assert glass["y"] <= rows["y"], font
                assert rows["y"] + rows["height"] <= glass["y"] + glass["height"], font
                assert rows["x"] + rows["width"] <= glass["x"] + glass["width"], font
                assert _underscores(page) >= 1, font
                page.get_by_role("button", name="Yield").click()


def test_sequences_of_emoji_are_there_after_a_reload(
    operators: Operators, browser: Browser, tmp_path: Path
) -> None:
    """The drawn screen sets the column after each: what the emulator put further was lost."""
    lines = ("👨‍👩‍👧|family", "❤️|heart", "🇩🇪|flag", "👍🏽|thumb", "日本|wide")
    operators.shell("web")
    operators("exec", "web", "--", f"printf '%s\\n' {shlex.join(lines)}")
    with (
        serving(operators) as served,
        looking(browser, tmp_path, tolerated="503", color_scheme="dark", **DESK) as page,
    ):
        page.goto(served.url)
        page.locator("[data-session=web]").click()
        for _ in range(2):
            for line in lines:
                shows(page, line)
            page.reload()
