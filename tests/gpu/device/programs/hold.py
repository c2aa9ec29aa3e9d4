"""Hold device memory by the driver's API alone: ``hold.py FOLDER GIB BLOCK_MIB [nothp] [copy]``; starts in a second.

``nothp``: without transparent huge pages (prctl).  ``copy``: measure copies to host memory first, and note them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time
from collections.abc import Callable

from steplog import Steps, note

MIB = 1 << 20
PR_SET_THP_DISABLE = 41


def _must(name: str, *arguments: object) -> None:
    answer = getattr(cuda, name)(*arguments)
    if answer:
        raise SystemExit(f"{name} answers {answer}")


def _rate(size: int, work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return round(size / (time.monotonic() - begun) / 1e9, 2)


def _copies(pointer: ctypes.c_uint64, size: int) -> dict[str, float]:
    def to(address: int) -> Callable[[], None]:
        return lambda: _must("cuMemcpyDtoH_v2", ctypes.c_void_p(address), pointer, size)

    found = {}
    for name, advice in (("small pages", mmap.MADV_NOHUGEPAGE), ("huge pages", mmap.MADV_HUGEPAGE)):
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
        view = (ctypes.c_char * size).from_buffer(memory)
        address = ctypes.addressof(view)
        found[f"to fresh memory, {name}"] = _rate(size, to(address))
        found[f"to the same again, {name}"] = _rate(size, to(address))
        del view
        memory.close()
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
        view = (ctypes.c_char * size).from_buffer(memory)
        address = ctypes.addressof(view)
        touch = functools.partial(ctypes.memset, address, 1, size)
        found[f"page faults alone (memset), {name}"] = _rate(size, touch)
        del view
        memory.close()
    pinned = ctypes.c_void_p()
    begun = time.monotonic()
    _must("cuMemAllocHost_v2", ctypes.byref(pinned), size)
    found["allocating pinned memory"] = round(size / (time.monotonic() - begun) / 1e9, 2)
    found["to pinned memory"] = _rate(size, to(int(pinned.value or 0)))
    _must("cuMemFreeHost", pinned)
    return found


def main() -> None:
    """Allocate, measure if asked, and count."""
    size, block = int(float(sys.argv[2]) * (1 << 30)), int(sys.argv[3]) * MIB
    if "nothp" in sys.argv[4:]:
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _must("cuInit", 0)
    _must("cuDeviceGet", ctypes.byref(device), 0)
    _must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _must("cuCtxSetCurrent", context)
    pointer = ctypes.c_uint64()
    for number in range(max(1, size // block)):
        _must("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(block))
        _must("cuMemsetD32_v2", pointer, ctypes.c_uint(number * 2654435761 & 0xFFFFFFFF), block // 4)
    _must("cuCtxSynchronize")
    if "copy" in sys.argv[4:]:
        note(copies=_copies(pointer, block))
    steps = Steps()
    for number in steps:
        steps.log(number, b"")


cuda = ctypes.CDLL("libcuda.so.1")

if __name__ == "__main__":
    main()
