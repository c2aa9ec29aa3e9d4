"""A parent and five children; it writes down how each ends: ``PID wait-status`` lines in the file
``ended``.
"""

from __future__ import annotations

import os
import signal
import threading

from animal import Check, path, serve, sleeper

children = []
for number in range(5):
    child = os.fork()
    if not child:
        for _ in range(number):
            threading.Thread(target=signal.pause, daemon=True).start()
        sleeper()
    children.append(child)
ended: list[int] = []


def waits() -> None:
    for _ in children:
        pid, status = os.wait()
        with open(path("ended"), "a") as file:
            file.write(f"{pid} {status}\n")
        ended.append(pid)


threading.Thread(target=waits, daemon=True).start()


def check(found: Check) -> None:
    for pid in set(children) - set(ended):
        os.kill(pid, 0)


serve(check)
