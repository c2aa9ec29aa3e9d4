"""The page for people who do not see all of it, or use no mouse: axe-core finds nothing in any
view, light or dark, on a desk or a phone, and keys reach every control.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from support.browsing import DESK, PATIENCE, PHONE, Served, looking, serving, shows
from support.operating import Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration

_CONTROLS = "a[href], button:not([disabled]), input, select, summary, textarea"
_NUMBER = f"""() => {{
    const all = [...document.querySelectorAll("{_CONTROLS}")];
    const seen = all.filter((one) => one.checkVisibility());
    seen.forEach((one, number) => {{ one.dataset.number = number; }});
    return seen.map((one) => one.getAttribute("aria-label") || one.textContent || one.outerHTML);
}}"""
_FOCUSED = "() => document.activeElement.dataset.number ?? null"


def _findings(page: Page) -> list[str]:
    """What axe-core complains of: the rule, and the elements."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{page.url} {rule['id']}: {node['html'][:200]} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def _views(served: Served, page: Page) -> list[str]:
    """Go to each view; what axe-core finds there."""
    found = []
    for view, sign in (
        ("#/", "[data-session=web]"),
        ("#/s/web/terminal", ".xterm-rows"),
        ("#/s/web/processes", ".tree"),
        ("#/s/web/connections", ".tab table"),
        ("#/s/web/checkpoints", ".chart.frozen svg"),
        ("#/s/nothing/processes", ".trouble"),
        ("#/events", "table"),
    ):
        page.goto(f"{served.root}/{view}")
        page.locator(sign).first.wait_for()
        found += _findings(page)
    page.goto(f"{served.root}/#/s/web/checkpoints")
    page.locator(".tab table a").first.click()
    page.locator(".stack").wait_for()
    found += _findings(page)
    page.goto(f"{served.root}/#/s/web/checkpoints")
    page.locator(".comparison button").click()
    page.locator("main section").first.wait_for()
    return found + _findings(page)


def _questions(served: Served, page: Page) -> list[str]:
    """Open each kind of dialog; what axe-core finds there."""
    found = []
    for view, action in (("#/", "run"), ("#/s/web/processes", "kill"), ("#/s/web/events", "share")):
        page.goto(f"{served.root}/{view}")
        page.locator(f"[data-action={action}]").click()
        page.locator("dialog").wait_for()
        if action == "share":
            page.locator("[data-action=link]").click()
            page.locator(".links li").first.wait_for()
        found += _findings(page)
        page.keyboard.press("Escape")
    return found


def _reached(page: Page, presses: int) -> set[str]:
    """The numbers of the controls that Tab leads to, from where the focus is."""
    reached = set()
    for _ in range(presses):
        page.keyboard.press("Tab")
        number = page.evaluate(_FOCUSED)
        if number is not None:
            reached.add(number)
    return reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_out(
    operators: Operators, browser: Browser, tmp_path: Path, scheme: str
) -> None:
    program = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(1000)"
    operators("run", "-d", "--name", "web", "--label", "a=b", "--", "python3", "-c", program)
    operators("run", "-d", "--name", "over", "--", "sh", "-c", "exit 3")
    operators("snapshot", "web")
    operators("snapshot", "web")
    with serving(operators) as served:
        for how in (DESK, PHONE):
            with looking(
                browser, tmp_path, tolerated="404 (Not Found)", color_scheme=scheme, **how
            ) as page:
                page.goto(served.url)
                assert _views(served, page) == []
                assert _questions(served, page) == []


def test_keys_reach_everything(operators: Operators, browser: Browser, tmp_path: Path) -> None:
    operators.shell("web")
    operators("snapshot", "web")
    with (
        serving(operators) as served,
        looking(browser, tmp_path, color_scheme="dark", **DESK) as page,
    ):
        page.goto(served.url)
        page.locator("[data-session=web]").wait_for()
        for view, sign in (
            ("#/", "[data-session=web] .stored [title]"),  # what is shown last
            ("#/s/web/processes", ".tree"),
            ("#/s/web/checkpoints", ".chart.frozen svg"),
        ):
            page.goto(f"{served.root}/{view}")
            page.locator(sign).first.wait_for()
            controls = page.evaluate(_NUMBER)
            assert all(controls), controls
            reached = _reached(page, len(controls) + 4)
            assert reached == {str(number) for number in range(len(controls))}, controls
        page.goto(f"{served.root}/#/s/web")
        shows(page, "$")
        expect(page.locator(".glass textarea")).to_be_focused(timeout=PATIENCE)
        page.keyboard.press("Tab")  # is the session's
        expect(page.locator(".glass textarea")).to_be_focused()
        page.keyboard.press("Control+Shift+ArrowUp")
        expect(page.get_by_label("smaller")).to_be_focused()
        page.goto(f"{served.root}/#/s/web/processes")
        page.locator("[data-action=dump]").focus()
        page.keyboard.press("Enter")
        dialog = page.locator("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert operators("status", "web")["state"] == "running"
