"""Memory that is written to all the time: of 32 MiB the pages of one MiB, spread over a part.
Argument: how far apart (pages).
"""

from __future__ import annotations

import hashlib
import mmap
import sys
import threading
import time

from animal import Check, pattern, serve

PAGE = mmap.PAGESIZE
APART = int(sys.argv[2]) if len(sys.argv) > 2 else 1
PAGES = 256
memory = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), 1 << 20):
    memory[at : at + (1 << 20)] = pattern(1 << 20, at)
places = [n * APART * PAGE for n in range(PAGES)]
turns = 0


def still() -> str:
    state, at = hashlib.sha256(), 0
    for place in [*places, len(memory)]:
        state.update(memory[at:place])
        at = place + PAGE
    return state.hexdigest()


wanted = still()


def rewrite() -> None:
    global turns
    while True:
        turns += 1
        for place in places:
            memory[place : place + PAGE] = (turns * len(memory) + place).to_bytes(8, "little") * (
                PAGE // 8
            )
        time.sleep(0.005)


def check(found: Check) -> None:
    found.equal("what is not written to", still(), wanted)
    for place in places:
        before = turns
        page = memory[place : place + PAGE]
        after = turns  # the thread goes on meanwhile
        turn, rest = divmod(int.from_bytes(page[:8], "little"), len(memory))
        found.true(f"page {place // PAGE} is of one turn", page == page[:8] * (PAGE // 8))
        found.true(
            f"page {place // PAGE} is of this turn or the last",
            rest == place and before - 1 <= turn <= after,
        )
    found.facts["turns"] = turns


threading.Thread(target=rewrite, daemon=True).start()
while turns < 2:  # every page has been written to
    time.sleep(0.001)
serve(check)
