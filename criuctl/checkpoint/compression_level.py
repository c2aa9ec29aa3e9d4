"""The choice of compression level, so that neither the compressors nor the upload wait for each
other much.

Both work at the same time, and the slower one decides how long a dump takes. Where the store takes
bytes faster than the compressors make them, a lower level is faster. Where the store is slow, a
higher level is faster, up to the point where the compressors become the slower part.
"""

from __future__ import annotations

from collections.abc import Mapping

# zstd on pieces of 256 KiB of programs' memory: level -> (speed, size) relative to level 1
LEVELS: Mapping[int, tuple[float, float]] = {
    -5: (1.40, 1.34),
    -3: (1.21, 1.24),
    -1: (1.11, 1.11),
    1: (1.00, 1.00),
    3: (0.48, 0.93),
    6: (0.18, 0.91),
}
# a size relative to the plain one; content that does not get smaller than this at one level does
# not at any
_HOPELESS = 0.97
_NOTICEABLE = 1.03  # a level must be this much faster than the current one to replace it


def fitting(level: int, compressing: float, ratio: float, sending: float) -> int:
    """Return the best level. `level` now compresses `compressing` plain bytes a second, all threads
    together, to `ratio` of their size, and the store takes `sending` bytes a second.
    """
    if level not in LEVELS or min(compressing, ratio, sending) <= 0:
        return level

    def seconds(candidate: int) -> tuple[float, float]:
        """Return the seconds for a plain byte: in total, and of the compressors alone."""
        faster, larger = (
            now / used for now, used in zip(LEVELS[candidate], LEVELS[level], strict=True)
        )
        work = 1 / (compressing * faster)
        size = ratio if ratio > _HOPELESS else min(ratio * larger, 1.0)
        return max(work, size / sending), work

    best = min(LEVELS, key=seconds)
    return best if seconds(best)[0] * _NOTICEABLE <= seconds(level)[0] else level
