"""The smallest tree worth keeping: a counter, some megabytes, a child, a thread. Arguments: MiB of
memory, default 4.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading

from animal import Check, path, pattern, serve

MIB = int(sys.argv[2]) if len(sys.argv) > 2 else 4
block = pattern(1 << 20)
heap = [bytearray(block) for _ in range(MIB)]
for number, piece in enumerate(heap):
    piece[:8] = number.to_bytes(8, "big")
wanted = hashlib.sha256(b"".join(heap)).hexdigest()
asked_read, asked_write = os.pipe()
answer_read, answer_write = os.pipe()
log = os.open(path("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
counter = 0


def child() -> None:
    """Count each byte that the parent sends."""
    count = 0
    while os.read(asked_read, 1):
        count += 1
        os.write(answer_write, count.to_bytes(4, "big"))


if os.fork() == 0:
    os.close(asked_write)
    child()
    os._exit(0)
os.close(asked_read)
os.close(answer_write)
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire, daemon=True).start()


def check(found: Check) -> None:
    global counter
    counter += 1
    os.write(asked_write, b"x")
    found.equal("the child's count", int.from_bytes(os.read(answer_read, 4), "big"), counter)
    found.equal("memory", hashlib.sha256(b"".join(heap)).hexdigest(), wanted)
    os.write(log, b"%d\n" % counter)
    found.facts |= {
        "counter": counter,
        "digest": wanted,
        "heap": hashlib.sha256(b"".join(heap)).hexdigest(),
    }


serve(check)
