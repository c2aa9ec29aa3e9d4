"""Options of sockets: all that the kernel takes come back, whatever CRIU knows of them."""

from __future__ import annotations

import pytest
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_every_option(zoo: Zoo, trip: Trip) -> None:
    """Of TCP, UDP and raw sockets of both families: new, bound, with an address but no port,
    connected, listening.
    """
    animal = zoo.launch("every_option.py")
    report = trip.dump(animal)
    restored = trip.restore(report, animal, equal=False)
    changed = restored.ask()["changed"]
    assert len(changed) == 24 and min(changed.values()) > 40, changed
    assert [text for text in restored.answer["warnings"] if "not restored" in text] == []
    again = trip.restore(trip.dump(restored), restored, equal=False)
    again.ask()
