"""The simulation of `scripts/store-fleet`, made small: what operations ask of a store."""

from __future__ import annotations

from pathlib import Path

from bench import fleet as simulation


def test_requests_do_not_grow_with_the_store(tmp_path: Path) -> None:
    fleet = simulation.Fleet(simulation.Ordered(), tmp_path, 3, 6, 0.0, 8)
    found = simulation.run(fleet, [12, 36])
    young, old = (found["sizes"][size] for size in (12, 36))
    assert young["dump"]["PUT"] == old["dump"]["PUT"] == 5
    assert young["dump"]["LIST"] == old["dump"]["LIST"] == 7
    assert old["dump"]["GET"] <= 5  # the segments of two other hosts, and the configuration
    assert old["list, first time"]["places"]["GET checkpoints"] == 36
    assert "GET checkpoints" not in old["list, again"]["places"]
    removed = found["prune"]["removed"]
    assert removed == 24
    assert found["prune"]["LIST"] < removed
    assert found["beat"]["PUT"] == 1
    assert found["gc"]["DELETE"] > 0
