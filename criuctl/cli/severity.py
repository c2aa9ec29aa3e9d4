"""The exit code of an operation on several things, of which some failed."""

from __future__ import annotations

from collections.abc import Iterable


def worst(codes: Iterable[int]) -> int:
    """The exit code that tells most of several: a bug first, then the first failure, then a partial success (11), then 0."""
    seen = list(codes)
    if 1 in seen:
        return 1
    failures = [code for code in seen if code not in (0, 11)]
    if failures:
        return failures[0]
    return 11 if 11 in seen else 0
