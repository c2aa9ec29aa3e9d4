"""Hold device memory by the driver's API alone: ``hold.py FOLDER GIB BLOCK_MIB [nothp] [copy]``.

``nothp``: without transparent huge pages (prctl).  ``copy``: measure copies to host memory first,
and note them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import random
import sys
import time
from collections.abc import Callable

import cuda_api
from steplog import Steps, note

MIB = 1 << 20
PIECE = 64 * MIB
PR_SET_THP_DISABLE = 41


def _rate(size: int, work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return round(size / (time.monotonic() - begun) / 1e9, 2)


def _copies(buffer: cuda_api.Buffer, size: int) -> dict[str, float]:
    found = {}
    for name, advice in (("small pages", mmap.MADV_NOHUGEPAGE), ("huge pages", mmap.MADV_HUGEPAGE)):
        for copying in (True, False):
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(advice)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if copying:
                copy = functools.partial(buffer.read_into, address, size)
                found[f"to fresh memory, {name}"] = _rate(size, copy)
                found[f"to the same again, {name}"] = _rate(size, copy)
            else:
                touch = functools.partial(ctypes.memset, address, 1, size)
                found[f"page faults alone (memset), {name}"] = _rate(size, touch)
            memory.close()
    pinned = ctypes.c_void_p()
    pin = functools.partial(
        cuda_api.call, "cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(size), 0
    )
    found["allocating pinned memory"] = _rate(size, pin)
    copy = functools.partial(buffer.read_into, int(pinned.value or 0), size)
    found["to pinned memory"] = _rate(size, copy)
    return found


def main() -> None:
    """Allocate, measure if asked, and count."""
    size, block = int(float(sys.argv[2]) * (1 << 30)), int(sys.argv[3]) * MIB
    if "nothp" in sys.argv[4:]:
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    cuda_api.start()
    piece = random.Random(7).randbytes(min(PIECE, block))
    buffers = [cuda_api.Buffer(block) for _ in range(max(1, size // block))]
    for buffer in buffers:
        for offset in range(0, block, len(piece)):
            buffer.write(piece[: block - offset], offset)
    if "copy" in sys.argv[4:]:
        note(copies=_copies(buffers[0], block))
    steps = Steps()
    for number in steps:
        steps.log(number, b"")


if __name__ == "__main__":
    main()
