"""The label by which a session is a member of a group (`criuctl.ops.groups`)."""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "group"


def of_copy(labels: Mapping[str, str], group: str) -> dict[str, str]:
    """Return the labels of a copy of a session with these `labels`: it is a member of `group`, ""
    for none, and not of its original's.
    """
    kept = {name: value for name, value in labels.items() if name != LABEL}
    return kept | ({LABEL: group} if group else {})
