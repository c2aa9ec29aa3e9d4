"""Symbolic links that are open themselves (O_PATH and O_NOFOLLOW), as file managers and backup
programs hold them.
"""

from __future__ import annotations

import os
import sys

import pytest
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

PROGRAM = """
import os, sys, time
os.symlink(sys.argv[2], sys.argv[1])
link = os.open(sys.argv[1], os.O_PATH | os.O_NOFOLLOW)
while True:
    print(os.readlink("", dir_fd=link), flush=True)
    time.sleep(0.05)
"""


def lines(animal: Animal) -> int:
    return len(animal.output().split())


@pytest.mark.parametrize("target", ["nowhere", "/etc/hostname", "."])
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_an_open_link(target: str, mode: int, zoo: Zoo, trip: Trip) -> None:
    """It is the link that comes back, wherever it leads, also where others may make files."""
    place = zoo.home / "place"
    place.mkdir()
    place.chmod(mode)
    animal = zoo.launch([sys.executable, "-c", PROGRAM, str(place / "link"), target], quiet=False)
    wait_until(lambda: lines(animal), 60, "it runs")
    report = trip.dump(animal)
    before = lines(animal)
    restored = trip.restore(report, animal, equal=False)
    wait_until(lambda: lines(animal) > before, 60, "it goes on")
    held = [fd for fd in os.listdir(f"/proc/{restored.pid}/fd") if int(fd) > 2]
    assert [os.readlink(f"/proc/{restored.pid}/fd/{fd}") for fd in held] == [str(place / "link")]
    assert set(animal.output().split()) == {target}
