"""The protocol between a program of the zoo and its test (standard library only; see
tests/support/zoo.py).

`serve` tells the test that the program's state is built, then waits, quietly, for SIGUSR1; each
time the program's own check runs and its findings are written to ``report-<n>.json`` by one rename.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

FOLDER = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)


def path(name: str) -> str:
    """A file of this program's folder."""
    return os.path.join(FOLDER, name)


def fork_below() -> int:
    """As os.fork, but the child's PID is lower than ours."""
    for number in range(os.getpid() - 1, 300, -1):
        if os.path.exists(f"/proc/{number}"):
            continue
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(number - 1))
        child = os.fork()
        if not child or child < os.getpid():
            return child
        os.kill(child, signal.SIGKILL)  # another process was faster
        os.waitpid(child, 0)
    raise SystemExit("no lower PID is free")


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that look random, compress badly and are the same each time."""
    import random

    return random.Random(seed).randbytes(size)


class Check:
    """Collects what one look at the program's own state finds."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.facts: dict[str, Any] = {}

    def equal(self, what: str, got: Any, wanted: Any) -> None:
        """`got` must be `wanted`."""
        if got != wanted:
            self.failures.append(f"{what}: {_short(got)}, not {_short(wanted)}")

    def true(self, what: str, fact: Any) -> None:
        """`fact` must hold."""
        if not fact:
            self.failures.append(f"not so: {what}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:100]}... ({len(text)} characters)"


_reports = 0


def report(check: Callable[[Check], None]) -> None:
    """Run `check` once and leave its report for the test."""
    global _reports
    _reports += 1
    found = Check()
    try:
        check(found)
    except BaseException:
        found.failures.append(traceback.format_exc())
    body = {
        "ok": not found.failures,
        "failures": found.failures,
        "number": _reports,
        "pid": os.getpid(),
        **found.facts,
    }
    temporary = path(f".report-{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(body, file)
    os.rename(temporary, path(f"report-{_reports}.json"))


def ready() -> None:
    """Tell the test that the state is built."""
    with open(path(".ready"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(path(".ready"), path("ready"))


def serve(check: Callable[[Check], None]) -> None:
    """Say ready and answer SIGUSR1 for ever, keeping still in between.

    It waits in read(2), which a freeze interrupts without a trace (sigwait would return and set
    errno: a page that differs).
    """
    asked, asking = os.pipe()
    os.set_blocking(asking, False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.set_wakeup_fd(asking)
    ready()
    while os.read(asked, 1):
        report(check)


def sleeper() -> None:
    """Wait for ever without changing anything."""
    while True:
        signal.pause()
