"""Two snapshots of a live tree compared; the second one as a file in the store of another host, and
alive from there.
"""

from __future__ import annotations

import pytest
from support.command import Criuctl, Home
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_a_checkpoint_is_compared_and_moves_as_a_file(
    home: Home, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    animal = zoo.launch("counter.py", "1")
    first = trip.snapshot(animal, "--name", "web")
    animal.ask()
    second = trip.dump(
        animal, "--name", "web", "--label", "why=move", "--with-files", animal.folder / "log"
    )

    found = criuctl("diff", "web@1", "web@2")
    assert not found["same"]
    assert found["processes"]["same"] == 2
    moved = {
        (change["after"]["what"], change["before"]["offset"], change["after"]["offset"])
        for change in found["descriptors"]["changed"]
    }
    assert (str(animal.folder / "log"), 0, 2) in moved  # it has written "1\n"
    log = next(
        change
        for change in found["files"]["changed"]
        if change["after"]["path"] == str(animal.folder / "log")
    )
    assert "size" in log["fields"]
    names = {
        region["name"]
        for space in found["memory"]["spaces"]
        for region in space["regions"]
        if region["changed"]
    }
    assert names & {"[heap]", "[stack]", "[anon]"}
    assert 0 < found["memory"]["changed"] < found["memory"]["after"]
    exact = criuctl("diff", first["checkpoint"], second["checkpoint"], "--exact")["memory"]
    assert 0 < exact["changed"] <= found["memory"]["changed"]
    same = criuctl("diff", "web", "web")
    assert same["same"]
    assert same["descriptors"]["same"] > 6

    file = home.path / "web.criuctl"
    exported = criuctl("export", "web", file)
    assert (exported["checkpoint"], exported["number"], exported["encrypted"]) == (
        second["checkpoint"],
        2,
        True,
    )
    # as on a host that has nothing of it
    criuctl.extra["CRIUCTL_STORE"] = str(home.path / "elsewhere")
    criuctl("store", "init")
    imported = criuctl("import", file)
    assert (imported["session"], imported["number"], imported["imported"]) == ("web", 1, True)
    (listed,) = criuctl("list")
    assert (listed["id"], listed["labels"]) == (second["checkpoint"], {"why": "move"})
    assert criuctl("verify", "web")["ok"]
    sealed = home.path / "sealed.criuctl"
    assert criuctl("export", "web", sealed)["encrypted"]
    # which the first use makes
    criuctl.extra["CRIUCTL_STORE"] = str(home.path / "third")
    assert criuctl("import", sealed, "--as", "moved")["number"] == 1
    restored = trip.restore(second, animal)
    restored.ask()
    restored.ask()
