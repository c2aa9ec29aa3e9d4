"""What became of the tree, added to a failure that does not say so by itself: of helper programs
(also killed ones, which are no bug of criuctl's), of the store, and to an interrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import CommandFailed, CriuctlError, StoreError


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


@contextmanager
def fate_added(fate: Callable[[], str]) -> Iterator[None]:
    """Add the tree's fate to a store's error and, as a note, to an interrupt."""
    try:
        yield
    except StoreError as error:
        if (ending := fate()) and "the tree " not in error.message:
            error.message += f"; {ending}"
        raise
    except KeyboardInterrupt as interrupt:
        if ending := fate():
            interrupt.add_note(ending)
        raise
