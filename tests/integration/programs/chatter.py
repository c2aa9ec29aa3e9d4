"""A multiplexer that reads all the time what a program in its terminal prints all the time:
numbers, none out of its turn.
"""

from __future__ import annotations

import os
import pty
import threading
import time
import tty

from animal import Check, serve

master, slave = pty.openpty()
tty.setraw(slave)
if os.fork() == 0:
    os.close(master)
    number = 0
    while True:
        os.write(slave, b"%07d\n" % number)
        number += 1
os.close(slave)
last, wrong = -1, ""


def read() -> None:
    global last, wrong
    rest = b""
    while True:
        *lines, rest = (rest + os.read(master, 400)).split(b"\n")
        for line in lines:
            if int(line) != last + 1:
                wrong += f"{line!r} after {last}; "
            last = int(line)
        time.sleep(0.001)


def reading() -> None:
    global wrong
    try:
        read()
    except BaseException as error:
        wrong = wrong or repr(error)
        raise


threading.Thread(target=reading, daemon=True).start()


def check(found: Check) -> None:
    seen = last
    found.equal("out of its turn", wrong, "")
    for _ in range(200):
        if last > seen + 1000:
            return
        time.sleep(0.05)
    found.true("more is printed", False)


serve(check)
