"""How the kernel serves threads: priority of input and output, slack of timers, personality; and
what a core dump holds.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from animal import Check, libc, serve, sleeper

IOPRIO_SET, IOPRIO_GET, WHO_PROCESS = (
    (251, 252, 1) if os.uname().machine == "x86_64" else (30, 31, 1)
)
BEST_EFFORT, IDLE = 2 << 13, 3 << 13
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
ADDR_NO_RANDOMIZE, UNAME26 = 0x0040000, 0x0020000
ASK = 0xFFFFFFFF  # of personality(2)
USUAL = (0, 50_000, 0)

Manners = tuple[int, int, int]


def take(priority: int, slack: int, personality: int) -> None:
    """Of the calling thread."""
    libc.syscall(IOPRIO_SET, WHO_PROCESS, 0, priority)
    libc.prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0)
    libc.personality(personality)


def have() -> Manners:
    """Of the calling thread."""
    priority = libc.syscall(IOPRIO_GET, WHO_PROCESS, 0)
    return (
        priority if priority >> 13 else 0,
        libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0),
        libc.personality(ASK),
    )


asked, answered = threading.Event(), threading.Event()
results: list[Manners] = []


def other() -> None:
    take(BEST_EFFORT | 6, 777, UNAME26)
    answered.set()
    while asked.wait():
        asked.clear()
        results.append(have())
        answered.set()


threading.Thread(target=other, daemon=True).start()
answered.wait()
answered.clear()
question, answer = os.pipe(), os.pipe()
if os.fork() == 0:  # one with the usual values, next to its parent
    while os.read(question[0], 1):
        os.write(answer[1], repr(have()).encode())
    os._exit(0)
if os.fork() == 0:  # a real-time process has no slack; its children and threads differ in theirs
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    if os.fork() == 0:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.write(answer[1], b".")
        sleeper()
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    threading.Thread(target=time.sleep, args=(1e6,)).start()
    os.write(answer[1], b".")
    sleeper()
os.read(answer[0], 1)
os.read(answer[0], 1)
if os.fork() == 0:  # one that has ended, and is not waited for
    os._exit(0)
take(IDLE, 123_456, ADDR_NO_RANDOMIZE)
Path("/proc/self/coredump_filter").write_text("0x7f")


def check(found: Check) -> None:
    found.equal("of the first thread", have(), (IDLE, 123_456, ADDR_NO_RANDOMIZE))
    asked.set()
    answered.wait()
    answered.clear()
    found.equal("of the second", results.pop(), (BEST_EFFORT | 6, 777, UNAME26))
    os.write(question[1], b"?")
    found.equal("of the child", os.read(answer[0], 100).decode(), repr(USUAL))
    found.equal("core filter", Path("/proc/self/coredump_filter").read_text().strip(), "0000007f")


serve(check)
