"""More processes than a program may usually have descriptors open, when the limit is set low for
it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from animal import Check, serve

children = []
for _ in range(160):
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    children.append(child)


def check(found: Check) -> None:
    theirs = {
        int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    }
    found.equal("children", theirs, set(children))


serve(check)
