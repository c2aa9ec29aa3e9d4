"""A temporarily raised descriptor limit: never above the hard limit, never below the old one."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from criuctl.proc.limits import room_for_descriptors


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit, with a soft one of 300."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("wanted", "inside"), [(10, 300), (44, 300), (45, 301), (1000, 1256)])
def test_it_is_raised_where_that_is_needed(wanted: int, inside: int, hard: int) -> None:
    with room_for_descriptors(wanted):
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (inside, hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)


def test_the_hard_limit_stays(hard: int) -> None:
    with room_for_descriptors(hard):
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)


def test_it_goes_back_after_an_error(hard: int) -> None:
    with pytest.raises(ValueError, match="as it happens"), room_for_descriptors(500):
        raise ValueError("as it happens")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
