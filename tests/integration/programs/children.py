"""Has children that end at once, when it is asked: ``children.py FOLDER``; none may have the PID of
an earlier one.
"""

from __future__ import annotations

import os

from animal import Check, serve

seen: set[int] = set()


def check(found: Check) -> None:
    for _ in range(60):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        found.true(f"PID {pid} is new", pid not in seen)
        seen.add(pid)


serve(check)
