"""Running a command in the foreground, with this process's terminal and standard streams.

The command ends with this process: it is killed if this process is killed, and gets SIGTERM if this
process is interrupted. Otherwise it would go on, and its end would not be recorded.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from . import syscalls

_GRACE = 5.0  # seconds to end after SIGTERM
_LOOK = 0.02


def run(argv: Sequence[str], env: Mapping[str, str], *, quiet: bool = False) -> int:
    """Run a command and return its wait status; `OSError` if it cannot be executed.

    `quiet`: its standard output goes to standard error.
    """
    sys.stdout.flush()
    syscalls.set_parent_death_signal(0)  # loads what the child needs
    report, failed = os.pipe2(os.O_CLOEXEC)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _execute(argv, env, failed, parent, quiet=quiet)
    os.close(failed)
    with open(report, "rb") as file:
        number = file.read(4)
    if number:
        os.waitpid(pid, 0)
        (code,) = struct.unpack("i", number)
        raise OSError(code, os.strerror(code), argv[0])
    try:
        return os.waitpid(pid, 0)[1]
    except BaseException:
        _end(pid)
        raise


def _execute(
    argv: Sequence[str], env: Mapping[str, str], failed: int, parent: int, *, quiet: bool
) -> None:
    """In the child: become the command; never return."""
    try:
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)  # it was killed before that took effect
        if quiet:
            os.dup2(2, 1)
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(failed, struct.pack("i", error.errno or 1))
    finally:
        os._exit(127)


def _end(pid: int) -> None:
    """End the command: this process was interrupted."""
    with suppress(ChildProcessError, ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + _GRACE
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(_LOOK)
