"""The numbers under which terminals inside of a tree come back."""

from __future__ import annotations

import os

import pytest

from criuctl.terminals import restored


@pytest.mark.parametrize(
    ("taken", "wanted", "changed"),
    [
        (set(), {0, 3}, {}),
        ({0, 1}, {2, 3}, {}),
        ({0, 1}, {1, 2}, {1: 6}),  # others who want one now get 3, 4 and 5
        ({0, 1}, {1, 6}, {1: 7}),
        (set(), {40}, {40: 4}),  # CRIU does not reach that far
        ({5}, {5, 30}, {5: 4, 30: 6}),
        # it has to reach the last of them
        (set(range(20)), set(range(20)), {number: number + 20 for number in range(20)}),
    ],
)
def test_numbers_that_cannot_be_had_are_changed(
    taken: set[int], wanted: set[int], changed: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["ptmx", *map(str, taken)])
    assert restored._free_numbers(wanted) == changed
