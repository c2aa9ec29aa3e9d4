"""Memory files (memfd_create): their seals, and what has them mapped."""

from __future__ import annotations

import pytest
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

WAYS = [
    *(
        "write",
        "open-ended",
        "only-write",
        "future",
        "future-and-write",
        "no-exec",
        "exec",
        "processes",
        "private",
        "code",
    ),
    *("holes", "unmapped", "reader", "closed", "odd-size", "reading-descriptor"),
]


@pytest.mark.parametrize("which", WAYS)
def test_there_and_back(which: str, zoo: Zoo, trip: Trip) -> None:
    """What is sealed comes back sealed, and mappings of it allow what they did."""
    animal = zoo.launch("memory_files.py", which)
    trip.round(trip.round(animal))
