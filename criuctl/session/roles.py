"""The highest role of an operator in a session.

An admin of a session limits operators by kind and name, or all of a kind. The holder keeps these
limits, a state file and each checkpoint have a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .protocol import ANY, OWN, ROLES

Ceilings = Mapping[tuple[str, str], str]  # (kind, name) -> role


def ceiling(ceilings: Ceilings, kind: str, name: str) -> str:
    """Return the highest role of this operator: that of its name, or else that of its kind."""
    # Dumps, restores and supervision go on when all other services are limited.
    own = kind == "service" and name.startswith(OWN)
    general = "admin" if own else ceilings.get((kind, ANY), "admin")
    return ceilings.get((kind, name), general)


def lower(role: str, other: str) -> str:
    """Return the lower one of two roles."""
    return min(role, other, key=ROLES.index)


def of_status(roles: Iterable[Mapping[str, Any]]) -> Ceilings:
    """Return the limits that a holder's status, or its state file, lists."""
    return {(str(one["kind"]), str(one["name"])): str(one["role"]) for one in roles}
