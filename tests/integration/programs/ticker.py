"""Never still: appends a number to ``ticks`` every few milliseconds and keeps a thousand of them in
memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from animal import Check, path, ready, report

ticks = os.open(path("ticks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
number = 0
recent: list[int] = []


def check(found: Check) -> None:
    found.equal("what is remembered", recent[-1:], [number])
    found.facts |= {"number": number}


asked = threading.Event()
signal.signal(signal.SIGUSR1, lambda signum, frame: asked.set())
while True:
    number += 1
    os.write(ticks, b"%d\n" % number)
    recent = [*recent[-999:], number]
    if number == 5:
        ready()
    if asked.is_set():
        asked.clear()
        report(check)
    time.sleep(0.005)
