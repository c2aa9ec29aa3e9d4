"""Limits on decoded data, in proportion to its stored size.

Compression, repeated chunks and JSON let a small file stand for a very large one. Decoding here is
bounded by a free allowance, which fits every honest small object, plus a multiple of the bytes that
are really stored. To make a reader use much memory, an attacker must store much data.
``images/FORMAT.md`` ("Bounds") has the table.

Writers follow the same rules: an object whose content compresses better than `RATIO` is padded
(`least_stored`), so nothing that was written is ever refused for being too regular.
"""

from __future__ import annotations

RATIO = 64  # plain bytes for each stored one
FREE_HEAD = 64 << 10  # plain bytes of a head that are always allowed
FREE_BODY = 16 << 20  # of a body
FREE_LIST = 64 << 20  # of a list of chunks: 1.8 million, 465 GiB of identical memory
FREE_RUNS = 16 << 20  # of a list of runs: 2 million
FREE_CONTENT = 4 << 20  # of other content that is read at once: 262,144 runs of pages
FREE_VALUES = 1 << 18  # values of JSON
VALUES_RATIO = 8  # more of them for each stored byte


def most(stored: int, free: int) -> int:
    """Return the plain bytes that `stored` bytes may decode to."""
    return max(free, stored * RATIO)


def least_stored(plain: int, free: int, values: int = 0) -> int:
    """Return the stored bytes that so many plain bytes, in so many values of JSON, need at least:
    the inverse of `most`.
    """
    by_size = -(-plain // RATIO) if plain > free else 0
    return max(by_size, -(-(values - FREE_VALUES) // VALUES_RATIO))


def most_values(stored: int) -> int:
    """Return how many values of JSON `stored` bytes may hold."""
    return FREE_VALUES + stored * VALUES_RATIO
