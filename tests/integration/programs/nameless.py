"""Anonymous shared memory that is open as a file, through ``map_files``; one that is still mapped,
one that is not.
"""

from __future__ import annotations

import mmap
import os

from animal import Check, serve


def opened(area: mmap.mmap) -> int:
    """A descriptor of the shared memory in which `area` begins with these 16 bytes."""
    mark = os.urandom(16)
    area[:16] = mark
    for name in os.listdir("/proc/self/map_files"):
        start = int(name.partition("-")[0], 16)
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            try:
                memory.seek(start)
                if memory.read(16) == mark:
                    return os.open(f"/proc/self/map_files/{name}", os.O_RDWR)
            except (OSError, ValueError):
                continue
    raise RuntimeError("the area is not among the files that are mapped")


mapped, let_go = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 16)
files = [opened(mapped), opened(let_go)]
let_go.close()
os.pwrite(files[1], b"kept by a descriptor alone", 100)
count = 0


def check(found: Check) -> None:
    global count
    found.equal("the same memory", os.pread(files[0], 8, 4096), mapped[4096:4104])
    found.equal("counted", mapped[4096:4104], count.to_bytes(8, "little"))
    count += 1
    os.pwrite(files[0], count.to_bytes(8, "little"), 4096)
    found.equal("seen at once", mapped[4096:4104], count.to_bytes(8, "little"))
    found.equal("alone", os.pread(files[1], 26, 100), b"kept by a descriptor alone")
    found.equal("sizes", [os.fstat(file).st_size for file in files], [1 << 20, 1 << 16])


serve(check)
