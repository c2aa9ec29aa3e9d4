"""How much may be made of bytes that others have written, in proportion to how many they are.

Compression, repeated chunks and JSON let a small file stand for a very large one.  What is decoded
here is bounded by a free allowance, which every honest small object fits into, plus a multiple of
the bytes that are really stored: then whoever wants much memory of a reader must bring much.
``images/FORMAT.md`` ("Bounds") has the table.

Writers keep to the same rules: an object whose content compresses better than `RATIO` is padded
(`least_stored`), so nothing that was written is ever refused for being too regular.
"""

from __future__ import annotations

RATIO = 64  # plain bytes for each stored one
FREE_HEAD = 64 << 10  # plain bytes of a head, whatever it is stored in
FREE_BODY = 16 << 20  # of a body
FREE_LIST = 64 << 20  # of a list of chunks: 1.8 million, 465 GiB of memory that is all alike
FREE_RUNS = 16 << 20  # of a list of runs: 2 million, whole chunks of memory perhaps
FREE_CONTENT = 4 << 20  # of other content that is read at once: 262,144 runs of pages
FREE_VALUES = 1 << 18  # values of JSON
VALUES_RATIO = 8  # more of them for each stored byte


def most(stored: int, free: int) -> int:
    """The plain bytes that `stored` bytes may stand for."""
    return max(free, stored * RATIO)


def least_stored(plain: int, free: int, values: int = 0) -> int:
    """The inverse: the bytes that so many plain ones, in so many values of JSON, have to be stored
    in.
    """
    by_size = -(-plain // RATIO) if plain > free else 0
    return max(by_size, -(-(values - FREE_VALUES) // VALUES_RATIO))


def most_values(stored: int) -> int:
    """The values of JSON that `stored` bytes may stand for."""
    return FREE_VALUES + stored * VALUES_RATIO
