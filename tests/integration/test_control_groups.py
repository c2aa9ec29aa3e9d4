"""Control groups: a tree comes back into the groups that it was in, or says that they are gone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import groups
from support.trip import Trip
from support.zoo import Zoo

from criuctl.ops.cgroups import mount_points, of_process

pytestmark = pytest.mark.integration


@pytest.fixture
def group() -> Iterator[tuple[str, Path]]:
    """A new group in some hierarchy of this host: (hierarchy, folder)."""
    hierarchy, mounted = next((h, Path(m)) for h, m in sorted(mount_points().items(), reverse=True) if "cpuset" not in h)
    folder = mounted / f"criuctl-test-{secrets.token_hex(4)}"
    folder.mkdir()
    yield hierarchy, folder
    if folder.exists():
        groups.remove(folder)


def test_back_into_its_group(group: tuple[str, Path], zoo: Zoo, trip: Trip) -> None:
    hierarchy, folder = group
    animal = zoo.launch("counter.py", "1")
    for pid in animal.identities():
        (folder / "cgroup.procs").write_text(str(pid[0]))
    restored = trip.round(animal)
    assert of_process(restored.pid)[hierarchy] == f"/{folder.name}"
    assert of_process(os.getpid())[hierarchy] != f"/{folder.name}"
    restored.end()


def test_the_group_is_gone(group: tuple[str, Path], zoo: Zoo, trip: Trip) -> None:
    _hierarchy, folder = group
    animal = zoo.launch("counter.py", "1")
    for pid in animal.identities():
        (folder / "cgroup.procs").write_text(str(pid[0]))
    told = trip.dump(animal)
    groups.remove(folder)
    restored = trip.restore(told, animal, ignore=("*/cgroup*",))
    assert any(folder.name in warning for warning in restored.answer["warnings"])
    restored.ask()
