"""The label of a group: a copy does not stay in the group of its original."""

from __future__ import annotations

from criuctl.host.group_label import of_copy


def test_a_copy_has_the_label_of_its_own_group_or_none() -> None:
    labels = {"tier": "dev", "group": "team"}
    assert of_copy(labels, "") == {"tier": "dev"}
    assert of_copy(labels, "team-1") == {"tier": "dev", "group": "team-1"}
    assert of_copy({}, "team-1") == {"group": "team-1"}
