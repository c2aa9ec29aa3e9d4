"""Programs that a holder starts for somebody else, as its own children: CRIU, so that a restored tree is the holder's child.

The kernel gives an exit status only to the parent.  So a restore asks the holder to start CRIU, with
the descriptors that it passes over the socket, and what CRIU makes its sibling is the holder's child.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .connection import Connection
from .operators import Refused
from .processes import exit_code

if TYPE_CHECKING:
    from .holder import Holder


def spawn(holder: Holder, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
    """The operation `spawn`."""
    fds = connection.take_fds()
    try:
        argv, env, numbers = message.get("argv"), message.get("env", {}), message.get("numbers", [])
        if not isinstance(argv, list) or not argv or not all(isinstance(a, str) and "\0" not in a for a in argv):
            raise Refused("bad-request", "'argv' must be a list of texts")
        if not isinstance(env, dict) or not all(
            isinstance(v, str) and "\0" not in k + v and "=" not in k for k, v in env.items()
        ):
            raise Refused("bad-request", "'env' must map names to texts")
        if not isinstance(numbers, list) or len(numbers) != len(fds) or len(set(map(str, numbers))) != len(numbers):
            raise Refused("bad-request", "'numbers' must have one for each descriptor that was passed")
        if not all(isinstance(n, int) and 0 <= n < 1024 for n in numbers):
            raise Refused("bad-request", "'numbers' must be below 1024")
        cwd = message.get("cwd", "/")
        if not isinstance(cwd, str) or "\0" in cwd:
            raise Refused("bad-request", "'cwd' must be text")
        pid = start(argv, env, cwd, dict(zip(numbers, fds, strict=True)))
    except FileNotFoundError as error:
        raise Refused("not-found", str(error.strerror)) from None
    finally:
        for fd in fds:
            os.close(fd)
    holder.tree.helpers.add(pid)
    holder.helpers[pid] = reporter(holder, pid)
    return {"pid": pid}


def reporter(holder: Holder, pid: int) -> Callable[[int], None]:
    """What tells of the end of the helper `pid`, given its wait status."""

    def ended(status: int) -> None:
        code, number = exit_code(status)
        holder.emit("child-exited", pid=pid, exit_code=code, exit_signal=number)

    return ended


def start(argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int]) -> int:
    """Fork and execute, with descriptor ``fds[N]`` as N; streams not among them are /dev/null.  The exec's failure is raised."""
    report, told = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            wanted = {0: null, 1: null, 2: null, **fds}
            # First out of the way of the numbers that are wanted, then to them.
            floor = max(wanted) + 1
            told = _above(told, floor)
            moved = {number: _above(fd, floor) for number, fd in wanted.items()}
            for number, fd in moved.items():
                os.dup2(fd, number, inheritable=True)
            for signal_number in signal.valid_signals():
                if signal_number not in (signal.SIGKILL, signal.SIGSTOP):
                    signal.signal(signal_number, signal.SIG_DFL)
            os.setsid()
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(told, struct.pack("i", error.errno or 1))
        finally:
            os._exit(127)
    os.close(told)
    with open(report, "rb") as file:
        error_number = file.read(4)
    if error_number:
        os.waitpid(pid, 0)
        code = struct.unpack("i", error_number)[0]
        raise OSError(code, f"{argv[0]}: {os.strerror(code)}")
    return pid


def _above(fd: int, floor: int) -> int:
    """A close-on-exec copy of `fd` at or above `floor`."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)
