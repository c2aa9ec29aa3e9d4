"""Starting the session's first process: what a holder asks of a spawner, and the plain one.

A spawner is named in the holder's specification as ``module:function`` and called in the holder's process, so that the
tree is the holder's child: ``spawn(request: SpawnRequest) -> Spawned``.  `spawn_plain` gives the command a
terminal of its own and nothing else: no namespaces, no init inside.  Between fork and exec only system calls are
made, and a failure of any of them, of the exec above all, comes back to the caller as its `OSError`.
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
    cgroup_procs: tuple[str, ...] = ()  # files that the first process writes "0" into, before it executes anything
    options: Mapping[str, Any] = field(default_factory=dict)  # the spawner's own (host_pids, ...), from the specification


@dataclass(frozen=True, slots=True)
class Spawned:
    """What was started: a child of this process and its terminal."""

    pid: int  # root of the tree, as this process sees it
    master: int  # the PTY master, close-on-exec, ours from now on
    facts: dict[str, Any] = field(default_factory=dict)  # for `status`: init, namespaces, ...
    start_time: int | None = None  # of the root, which may have ended and been reaped by now; None: it has not been reaped


def spawn_plain(request: SpawnRequest) -> Spawned:
    """Start the command as the leader of a new session on a new terminal."""
    master, slave, _ = tty.open_pair()
    report, told = os.pipe2(os.O_CLOEXEC)
    pid = 0
    try:
        set_window_size(master, request.rows, request.cols)
        pid = os.fork()
        if pid == 0:
            _become(request, slave, told)
        os.close(told)
        told = -1
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
        if told >= 0:
            os.close(told)
    return Spawned(pid, master)


def _become(request: SpawnRequest, slave: int, told: int) -> None:
    """In the child: turn into the command, or say why not."""
    try:
        for path in request.cgroup_procs:
            with open(path, "w") as file:
                file.write("0")
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in range(_CLOSE_FROM):
            os.dup2(slave, fd)
        # `told` tells by being closed: it goes with the exec, as everything else of the holder's does.
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(int(request.options.get("umask", 0o022)))
        os.chdir(request.cwd)
        os.execvpe(request.argv[0], request.argv, dict(request.env))
    except OSError as error:
        os.write(told, struct.pack("i", error.errno or 1))
    finally:
        os._exit(127)
