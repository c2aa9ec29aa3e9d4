"""A reader of a named pipe, who leaves in it what is there until asked.

Arguments: the pipe; r, or rw to keep it open itself; more pipes to have open both ways.
"""

from __future__ import annotations

import os
import sys

from animal import Check, serve

mode = {"r": os.O_RDONLY, "rw": os.O_RDWR}[sys.argv[3]]
fd = os.open(sys.argv[2], mode | os.O_NONBLOCK)

more = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in sys.argv[4:]]


def check(found: Check) -> None:
    data = b""
    try:
        while block := os.read(fd, 1 << 16):
            data += block
    except BlockingIOError:
        pass
    found.facts["read"] = data.decode()


serve(check)
