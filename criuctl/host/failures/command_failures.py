"""Failures of helper programs, also killed ones: reported as the operation's failure, not as a bug
of criuctl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import CommandFailed, CriuctlError


@contextmanager
def reraised_as(kind: type[CriuctlError], fate: Callable[[], str]) -> Iterator[None]:
    """Re-raise `CommandFailed` as `kind`, appending the tree's fate; without one it passes
    unchanged.
    """
    try:
        yield
    except CommandFailed as error:
        ending = fate()
        if not ending:
            raise
        raise kind(f"{error.message}; {ending}", hint=error.hint, **error.details) from error
