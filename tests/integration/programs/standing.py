"""Knows for how long it has stood still: ``standing.py FOLDER MIB [ADDRESS]``; with a TCP
connection to the echo there.

It looks at the clock every few milliseconds, and remembers the longest time between two looks since
it was last asked.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from animal import Check, ready, report

memory = [os.urandom(1 << 20) for _ in range(int(sys.argv[2]))]
connection = None
if len(sys.argv) > 3:
    host, port = sys.argv[3].rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
longest = 0.0
count = 0
asked = False


def ask(_number: int, _frame: object) -> None:
    global asked
    asked = True


def check(found: Check) -> None:
    global longest
    found.facts |= {"longest": longest, "count": count}
    longest = 0.0
    if connection is not None:
        connection.sendall(b"%d\n" % count)
        found.equal("what the peer says", connection.recv(64), b"%d\n" % count)


signal.signal(signal.SIGUSR1, ask)
ready()
before = time.monotonic()
while True:
    time.sleep(0.005)
    now = time.monotonic()
    longest, before, count = max(longest, now - before), now, count + 1
    if asked:
        asked = False
        report(check)
        before = time.monotonic()
