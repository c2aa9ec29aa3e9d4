"""The exit code of an operation on several things, if some failed: the worst of all.

Worst first: a bug (1), a signal (128+N); what may be lost: damaged data (8), a restore (6) or dump
(5) that failed; what affects everything: the store (7), the platform (13), time (12); what was
refused: by a hook (10), by another holder (9), by the preflight (4); what was missing (3) or
invalid (2); what policy calls optional (11).
"""

from __future__ import annotations

from collections.abc import Iterable

ORDER = (8, 6, 5, 7, 13, 12, 10, 9, 4, 3, 2, 11, 0)
IN_WORDS = "1, 128+N, 8, 6, 5, 7, 13, 12, 10, 9, 4, 3, 2, 11"  # for manual pages


def worst(codes: Iterable[int]) -> int:
    """Return the worst of several exit codes, 0 of none; an unknown one is as bad as a bug."""
    return min(codes, key=_rank, default=0)


def _rank(code: int) -> int:
    if code in ORDER:
        return ORDER.index(code)
    return -1 if code > 128 else -2
