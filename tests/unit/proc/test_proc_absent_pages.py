"""The bookkeeping of pages that have not arrived, compared with a page-by-page one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from criuctl.proc.absent_pages import AbsentPages, Run

ROOM = 40  # addresses

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["remove", "move"]),
        st.integers(0, ROOM - 1),
        st.integers(1, 12),
        st.integers(0, ROOM - 1),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, ROOM))
def test_steps_in_any_order(steps: list[tuple[str, int, int, int]], first: int) -> None:
    absent = AbsentPages([Run(0, first, 0), Run(first + 2, ROOM, first + 2)])
    pages = {n: n for n in range(ROOM) if not first <= n < first + 2}  # address: home
    child, of_child = absent.copy(), dict(pages)
    for kind, start, length, to in steps:
        inside = {at: home for at, home in pages.items() if start <= at < start + length}
        if kind == "remove":
            absent.remove(start, start + length)
        elif abs(to - start) >= length:
            absent.move(start, to, length)
        else:
            continue
        pages = {at: home for at, home in pages.items() if at not in inside}
        if kind == "move":  # what is expected there stays
            pages = {at + to - start: home for at, home in inside.items()} | pages
        _same(absent, pages)
    _same(child, of_child)


def _same(absent: AbsentPages, pages: dict[int, int]) -> None:
    end = max(pages, default=0) + 2
    assert bool(absent) == bool(pages)
    assert [absent.home(at) for at in range(end)] == [pages.get(at) for at in range(end)]
    for home in range(0, end, 7):
        found = {
            run.start + n: run.home + n
            for run in absent.located(home, home + 9)
            for n in range(run.end - run.start)
        }
        assert found == {at: h for at, h in pages.items() if home <= h < home + 9}
    runs = absent.runs()
    assert all(one.end <= other.start for one, other in pairwise(runs))
    for at in range(end):
        starts = [run.start for run in runs if run.start > at]
        assert absent.next(at, end) == min([*starts, end])


def test_many_distances() -> None:
    """Those that no page has any more are forgotten."""
    absent = AbsentPages([Run(0, 1, 0)])
    for to in range(1, 1000):
        absent.move(to - 1, to, 1)
    assert absent.runs() == [Run(999, 1000, 0)]
    assert absent.located(0, 1) == [Run(999, 1000, 0)]
    assert len(absent._shifts) < 100
