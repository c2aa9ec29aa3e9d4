"""Programs that a holder starts as its own children: its helpers, no processes of the session.

The kernel gives an exit status only to the parent.  So a restore asks the holder to start CRIU
(`spawn`), with the descriptors that it passes over the socket: what CRIU then makes its sibling,
the restored tree, is the holder's child.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

from .connection import Connection
from .events import Events
from .operators import Refused
from .processes import Tree, exit_code

_MAX_NUMBER = 1024  # a descriptor that a helper gets has a lower number


class HelperProcesses:
    """The helpers of one holder that have not ended yet."""

    def __init__(self, tree: Tree, events: Events) -> None:
        self._tree, self._events = tree, events
        self._ended: dict[int, Callable[[int], None]] = {}  # PID -> what gets its wait status

    def start(
        self,
        argv: list[str],
        fds: dict[int, int],
        ended: Callable[[int], None],
        env: dict[str, str] | None = None,
    ) -> int:
        """Start a program in ``/``; `ended` gets its wait status. `env` is the holder's if None."""
        pid = start(argv, dict(os.environ) if env is None else env, "/", fds)
        self._watch(pid, ended)
        return pid

    def reaped(self, pid: int, status: int) -> bool:
        """Handle the end of a child of the holder; return whether it was a helper."""
        ended = self._ended.pop(pid, None)
        if ended is None:
            return False
        self._tree.helpers.discard(pid)
        ended(status)
        return True

    def _watch(self, pid: int, ended: Callable[[int], None]) -> None:
        self._tree.helpers.add(pid)
        self._ended[pid] = ended

    def _report(self, pid: int) -> Callable[[int], None]:
        """Return what sends the event about the end of the helper `pid`."""

        def ended(status: int) -> None:
            code, number = exit_code(status)
            self._events.emit("child-exited", pid=pid, exit_code=code, exit_signal=number)

        return ended

    # -- the operation ----------------------------------------------------------------------------

    def spawn(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        """Start a program for a client, with the descriptors that it has passed."""
        fds = connection.take_fds()
        try:
            argv, env, cwd = _command(message)
            numbers = _numbers(message, len(fds))
            pid = start(argv, env, cwd, dict(zip(numbers, fds, strict=True)))
        except FileNotFoundError as error:
            raise Refused("not-found", str(error.strerror)) from None
        finally:
            for fd in fds:
                os.close(fd)
        self._watch(pid, self._report(pid))
        return {"pid": pid}

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {"helpers": list(self._ended)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned; all that is done at their ends is to report them."""
        for pid in state["helpers"]:
            self._watch(pid, self._report(pid))


def _command(message: dict[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Return the arguments, environment and folder of a `spawn`; `Refused`."""
    argv, env, cwd = message.get("argv"), message.get("env", {}), message.get("cwd", "/")
    if not isinstance(argv, list) or not argv or not all(map(_is_text, argv)):
        raise Refused("bad-request", "'argv' must be a list of texts")
    if not isinstance(env, dict) or not all(
        _is_text(value) and _is_text(name) and "=" not in name for name, value in env.items()
    ):
        raise Refused("bad-request", "'env' must map names to texts")
    if not _is_text(cwd):
        raise Refused("bad-request", "'cwd' must be text")
    return argv, env, cwd


def _numbers(message: dict[str, Any], count: int) -> list[int]:
    """Return the number that each of `count` descriptors is to have; `Refused`."""
    numbers = message.get("numbers", [])
    if (
        not isinstance(numbers, list)
        or len(numbers) != count
        or len(set(map(str, numbers))) != count
    ):
        raise Refused("bad-request", "'numbers' must have one for each descriptor that was passed")
    if not all(isinstance(number, int) and 0 <= number < _MAX_NUMBER for number in numbers):
        raise Refused("bad-request", f"'numbers' must be below {_MAX_NUMBER}")
    return numbers


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def start(argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int]) -> int:
    """Fork and execute a program; return its PID.

    It gets descriptor ``fds[N]`` as N; standard streams that are not in `fds` are /dev/null.  A
    failure of the exec is raised here, as `OSError`.
    """
    report, failed = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            wanted = {0: null, 1: null, 2: null, **fds}
            # First out of the way of the numbers that are wanted, then to them.
            floor = max(wanted) + 1
            failed = _above(failed, floor)
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
            os.write(failed, struct.pack("i", error.errno or 1))
        finally:
            os._exit(127)
    os.close(failed)
    with open(report, "rb") as file:
        error_number = file.read(4)
    if error_number:
        os.waitpid(pid, 0)
        code = struct.unpack("i", error_number)[0]
        raise OSError(code, f"{argv[0]}: {os.strerror(code)}")
    return pid


def _above(fd: int, floor: int) -> int:
    """Return a close-on-exec copy of `fd` whose number is `floor` or higher."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)
