"""What the page of a session opens with: the terminal where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect
from support.browsing import DESK, PATIENCE, PHONE, looking, serving, shows
from support.operating import Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("how", [DESK, PHONE], ids=["desk", "phone"])
def test_a_tree_without_a_terminal_opens_on_its_checkpoints(
    operators: Operators, browser: Browser, tmp_path: Path, how: dict[str, Any]
) -> None:
    """It opened on the terminal's tab, with an error."""
    operators.shell("web")
    tree = operators.keeper.spawn(["sleep", "1000"], env={"CZOO_TOKEN": operators.home.token})
    operators("dump", tree.pid, "--name", "plain", "--leave-running")
    with (
        serving(operators) as served,
        looking(browser, tmp_path, color_scheme="light", **how) as page,
    ):
        page.goto(served.url)
        page.locator("[data-session=plain]").click()
        expect(page.locator(".tabs [aria-current]")).to_have_text("Checkpoints", timeout=PATIENCE)
        expect(page.locator("table")).to_contain_text("plain@1", timeout=PATIENCE)
        assert page.locator(".trouble").count() == 0
        assert page.locator(".tabs a").all_inner_texts() == [
            "Processes",
            "Connections",
            "Checkpoints",
            "Events",
        ]
        operators("kill", "plain", "--timeout", 0)
        expect(page.locator(".tabs a")).to_have_text(["Checkpoints", "Events"], timeout=PATIENCE)
        page.goto(f"{served.root}/#/s/web")
        shows(page, "$")
        bottom = page.evaluate("document.querySelector('.term').getBoundingClientRect().bottom")
        assert bottom <= how["viewport"]["height"]
        expect(page.locator(".tabs a").first).to_have_text("Terminal")
