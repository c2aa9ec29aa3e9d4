"""The list of sessions: sorted and filtered, with what each uses; quick with hundreds."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from support.browsing import DESK, PATIENCE, PHONE, fits, looking, serving
from support.operating import TIMEOUT, Operators

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration

MANY = 500
_WATCH = """() => {
    window.touched = new Set();
    new MutationObserver((changes) => {
        for (const change of changes) {
            const parts = [change.target, ...change.addedNodes, ...change.removedNodes];
            for (const part of parts) {
                const element = part.nodeType === 1 ? part : part.parentElement;
                const row = element?.closest("[data-session]");
                if (row) window.touched.add(row.dataset.session);
            }
        }
    }).observe(document.querySelector(".sessions"), {
        subtree: true, childList: true, characterData: true, attributes: true,
    });
}"""


def _names(page: Page) -> list[str]:
    """The sessions that are shown, from above."""
    return list(
        page.locator("[data-session]").evaluate_all("all => all.map((one) => one.dataset.session)")
    )


def test_sorting_and_filters(operators: Operators, browser: Browser, tmp_path: Path) -> None:
    operators(
        "run",
        "-d",
        "--name",
        "busy",
        "--label",
        "team=core",
        "--",
        "sh",
        "-c",
        "while :; do :; done",
    )
    operators.shell("idle")
    operators("run", "-d", "--name", "over", "--", "sh", "-c", "exit 3")
    operators("run", "-d", "--name", "away", "--", "sleep", "1000")
    operators("dump", "away")
    operators("kill", "away", "--timeout", 0)
    operators("forget", "away")
    with serving(operators) as served:
        with looking(browser, tmp_path, color_scheme="light", **DESK) as page:
            page.goto(served.url)
            rows = page.locator("[data-session]")
            expect(rows).to_have_count(4, timeout=PATIENCE)
            assert _names(page) == ["busy", "idle", "over", "away"]  # running first
            expect(page.locator("[data-session=away] .pill")).to_have_text("stored")
            expect(page.locator("[data-session=idle] .memory")).to_contain_text("MiB")
            expect(page.locator("[data-session=busy] .cpu")).to_have_text(
                re.compile(r"[1-9]\d* %"), timeout=PATIENCE
            )
            page.get_by_role("button", name="Session", exact=True).click()
            assert _names(page) == ["away", "busy", "idle", "over"]
            page.get_by_role("button", name="Session", exact=True).click()
            assert _names(page) == ["over", "idle", "busy", "away"]
            page.get_by_role("button", name="CPU").click()
            assert _names(page)[0] == "busy"
            page.get_by_role("button", name="2 running").click()
            expect(rows).to_have_count(2)
            page.get_by_label("Filter by").fill("CORE")
            expect(rows).to_have_count(1)
            page.locator("[data-session=busy] a").click()
            page.locator(".back").click()
            expect(rows).to_have_count(1)  # what was chosen stays
            page.get_by_role("button", name="2 running").click()
            page.get_by_label("Filter by").fill("")
            expect(rows).to_have_count(4)
            expect(page.locator(".held")).to_contain_text(
                "1 checkpoint of 1 session", timeout=PATIENCE
            )
            page.get_by_role("link", name="Events").click()
            expect(page.locator("table")).to_contain_text("forget", timeout=PATIENCE)
            operators("snapshot", "idle")
            expect(page.locator("tbody tr").first).to_contain_text("snapshot", timeout=PATIENCE)
        with looking(browser, tmp_path, color_scheme="dark", **PHONE) as page:
            page.goto(served.url)
            expect(page.locator("[data-session]")).to_have_count(4, timeout=PATIENCE)
            page.get_by_label("Sort by").select_option("session")
            assert _names(page) == ["away", "busy", "idle", "over"]
            fits(page)
            page.goto(f"{served.root}/#/events")
            page.locator("table").wait_for()
            fits(page)


def test_only_what_changed_is_drawn_again(
    operators: Operators, browser: Browser, tmp_path: Path
) -> None:
    """With hundreds of sessions as well, and the first look does not take long."""
    operators("run", "-d", "--name", "s-0", "--", "sh", "-c", "exit 3")
    assert operators("wait", "s-0", "--exit", "--timeout", TIMEOUT, check=False)["exit_code"] == 3
    folders = operators.home.run / "holders"
    state = json.loads((folders / "s-0" / "state.json").read_text())
    state["since"] -= 3 * 86400  # so long ago that its age stays the same
    copies = [folders / f"s-{number}" for number in range(1, MANY)]
    try:
        for folder in copies:
            folder.mkdir(mode=0o700)
            body = state | {"session": folder.name, "id": f"{int(folder.name[2:]):032x}"}
            (folder / "state.json").write_text(json.dumps(body))
        with (
            serving(operators) as served,
            looking(browser, tmp_path, tolerated="503", color_scheme="dark", **DESK) as page,
        ):
            page.goto(served.url)
            expect(page.locator("[data-session]")).to_have_count(MANY, timeout=PATIENCE)
            page.reload()
            began = time.monotonic()
            expect(page.locator("[data-session]")).to_have_count(MANY, timeout=PATIENCE)
            print(f"{MANY} sessions were shown after {time.monotonic() - began:.2f} s")
            page.evaluate(_WATCH)
            changed = folders / "s-77" / "state.json"
            changed.write_text(json.dumps(json.loads(changed.read_text()) | {"exit_code": 4}))
            began = time.monotonic()
            expect(page.locator("[data-session=s-77] .pill")).to_have_text(
                "exited 4", timeout=PATIENCE
            )
            print(f"a change was shown after {time.monotonic() - began:.2f} s")
            touched = page.evaluate("[...window.touched]")
            assert "s-77" in touched and set(touched) <= {"s-77", "s-0"}, touched
    finally:
        for folder in copies:
            shutil.rmtree(folder, ignore_errors=True)
