"""Each time it is asked, a thousand more pieces of shared memory, each a mapping of its own."""

from __future__ import annotations

import mmap

from animal import Check, serve

held: list[mmap.mmap] = []


def check(_found: Check) -> None:
    held.extend(mmap.mmap(-1, mmap.PAGESIZE) for _ in range(1000))


serve(check)
