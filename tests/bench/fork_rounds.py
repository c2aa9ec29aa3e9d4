"""Rounds of forks by the Python API: ``python -P fork_rounds.py SIZE LIVE STORED ROUNDS``.

Prints a line of JSON for each: kind, seconds until the copies were made and until all answered,
bytes of private memory of each copy by then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from criuctl import Session
from criuctl.errors import CriuctlError
from criuctl.proc.tree import read_tree

PROGRAM = """
import random, sys
data = bytearray()
while len(data) < SIZE:
    data += random.Random(len(data)).randbytes(1 << 19) + bytes(range(256)) * 2048
print("ready", flush=True)
for line in sys.stdin:
    print("answer", len(data) + int(line), flush=True)
"""
_PATIENCE = 120.0


def private_memory(root: int) -> int:
    """The bytes that the processes of a tree have for themselves."""
    total = 0
    for process in read_tree(root):
        with suppress(OSError), open(f"/proc/{process.pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private"))
    return total


def measure(kind: str, began: float, copies: Sequence[Session], frozen_ms: float | None) -> None:
    """Have all copies answer, print the round, and end them."""
    made = time.perf_counter() - began
    for number, copy in enumerate(copies):
        copy.send(f"{number}\n")
    for copy in copies:
        copy.wait_match(r"answer \d+", timeout=_PATIENCE)
    answered = time.perf_counter() - began
    private = [private_memory(int(copy.restored["pid"])) for copy in copies]
    body = {"kind": kind, "made": made, "answered": answered, "private": private}
    print(json.dumps({**body, "frozen_ms": frozen_ms}), flush=True)
    for copy in copies:
        copy.kill(0)
        copy.forget()
        copy.close()


def main() -> None:
    """Run the rounds."""
    size, live, stored, rounds = map(int, sys.argv[1:])
    program = PROGRAM.replace("SIZE", str(size))
    origin = Session.run([sys.executable, "-c", program], name="origin")
    try:
        origin.wait_match("ready", timeout=_PATIENCE)
        checkpoint = origin.snapshot()
        for _ in range(rounds):
            began = time.perf_counter()
            copies = origin.fork(live)
            measure("live", began, copies, origin.checkpoints()[-1].frozen_ms)
            began = time.perf_counter()
            measure("stored", began, Session.fork_from(checkpoint, stored), None)
    finally:
        with suppress(CriuctlError):
            origin.kill(0)
        origin.close()


if __name__ == "__main__":
    main()
