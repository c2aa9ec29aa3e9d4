"""Starting the session's first process: what a holder asks of a spawner, and the simplest spawner.

A spawner is named in the holder's specification as ``module:function`` and called in the holder's
process, so that the tree is the holder's child: ``spawn(request: SpawnRequest) -> Spawned``.
`spawn_plain` gives the command a terminal of its own and nothing else: no namespaces, no init
inside.  Between fork and exec only system calls are made.  A failure of any of them, in particular
of the exec, is raised in the caller as `OSError`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...proc import tty
from ..holder.master import set_window_size

_CLOSE_FROM = 3


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """What to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = "/"
    rows: int = 24
    cols: int = 80
    name: str = ""
    id: str = ""
    incarnation: int = 1
    cgroup_procs: tuple[str, ...] = ()  # the first process writes "0" into them
    options: Mapping[str, Any] = field(default_factory=dict)  # of the specification


@dataclass(frozen=True, slots=True)
class Spawned:
    """What was started: a child of this process and its terminal."""

    pid: int  # root of the tree, as this process sees it
    master: int  # the PTY master, close-on-exec; the caller closes it
    facts: dict[str, Any] = field(default_factory=dict)  # for `status`: init, namespaces, ...
    start_time: int | None = None  # of a root that may have been reaped by now; None: not yet


def spawn_plain(request: SpawnRequest) -> Spawned:
    """Start the command as the leader of a new session on a new terminal."""
    master, slave, _ = tty.open_pair()
    report, failed = os.pipe2(os.O_CLOEXEC)
    pid = 0
    try:
        set_window_size(master, request.rows, request.cols)
        pid = os.fork()
        if pid == 0:
            _become(request, slave, failed)
        os.close(failed)
        failed = -1
        error = os.read(report, 4)
        if error:
            os.waitpid(pid, 0)
            number = struct.unpack("i", error)[0]
            raise OSError(number, os.strerror(number), request.argv[0])
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
        os.close(report)
        if failed >= 0:
            os.close(failed)
    return Spawned(pid, master)


def _become(request: SpawnRequest, slave: int, failed: int) -> None:
    """Execute the command, in the child, or report the error."""
    try:
        for path in request.cgroup_procs:
            with open(path, "w") as file:
                file.write("0")
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in range(_CLOSE_FROM):
            os.dup2(slave, fd)
        # The exec closes `failed`; so the parent knows that it has succeeded.
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(int(request.options.get("umask", 0o022)))
        os.chdir(request.cwd)
        os.execvpe(request.argv[0], request.argv, dict(request.env))
    except OSError as error:
        os.write(failed, struct.pack("i", error.errno or 1))
    finally:
        os._exit(127)
