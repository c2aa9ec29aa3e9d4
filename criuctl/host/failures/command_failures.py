"""Helper programs that fail, or that somebody kills: why an operation failed, and no bug of
criuctl's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import CommandFailed, CriuctlError


@contextmanager
def told_as(kind: type[CriuctlError], fate: Callable[[], str]) -> Iterator[None]:
    """While inside, such a failure is a `kind`, with what has become of the tree; of which "" is
    none.
    """
    try:
        yield
    except CommandFailed as error:
        told = fate()
        if not told:
            raise
        raise kind(f"{error.message}; {told}", hint=error.hint, **error.details) from error
