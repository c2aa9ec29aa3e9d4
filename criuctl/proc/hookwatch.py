"""Run one hook and end all its processes.

A separate program: see `main` for its arguments.

A hook is a foreign program; it may hang, fork, or daemonise. This process is its parent and the
subreaper of all its descendants, so that none can escape. When the hook has ended, when its time is
up, when criuctl asks (SIGTERM), and when criuctl is gone, ``kill -9`` included (the pipe LIFE
closes), every descendant is ended, first by SIGTERM, then by SIGKILL. In the last case no reader is
left, and SIGKILL is sent at once.

The hook gets a new session (no terminal, no ``^C`` of criuctl's), default signals, and only the
descriptors that were mapped to it. How it ended is written to STATUS as one JSON object: ``{"exit":
N}``, ``{"signal": N}``, ``{"timeout": true}`` or ``{"exec": "why it could not be started"}``.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
# seconds between SIGTERM and SIGKILL; less than the grace that criuctl gives this process
_GRACE = 1.0
_GIVE_UP = 10.0  # seconds after SIGKILL for a process that the kernel does not let go


def _parents() -> dict[int, list[int]]:
    """Return the living children of every process of this host."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has ended
            if words[0] not in (b"Z", b"X"):
                found.setdefault(int(words[1]), []).append(int(name))
    return found


def _descendants() -> list[int]:
    parents = _parents()
    found = parents.get(os.getpid(), [])
    for pid in found:
        found += parents.get(pid, [])
    return found


def _reap() -> bool:
    """Reap ended children; return False when no child is left."""
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _end_all(gently: bool) -> None:
    """End every descendant and reap it."""
    for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GIVE_UP)):
        if number == signal.SIGTERM and not gently:
            continue
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while _reap() and time.monotonic() < deadline:
            for pid in _descendants():
                if number == signal.SIGKILL or pid not in signalled:
                    signalled.add(pid)
                    try:
                        os.kill(pid, number)
                    except OSError:
                        continue  # it has ended meanwhile
            time.sleep(0.005)


def _exec_hook(path: str, numbers: dict[int, int], failed: int) -> NoReturn:
    """Run the hook in the forked child."""
    try:
        os.setsid()
        # if this watcher is killed, the hook is killed too
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                try:
                    signal.signal(number, signal.SIG_DFL)
                except (OSError, ValueError):
                    continue  # kept by the C library for itself
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # Out of the way of their final numbers first: one mapping must not overwrite another's
        # source.
        moved = {
            number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for number, fd in numbers.items()
        }
        failed = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, 64)
        for number, fd in moved.items():
            os.dup2(fd, number, inheritable=True)
        wanted = {0, 1, 2, *numbers}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in wanted:
                try:
                    os.set_inheritable(int(name), False)
                except OSError:
                    continue  # the listing's own descriptor
        os.execv(path, [path])
    except OSError as error:
        os.write(failed, (error.strerror or str(error)).encode())
    finally:
        os._exit(127)


def _run(
    path: str, numbers: dict[int, int], life: int, timeout: float
) -> tuple[dict[str, Any] | None, bool]:
    """Start the hook and wait for its end.

    Returns how it ended (None: criuctl wants no answer), and whether to end the rest gently.
    """
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    why, failed = os.pipe2(os.O_CLOEXEC)
    deadline = time.monotonic() + timeout
    pid = os.fork()
    if pid == 0:
        _exec_hook(path, numbers, failed)
    os.close(failed)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        # a reader of the hook's output sees the hook's end, not this process's
        os.dup2(null, standard)
    # returns at once: with the exec, or with what prevented it
    reason = os.read(why, 4096).decode(errors="replace")
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (pidfd, life, wake):
        poll.register(fd, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
        if pidfd in ready:
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if reason:
                return {"exec": reason}, True
            return ({"exit": code} if code >= 0 else {"signal": -code}), True
        if life in ready:
            return None, False
        if wake in ready:
            return None, True
        if left <= 0:
            return {"timeout": True}, True


def main() -> int:
    """``hookwatch.py LIFE STATUS SECONDS [NUMBER=FD]... -- PATH``."""
    split = sys.argv.index("--")
    life, status, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    numbers = {int(a): int(b) for a, _, b in (word.partition("=") for word in sys.argv[4:split])}
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return 1
    os.set_inheritable(life, False)
    os.set_inheritable(status, False)
    answer, gently = _run(sys.argv[split + 1], numbers, life, seconds)
    _end_all(gently)
    if answer is not None:
        os.write(status, json.dumps(answer).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
