"""Holding a host's criuctl at a named step (see criuctl/pausepoints.py), also one that another host
has started over ssh.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

from support.keeper import wait_until

from .host import Host, HostCommand

_numbers = itertools.count(1)


class Pause:
    """A FIFO on a host that a criuctl of it tells its steps to."""

    def __init__(self, host: Host, step: str) -> None:
        self.step = step
        name = f"/tmp/pause-{next(_numbers)}"
        self._path = host.path(name)
        os.mkfifo(self._path)
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.env = {"CRIUCTL_PAUSE_AT": step, "CRIUCTL_PAUSE_FIFO": name}

    def wait(self, command: HostCommand, timeout: float = 120) -> None:
        """Wait until the step is reached; `command` is what leads there."""

        def line() -> bytes:
            if select.select([self._fd], [], [], 0.05)[0] and (data := os.read(self._fd, 256)):
                return data
            assert command.process.poll() is None, f"ended before {self.step}: {command.output()}"
            return b""

        said = wait_until(line, timeout, f"criuctl at {self.step}")
        assert said == f"paused {self.step}\n".encode()

    def steps(self) -> list[str]:
        """With the step ``*``: all that were gone through."""
        data = b""
        while piece := self._read():
            data += piece
        return [line.removeprefix("reached ") for line in data.decode().splitlines()]

    def go_on(self) -> None:
        """Let go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return b""


@contextmanager
def pausing(host: Host, step: str, *, command: str = "") -> Iterator[Pause]:
    """A pause at `step`: its `env` is for a command that the test starts, or it is set for every
    `command` of the host.
    """
    pause = Pause(host, step)
    if command:
        host.set_command_environment(command, pause.env)
    try:
        yield pause
    finally:
        pause.go_on()
        if command and host.alive():
            host.set_command_environment(command, {})
