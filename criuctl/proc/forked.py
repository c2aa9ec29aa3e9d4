"""Work in forked processes: several operations at once, each in the main thread of its process.

A dump and a restore own the signals of their process and the children it has started, so no two of
them share a process. A forked process starts with all that is imported and configured here, for
which a new criuctl would need half a second. It

- is in its own process group, so that a ``^C`` on the terminal reaches only the parent, which
  passes it on;
- gets SIGTERM when it is to stop, which becomes a `KeyboardInterrupt` there: it cleans up, and ends
  without an answer;
- gets the same signal from the kernel when the parent is killed;
- keeps the parent's descriptors, so a lock (`ops.registry.exclusive`) is free only when the last of
  them has ended;
- answers with one JSON object, in a memory file: nothing can block, and its leftover processes
  cannot hold anything open.

The caller must have no threads that hold locks: only the forking thread exists in the new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from . import syscalls

Work = Callable[[], dict[str, Any]]

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# seconds that a process asked to stop may clean up; a dump or a restore that is killed is undone,
# too
_GRACE = 240.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one piece of work: its answer, or why there is none."""

    key: str
    answer: dict[str, Any] | None = None
    code: int = 0  # exit code of its process; negative: the signal that killed it
    bug: str = ""  # a traceback
    late: bool = False  # it was interrupted, or never begun, because its time was over


def run_all(
    work: Sequence[tuple[str, Work]],
    *,
    at_once: int,
    until: float | None = None,
    begins: Callable[[str], object] = lambda _key: None,
) -> Iterator[Ended]:
    """Do all of `work`, `at_once` at a time and in this order.

    Yield each end as soon as it is known. `begins` is called for each, in this process, just before
    its process starts. At the monotonic time `until`, running work is interrupted and work not
    begun is left; both are yielded as late. When the caller closes the iterator, or a signal
    becomes an exception, running work is interrupted and awaited.
    """
    waiting, running = deque(work), list[Process]()
    try:
        while waiting or running:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            while waiting and len(running) < at_once:
                begins(waiting[0][0])
                start(*waiting.popleft(), running)
            _poll(running, left)
            for process in [process for process in running if process.has_ended()]:
                running.remove(process)
                yield process.end()
        for process in running:
            process.stop()
        while running:
            _await(running[0])
            yield running.pop(0).end(late=True)
        for key, _ in waiting:
            yield Ended(key, late=True)
    finally:
        end_all(running)


def end_all(running: Sequence[Process]) -> None:
    """Interrupt these, and wait for them."""
    for process in running:
        process.stop()
    for process in running:
        _await(process)
        process.end()


class Process:
    """A forked process that is not reaped yet."""

    def __init__(self, key: str, pid: int, answer: int) -> None:
        self._key, self._pid, self._answer = key, pid, answer
        self.pidfd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return whether `end` would not wait."""
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to stop."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def end(self, *, late: bool = False) -> Ended:
        """Reap it when it `has_ended`, and read its answer."""
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert result is not None
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        os.close(self.pidfd)
        with open(self._answer, "rb") as file:
            file.seek(0)
            text = file.read()
        said = json.loads(text) if code == 0 and text else {}
        if "answer" in said:
            return Ended(self._key, said["answer"])
        return Ended(self._key, code=code, bug=said.get("bug", ""), late=late)


def _poll(running: Sequence[Process], seconds: float | None) -> None:
    """Wait until one of them has ended, or for that time, at most a day.

    `poll` counts milliseconds in 31 bits.
    """
    poller = select.poll()
    for process in running:
        poller.register(process.pidfd, select.POLLIN)
    poller.poll(None if seconds is None else min(max(0.0, seconds), 86400.0) * 1000)


def _await(process: Process) -> None:
    """Wait until a process that was asked to stop has ended."""
    _poll([process], _GRACE)
    if not process.has_ended():
        process.stop(signal.SIGKILL)
        _poll([process], None)


def start(key: str, work: Work, running: list[Process]) -> None:
    """Fork a process; it is in `running` before any signal can be handled here."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # buffered output would be written twice
    parent = os.getpid()
    answer = os.memfd_create("answer", os.MFD_CLOEXEC)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        pid = os.fork()
        if pid == 0:
            _child_main(work, answer, parent, before)
        running.append(Process(key, pid, answer))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child_main(work: Work, answer: int, parent: int, mask: set[Any]) -> None:
    """Run in the new process; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        syscalls.set_parent_death_signal(signal.SIGTERM)
        # the program's own handler raises an exception, once
        if not callable(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, _stop)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask - set(_STOPS))
        if os.getppid() == parent:
            try:
                said = json.dumps({"answer": work()})
            except Exception:
                said = json.dumps({"bug": traceback.format_exc()})
            _write(answer, said.encode())
            code = 0
    except KeyboardInterrupt as interrupt:
        code = 128 + int(getattr(interrupt, "number", signal.SIGTERM))
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError, AttributeError):
                    continue
        finally:
            os._exit(code)  # even if the signal comes only now: the parent does what follows


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _stop(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a clean-up is not interrupted
    raise KeyboardInterrupt
