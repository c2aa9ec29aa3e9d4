"""Tables, and what of them fits into a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from criuctl.cli.tables import Column, table

COLUMNS = (
    Column("session"),
    Column("pid", right=True, rank=2),
    Column("command", rank=1, prose=True),
    Column("labels", rank=3, prose=True),
)
LONG = "python3 -m http.server --bind 127.0.0.1 8000"
ROWS = (("web-frontend-production", "28439", LONG, "tier=web"), ("b", "7", "sleep 9", ""))


def test_a_table_is_aligned_and_cuts_nothing_without_a_terminal() -> None:
    assert table(COLUMNS, ROWS).splitlines() == [
        "SESSION                    PID  COMMAND                                       LABELS",
        f"web-frontend-production  28439  {LONG}  tier=web",
        "b                            7  sleep 9",
    ]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (86, f"web-frontend-production  28439  {LONG}  tier=web"),
        (80, "web-frontend-production  28439  python3 -m http.server --bind 127.0.0…  tier=web"),
        (56, "web-frontend-production  28439  python3 -m http.server…"),
        (42, "web-frontend-production  python3 -m http.…"),
        (30, "web-frontend-production"),
        (10, "web-frontend-production"),
    ],
)
def test_a_narrow_terminal_drops_columns_and_cuts_free_text_alone(
    width: int, expected: str
) -> None:
    assert table(COLUMNS, ROWS, width=width).splitlines()[1] == expected


def test_empty_columns_go_first() -> None:
    rows = [("web", "28439", "", "tier=web")]
    assert table(COLUMNS, rows, width=30).splitlines() == [
        "SESSION    PID  LABELS",
        "web      28439  tier=web",
    ]


def test_wide_characters_take_two_columns() -> None:
    lines = table(COLUMNS, [("web", "1", "世界" * 20, "")], width=40).splitlines()
    assert lines[1] == "web        1  " + "世界" * 4 + "…"
    assert wcswidth(lines[1]) <= 40


def test_an_indent_counts() -> None:
    assert max(map(len, table(COLUMNS, ROWS, width=60, indent="  ").splitlines())) <= 60


@given(st.lists(st.text(max_size=40), min_size=4, max_size=4), st.integers(30, 200))
def test_each_row_is_one_line_that_fits(cells: list[str], width: int) -> None:
    name = "x" * 26
    lines = table(COLUMNS, [[name, *cells[1:]]], width=width).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(name)
    assert all(wcswidth(line) <= width for line in lines)
