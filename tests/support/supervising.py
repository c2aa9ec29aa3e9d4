"""A supervisor that a test has started: what it tells, line by line, and waiting for it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .keeper import Launched, wait_until

PATIENCE = 60  # seconds for what takes a fraction of one on an idle machine

# Counts in memory and tells each number to a file, which stays where it is when the program goes
# back in time.
COUNTER = """\
import os, sys, time
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
number = 0
while True:
    number += 1
    os.write(out, b"%d %.3f\\n" % (number, time.time()))
    if os.path.exists(sys.argv[1] + ".end"):
        os._exit(int(open(sys.argv[1] + ".end").read()))
    time.sleep(0.005)
"""


class Started(Protocol):
    """A command that was started, here or on another host."""

    process: Launched
    out: Path

    def output(self) -> str:
        """All that it wrote to stdout and stderr."""


class Supervised:
    """``criuctl supervise --json``, running."""

    def __init__(self, command: Started) -> None:
        self.command = command

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What it has reported so far, of these kinds; a line that is being written is not there
        yet.
        """
        lines = self.command.out.read_bytes().rpartition(b"\n")[0].decode().splitlines()
        found = [json.loads(line) for line in lines]
        return [event for event in found if not kinds or event.get("event") in kinds]

    def wait(
        self,
        kind: str,
        count: int = 1,
        where: Callable[[dict[str, Any]], bool] = lambda _event: True,
    ) -> dict[str, Any]:
        """Wait until it has reported `count` such events, and return the last of them."""

        def found() -> dict[str, Any] | None:
            # asked first: what it reported before its end is there
            ended = self.command.process.poll() is not None
            seen = [event for event in self.events(kind) if where(event)]
            if len(seen) < count:
                assert not ended, f"ended before {kind}: {self.command.output()}"
                return None
            return seen[count - 1]

        try:
            event: dict[str, Any] = wait_until(found, PATIENCE, kind)
        except TimeoutError as error:
            raise AssertionError(f"no {kind}: {self.command.output()}") from error
        return event

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it: its exit code."""
        self.command.process.kill(number)
        return self.command.process.wait(PATIENCE)
