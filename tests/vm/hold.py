"""criuctl on a machine, held at a named step until the harm is done: `criuctl.pausepoints` over a
FIFO there.
"""

from __future__ import annotations

import shlex
import subprocess

from .machine import Machine, VmError

# Tells when it listens, then when criuctl is at the step; lets go when its input ends.
HOLD = """
import os, select, sys
os.mkfifo(sys.argv[1])
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)
print("listening", flush=True)
select.select([fd], [], [])
print(os.read(fd, 100).decode(), flush=True)
sys.stdin.read()
os.close(fd)
os.unlink(sys.argv[1])
"""


class Hold:
    """criuctl, held at a step until `let_go`."""

    def __init__(self, machine: Machine, step: str) -> None:
        self.fifo = "/run/hold"
        self.variables = f"CRIUCTL_PAUSE_AT={step} CRIUCTL_PAUSE_FIFO={self.fifo}"
        machine.sh(f"rm -f {self.fifo}")
        self._process = machine.start(
            shlex.join(["python3", "-c", HOLD, self.fifo]), stdin=subprocess.PIPE
        )
        self._expect("listening")

    def reached(self, command: subprocess.Popen[str]) -> None:
        """Wait until criuctl is there; `command` is what leads it there."""
        try:
            self._expect("paused")
        except VmError as error:
            command.kill()
            raise VmError(f"{error}: {command.communicate()}") from None

    def let_go(self) -> None:
        """Whether anything is held or not."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(word):
            raise VmError(f"expected {word!r} of who holds criuctl, not {line!r}")
