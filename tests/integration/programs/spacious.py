"""Address space that grew, piece by piece, beyond what the host has of memory: one mapping, hardly
any of it touched.
"""

from __future__ import annotations

import ctypes
import mmap

from animal import Check, libc, serve

with open("/proc/meminfo", encoding="ascii") as file:
    lines = dict(line.split(":", 1) for line in file)
ROOM = sum(int(lines[key].split()[0]) for key in ("MemTotal", "SwapTotal")) << 10
PIECE = (ROOM * 3 // 4) & -mmap.PAGESIZE
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
START = libc.mmap(None, 2 * PIECE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
for piece in range(2):
    if libc.mprotect(START + piece * PIECE, PIECE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
count = 0


def check(found: Check) -> None:
    global count
    with open("/proc/self/maps") as file:
        sizes = [
            int(b, 16) - int(a, 16) for a, _, b in (line.split()[0].partition("-") for line in file)
        ]
    found.equal("one mapping", max(sizes) >= 2 * PIECE, True)
    place = START + 2 * PIECE - mmap.PAGESIZE
    found.equal("touched", ctypes.string_at(place, 8), count.to_bytes(8, "little"))
    count += 1
    ctypes.memmove(place, count.to_bytes(8, "little"), 8)


serve(check)
