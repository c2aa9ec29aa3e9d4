"""When pre-copy stops."""

from __future__ import annotations

import pytest

from criuctl.ops.precopy import Round, Rules, enough

MB = 1_000_000


def rounds(*found: tuple[int, float]) -> list[Round]:
    return [Round(n, 1000 * MB, new * MB, new * MB, seconds) for n, (new, seconds) in enumerate(found, 1)]


@pytest.mark.parametrize(
    ("found", "stop"),
    [
        ([], False),
        ([(1000, 8.0)], False),
        ([(0, 0.4)], True),  # the store had all of it
        ([(20, 0.2)], True),  # sent within the target
        ([(1000, 8.0), (400, 3.5)], False),
        ([(1000, 8.0), (40, 0.6)], False),  # 0.32 s at the rate of the first
        ([(1000, 8.0), (36, 0.6)], True),
        ([(1000, 8.0), (900, 7.0)], True),  # written to faster than the store takes
        ([(1000, 8.0), (400, 3.0), (300, 2.5)], True),
        ([(1000, 8.0), (600, 5.0), (360, 3.0), (200, 1.7), (110, 0.9)], True),  # the fifth
    ],
)
def test_another_round_only_while_it_is_worth_it(found: list[tuple[int, float]], stop: bool) -> None:
    assert enough(rounds(*found), Rules()) is stop
