"""The program of a job, as a child of `criuctl slurm run`: started at a gate, its output passed on.

It waits at the gate, before it executes anything, until the service has made this node the job's
home. Its standard output and error are pipes, because a pipe's other end can be given to the
restored program without a name that anyone opens; what comes out goes to the job's own streams.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

_CHUNK = 1 << 16
_DRAIN = 30.0  # seconds for the last output to be passed on
_IGNORED = (signal.SIGTERM, signal.SIGUSR1)


class Pipes:
    """The two pipes of a program, and what passes on their contents."""

    def __init__(self) -> None:
        self._ends = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        self._threads: list[threading.Thread] = []

    @property
    def writing(self) -> list[int]:
        """The ends for the program: of standard output, and of standard error."""
        return [write for _, write in self._ends]

    def pass_on(self) -> None:
        """Close our writing ends, and pass on what comes, until the last other one is closed."""
        for number, (read, write) in enumerate(self._ends, 1):
            os.close(write)
            thread = threading.Thread(target=_pass, args=(read, number), daemon=True)
            thread.start()
            self._threads.append(thread)

    def drain(self) -> None:
        """Wait until all of the output has been passed on: the program has ended."""
        for thread in self._threads:
            thread.join(_DRAIN)


def _pass(source: int, target: int) -> None:
    with suppress(OSError):  # the job's own stream takes no more: the program gets SIGPIPE then
        while data := os.read(source, _CHUNK):
            while data:
                data = data[os.write(target, data) :]
    os.close(source)


class Gate:
    """A program that is forked, and executes when it is let through."""

    def __init__(self, argv: Sequence[str], streams: Sequence[int]) -> None:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(theirs)
            _become(argv, streams, ours)
        os.close(ours)
        self._gate = theirs
        self.pidfd = os.pidfd_open(self.pid)

    def let_through(self) -> None:
        """Let it execute its program."""
        with suppress(BrokenPipeError):  # it was killed
            os.write(self._gate, b"x")
        os.close(self._gate)

    def give_up(self) -> None:
        """End it: it has executed nothing."""
        os.close(self._gate)
        os.waitpid(self.pid, 0)


def _become(argv: Sequence[str], streams: Sequence[int], gate: int) -> None:
    """Become the program, in the forked process; does not return."""
    code = 127
    try:
        os.setsid()  # so that it can come back where no process has this session
        if os.read(gate, 1) != b"x":
            os._exit(1)
        _settle_stdin()
        for number, fd in enumerate(streams, 1):
            os.dup2(fd, number)
        # Slurm signals every process of a job that it requeues. This one is stored then; nothing
        # keeps it from handling the signal itself.
        for signal_number in _IGNORED:
            signal.signal(signal_number, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(argv[0], list(argv))
    except FileNotFoundError as error:
        _say(f"criuctl: {argv[0]}: {error.strerror}\n")
    except OSError as error:
        code = 126
        _say(f"criuctl: {argv[0]}: {error.strerror}\n")
    finally:
        os._exit(code)


def _settle_stdin() -> None:
    """Replace a standard input that no other node could bring back."""
    kind = os.fstat(0).st_mode
    if not stat.S_ISREG(kind):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
