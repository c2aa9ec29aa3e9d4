"""Trees of random steps: dumped and restored, they find what an undisturbed twin finds.

Every run tries the same few.  ``CRIUCTL_TEST_TREES=500:40`` tries forty others from seed 500 on, ``CRIUCTL_TEST_STEPS=pipe,pair``
makes them of these steps only (tests/integration/programs/steps).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

FIRST, _, COUNT = os.environ.get("CRIUCTL_TEST_TREES", "1:6").partition(":")
STEPS = [steps] if (steps := os.environ.get("CRIUCTL_TEST_STEPS")) else []
IGNORED = ["*/namespaces/ipc", "*/unsent"]  # what is not acknowledged yet


@pytest.mark.parametrize("seed", range(int(FIRST), int(FIRST) + int(COUNT or 1)))
def test_a_random_tree(seed: int, zoo: Zoo, trip: Trip) -> None:
    own_ipc = ["unshare", "--ipc", "--"]
    tree, twin = (
        zoo.launch("random_tree.py", str(seed), *STEPS, name=name, prefix=own_ipc, ignore=IGNORED) for name in ("tree", "twin")
    )
    for _ in range(2):
        tree = trip.restore(trip.dump(tree), tree)
        found, wanted = (dict(_leaves(animal.ask()["found"])) for animal in (tree, twin))
        assert [
            f"{at}: {found.get(at)!r}, not {wanted.get(at)!r}" for at in found | wanted if found.get(at) != wanted.get(at)
        ] == []


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """What is in lists and dictionaries, by its place."""
    if isinstance(value, (dict, list)) and value:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{at} {name}".lstrip())
    else:
        yield at, value
