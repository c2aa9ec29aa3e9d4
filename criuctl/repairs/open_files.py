"""The entries of files.img that several repairs of descriptors use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..criu.images import ImageSet


def first_holder(images: ImageSet) -> Callable[[Any], tuple[int, int] | None]:
    """Return a function: an entry of files.img -> the (PID, descriptor) that CRIU read it from."""
    holders = images.holders()
    # A FIFO or a terminal is opened by a regular file's entry of its own.
    opened_by = {
        f.regf_id: e.id for e in images.files() for f in (e.fifo, e.tty) if f.HasField("regf_id")
    }
    return lambda entry: next(iter(holders.get(opened_by.get(entry.id, entry.id), ())), None)
