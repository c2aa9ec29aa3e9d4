"""A file that is written to, not appended to, by two who share the offset, and one that is only
mapped.
"""

from __future__ import annotations

import mmap
import os

from animal import Check, path, serve

SIZE = mmap.PAGESIZE
ledger = os.open(path("ledger"), os.O_RDWR | os.O_CREAT, 0o640)
other = os.open(path("ledger"), os.O_WRONLY)
mapped = os.open(path("mapped"), os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(mapped, SIZE)
memory = mmap.mmap(mapped, SIZE)
os.close(mapped)
count = 0


def check(found: Check) -> None:
    global count
    count += 1
    os.write(ledger, b"line %d\n" % count)
    memory[:8] = count.to_bytes(8, "little")
    with open(path("mapped"), "ab") as file:  # it has another size now
        file.write(b"more")
    found.equal(
        "what was written",
        os.pread(ledger, 4096, 0),
        b"".join(b"line %d\n" % n for n in range(1, count + 1)),
    )
    found.equal("the other's file", os.fstat(other).st_ino, os.fstat(ledger).st_ino)
    found.facts |= {"inode": os.fstat(ledger).st_ino, "count": int.from_bytes(memory[:8], "little")}


serve(check)
