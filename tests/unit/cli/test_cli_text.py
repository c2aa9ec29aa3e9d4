"""Words, numbers, tables and trees for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.cli import text
from criuctl.errors import EXIT_CODES
from criuctl.host.journal.worst_exit_code import IN_WORDS, worst


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (150 << 20, "150 MiB"),
        (1 << 30, "1.0 GiB"),
    ],
)
def test_sizes(number: int, shown: str) -> None:
    assert text.size(number) == shown


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (None, "-"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1420, "1.42 s"),
        (12345, "12.3 s"),
        (185000, "3 min 5 s"),
        (7500000, "2 h 5 min"),
    ],
)
def test_durations(milliseconds: float | None, shown: str) -> None:
    assert text.duration(milliseconds) == shown


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-01-10T12:00:00Z", "0 s ago"),
        ("2026-01-10T11:59:01.5+00:00", "58 s ago"),
        ("2026-01-10T11:00:00Z", "60 min ago"),
        ("2026-01-10T13:00:00+02:00", "60 min ago"),
        ("2026-01-08T12:00:00Z", "2 d ago"),
        ("2026-02-01T00:00:00Z", "in the future"),
        ("not\x1b a time", "not\\x1b a time"),
    ],
)
def test_ages(created: str, shown: str) -> None:
    assert text.age(created, datetime(2026, 1, 10, 12, tzinfo=UTC)) == shown


@given(st.text())
def test_printable_leaves_nothing_that_a_terminal_would_obey(value: str) -> None:
    assert text.printable(value).isprintable()


def test_printable_keeps_what_is_printable_and_shows_undecodable_bytes() -> None:
    assert text.printable("Grüße, 世界") == "Grüße, 世界"
    assert text.printable(b"a\xff".decode("utf-8", "surrogateescape")) == "a\\udcff"


def process(pid: int, ppid: int, *argv: str, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "ppid": ppid,
        "argv": list(argv),
        "command": argv[0] if argv else "?",
        **more,
    }


def test_a_tree_is_drawn_like_pstree() -> None:
    tree = [
        process(10, 1, "init"),
        process(11, 10, "web", "--port", "80", threads=4),
        process(12, 11, "worker"),
        process(13, 11, "work\x1ber"),
        process(14, 10, "cron"),
    ]
    assert text.process_tree(tree).splitlines() == [
        "10 init",
        "|- 11 web --port 80  [4 threads]",
        "|  |- 12 worker",
        "|  `- 13 work\\x1ber",
        "`- 14 cron",
    ]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=12))
def test_any_parents_are_drawn_once_each_and_loops_end(pairs: list[tuple[int, int]]) -> None:
    tree = [process(pid, ppid, "x") for pid, ppid in dict(pairs).items()]
    assert len(text.process_tree(tree).splitlines()) == len(tree)


def test_a_chain_of_ten_thousand_is_drawn() -> None:
    tree = [process(i, i - 1, "x") for i in range(1, 3000)]
    assert len(text.process_tree(tree).splitlines()) == 2999


@pytest.mark.parametrize(
    ("codes", "code"),
    [([], 0), ([0, 0], 0), ([0, 11], 11), ([0, 7, 11, 5], 5), ([5, 130, 1], 1), ([3], 3)],
)
def test_the_worst_of_several_exit_codes(codes: list[int], code: int) -> None:
    assert worst(codes) == code


@given(st.permutations([*EXIT_CODES, 130, 77]))
def test_the_worst_is_the_same_in_any_order(codes: list[int]) -> None:
    """Each exit code is somewhere in the order, and the manual pages tell the same one."""
    listed = [int(word) if word.isdigit() else 130 for word in IN_WORDS.split(", ")]
    assert set(listed) | {0, 77} == set(codes)
    left = [code for code in codes if code != 77]
    while left:
        assert worst(left) == [*listed, 0][-len(left)]
        left.remove(worst(left))
    assert worst(codes) in (1, 77)
