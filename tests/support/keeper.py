"""A small parent for everything that a test runs: it adopts orphans and reaps them at once.

A restored tree, a daemonised grandchild, a tree that CRIU has just killed: each needs a parent that
waits for it, as a service manager or a shell would.  pytest itself cannot be that parent (it would
steal the exit status of other people's children), so one helper process per test run is: it sets
``PR_SET_CHILD_SUBREAPER``, starts what it is asked to start, and reaps whatever ends.

Requests come over a SOCK_SEQPACKET socket pair, one JSON object with the descriptors for stdin,
stdout, stderr, the writing end of a pipe, and any more to inherit.  The answer is ``{"pid": N}`` or
``{"error": ...}``.  When that process ends, its wait status is written to the pipe as text and the
pipe is closed.  The keeper ends when the socket closes; it kills nothing.

This file is both sides: `Keeper` and `Launched` for tests, and the program (``python keeper.py
FD``) itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST = 1 << 20


# -- the side of the tests
# --------------------------------------------------------------------------


class Launched:
    """A process that the keeper started: its PID and, once it has ended, its status."""

    def __init__(self, pid: int, exit_pipe: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.argv = list(argv)
        self.start_time = start_time(pid)
        self._pipe = exit_pipe
        self._status: int | None = None

    def wait(self, timeout: float) -> int:
        """The exit code (negative: the signal) of the process; TimeoutError when it still runs
        after `timeout` seconds.
        """
        if self._status is None:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise TimeoutError(
                    f"{' '.join(self.argv)} (PID {self.pid}) still runs after {timeout} s"
                )
            text = os.read(self._pipe, 32)
            self._status = os.waitstatus_to_exitcode(int(text)) if text else -signal.SIGKILL
            os.close(self._pipe)
        return self._status

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        try:
            return self.wait(0)
        except TimeoutError:
            return None

    def alive(self) -> bool:
        """Whether this very process (not another of the same PID) still exists."""
        return self.poll() is None and start_time(self.pid) == self.start_time

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the process is still this one."""
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass  # it has ended, and was reaped, since it was asked


class Keeper:
    """The tests' handle on the keeper process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._process.pid

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path = "/",
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        new_session: bool = True,
    ) -> Launched:
        """Start `argv` as a child of the keeper; streams that are None are /dev/null."""
        null = os.open("/dev/null", os.O_RDWR)
        read_end, write_end = os.pipe()
        try:
            streams = [
                null if s is None else s if isinstance(s, int) else s.fileno()
                for s in (stdin, stdout, stderr)
            ]
            request = {
                "argv": list(argv),
                "env": dict(env),
                "cwd": str(cwd),
                "new_session": new_session,
                "numbers": list(pass_fds),
            }
            socket.send_fds(
                self._socket, [json.dumps(request).encode()], [*streams, write_end, *pass_fds]
            )
            answer = json.loads(self._socket.recv(MAX_REQUEST))
        finally:
            os.close(null)
            os.close(write_end)
        if "error" in answer:
            os.close(read_end)
            raise OSError(answer["error"])
        return Launched(answer["pid"], read_end, argv)

    def close(self) -> None:
        """Let the keeper go."""
        self._socket.close()
        self._process.wait(60)


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def wait_until(condition: Any, timeout: float, what: str) -> Any:
    """Ask `condition` until it answers something true, for the few things in /proc that cannot be
    waited for.
    """
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout} s still not: {what}")
        time.sleep(0.005)
    return answer


# -- the keeper itself
# ------------------------------------------------------------------------------


def _start(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Start what `request` asks for; `fds` are stdin, stdout, stderr and those to inherit under the
    numbers they have here.
    """
    try:
        process = subprocess.Popen(
            request["argv"],
            env=request["env"],
            cwd=request["cwd"],
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            start_new_session=request["new_session"],
            pass_fds=fds[3:],
            restore_signals=True,
        )
    except OSError as error:
        return {"error": str(error)}
    process.returncode = 0  # reaped by `_reap`; subprocess is not to wait for it as well
    return {"pid": process.pid}


def _reap(pipes: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = pipes.pop(pid, None)
        if pipe is not None:
            try:
                os.write(pipe, str(status).encode())
            except BrokenPipeError:
                pass  # the test does not care any more
            os.close(pipe)


def serve(fd: int) -> None:
    """Answer requests on the socket `fd` until its other end is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # a handler, unlike SIG_IGN, is not inherited by what it starts
    signal.signal(signal.SIGINT, lambda number, frame: None)
    pipes: dict[int, int] = {}
    with socket.socket(fileno=fd) as requests:
        os.set_inheritable(requests.fileno(), False)
        while True:
            ready, _, _ = select.select([requests.fileno(), wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
            _reap(pipes)
            if requests.fileno() not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 64)
            if not data:
                return
            for number in fds:
                os.set_inheritable(number, False)
            answer = _start(json.loads(data), fds[:3] + fds[4:])
            if "pid" in answer:
                pipes[answer["pid"]] = fds.pop(3)
            for number in fds:
                os.close(number)
            requests.send(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
