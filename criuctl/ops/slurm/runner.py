"""What a job runs: ``criuctl slurm run``, as the job's user.

It starts the program, or has the service restore it, passes on its output, and ends with its exit
code. At the warning of Slurm (SIGUSR1, by ``sbatch --signal=B:USR1@120``), at SIGTERM, or a given
time before the time limit, it has the program stored and ended, and requeues the job. All that
needs rights is done by the service (`protocol`).

Slurm sends SIGTERM in several cases, and its controller says which one it is. A job that it queues
again has one restart more than this run knows of: it is stored, and that is all. One that has only
ended was cancelled, or its time is over: a requeue would bring it back against its user's will, so
the program is ended, or may end itself if it handles SIGTERM.

A checkpoint that fails at a warning is tried again every `_AGAIN` seconds: the program runs on, and
Slurm's patience is short. Without any checkpoint the job is not requeued, because it would begin
from nothing; that is reported.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import Any

from msgspec import Struct

from ...errors import CriuctlError, SessionGone
from ...proc.procfs import read_status
from . import client, protocol
from .program import Gate, Pipes

REQUEUED = 0  # Slurm has been asked for the requeue, and does not look at the exit code
NOT_REQUEUED = 75  # EX_TEMPFAIL
LOST = 13  # what became of the program is not known
_WARNINGS = (signal.SIGUSR1, signal.SIGTERM)
_FORWARDED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
_AGAIN = 10.0  # seconds
_FAR = 86400.0


class Plan(Struct, frozen=True):
    """What the user asked for."""

    argv: tuple[str, ...]
    every: float = 0.0  # seconds between two checkpoints while it runs; 0: none
    before: float = 0.0  # seconds before the time limit; 0: wait for Slurm's warning


class ServiceRefused(CriuctlError):
    """The node's service has refused, or failed; its message says why."""

    code = "slurm-service"

    def __init__(self, answer: dict[str, Any]) -> None:
        error = answer.get("error") or {}
        super().__init__(
            str(error.get("message", "no reason given")), hint=str(error.get("hint", ""))
        )
        self.exit_code = int(answer.get("exit_code", 1))


class Runner:
    """One run of a job; `run` returns the exit code."""

    def __init__(self, plan: Plan, path: str, tell: Callable[[str], None]) -> None:
        self._plan, self._path, self._tell = plan, path, tell
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._pipes = Pipes()
        self._job = self._restarts = 0
        self._root = 0  # PID of the program
        self._child = 0  # the same if it is our own child; 0: a restored one
        self._pidfd = -1
        self._warned = 0  # the signal by which Slurm has warned, or SIGALRM for the time limit
        self._stored = 0  # number of the last checkpoint
        self._code: int | None = None  # of a program that has ended
        self._lost = False  # the connection to the service
        self._next = {"every": 0.0, "limit": 0.0, "again": 0.0}  # monotonic; 0: never

    def run(self) -> int:
        """Run the program to its end, or until it is stored."""
        wake, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes)
        for number in (*_WARNINGS, *_FORWARDED, signal.SIGCHLD):
            signal.signal(number, self._signalled)
        self._connect()
        greeting = self._request({"op": "hello"})
        self._job, self._restarts = int(greeting["job"]), int(greeting["restarts"])
        if os.environ.get("SLURM_TASK_PID", str(os.getpid())) != str(os.getpid()):
            self._tell(
                "note: Slurm's warning (--signal=B:...) goes to the batch script only; let the "
                "script end with: exec criuctl slurm run ..."
            )
        if greeting.get("checkpoint"):
            self._restore(greeting["checkpoint"])
        else:
            self._start()
        self._set_timers()
        while self._code is None:
            self._wait(wake)
            if (left := self._act()) is not None:
                return left
        self._pipes.drain()
        return self._code

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if number in _WARNINGS:
            self._warned = self._warned or number
        elif number in _FORWARDED and self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.Signals(number))

    # -- the service -------------------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            self._sock.connect(self._path)
        except OSError as error:
            raise SessionGone(
                f"this node's criuctl service does not answer at {self._path}: {error.strerror}",
                hint="The administrator starts it: `systemctl start criuctl-slurm`.",
            ) from None

    def _request(self, body: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Return the answer to a request, with ``fds`` that came along; `ServiceRefused`."""
        try:
            protocol.send(self._sock, body, fds)
            while True:
                message = protocol.receive(self._sock)
                if message is None:
                    raise ConnectionError
                answer, got = message
                if "event" not in answer:
                    break
                protocol.close(got)
                self._on_event(answer)
                if self._code is not None:
                    return {"ok": False, "over": True}
        except OSError:
            raise SessionGone("the connection to this node's criuctl service is lost") from None
        if not answer.get("ok"):
            protocol.close(got)
            raise ServiceRefused(answer)
        for text in answer.get("warnings", ()):
            self._tell(f"warning: {text}")
        return answer | {"fds": got}

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "exited":
            self._code = int(event["code"])
        elif event["event"] == "fenced":
            self._tell(f"{event.get('reason')}; what ran here was ended")
            self._code = LOST

    # -- the beginning -----------------------------------------------------------------------------

    def _start(self) -> None:
        gate = Gate(self._plan.argv, self._pipes.writing)
        try:
            self._request({"op": "start"}, [gate.pidfd, *self._pipes.writing])
        except BaseException:
            gate.give_up()
            raise
        self._root = self._child = gate.pid
        self._pidfd = gate.pidfd
        self._pipes.pass_on()
        gate.let_through()

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        answer = self._request({"op": "restore"}, self._pipes.writing)
        (self._pidfd,) = answer["fds"]
        self._root, self._stored = int(answer["pid"]), int(answer["number"])
        self._pipes.pass_on()
        made = checkpoint.get("created", "")
        self._tell(f"restored checkpoint {self._stored} of {made} as PID {self._root}")

    # -- while it runs -----------------------------------------------------------------------------

    def _set_timers(self) -> None:
        now = time.monotonic()
        if self._plan.every:
            self._next["every"] = now + self._plan.every
        if self._plan.before:
            left = _time_left(self._job)
            if left is None:
                self._tell("note: the job has no time limit, so --checkpoint-before has no effect")
            self._next["limit"] = now + left - self._plan.before if left is not None else 0.0

    def _wait(self, wake: int) -> None:
        """Wait until something has happened, or is due."""
        due = [moment for moment in self._next.values() if moment]
        left = max(0.0, min(due) - time.monotonic()) if due else _FAR
        if self._warned and not self._next["again"]:
            left = 0.0
        poll = select.poll()
        # The service reports the end of a restored program, as long as there is a service.
        ends = [self._pidfd] if self._child or self._lost else []
        for fd in (wake, *ends, *([] if self._lost else [self._sock.fileno()])):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(min(left, _FAR) * 1000)}
        if wake in ready:
            os.read(wake, 4096)
        if ready.intersection(ends):
            self._reap()
        elif self._sock.fileno() in ready:
            self._take_event()

    def _reap(self) -> None:
        """Note the exit code of a program that has ended."""
        if not self._child:
            self._tell("the program has ended; without the service its exit code is not known")
            self._code = LOST
            return
        _, status = os.waitpid(self._child, 0)
        number = os.waitstatus_to_exitcode(status)
        self._code = number if number >= 0 else 128 - number
        with suppress(CriuctlError):  # the next node takes its lease over then
            self._request({"op": "ended", "code": self._code})

    def _take_event(self) -> None:
        message = None
        with suppress(OSError):
            message = protocol.receive(self._sock)
        if message is None:
            self._tell(
                "this node's criuctl service is lost; the program runs on, and is not stored"
            )
            self._lost = True
        elif "event" in message[0]:
            self._on_event(message[0])

    def _act(self) -> int | None:
        """Make a checkpoint if one is due; return the exit code if the job is to end with it."""
        now = time.monotonic()
        if self._code is not None:
            return None
        if self._next["limit"] and now >= self._next["limit"]:
            self._set_limit_passed()
        if self._warned and now >= self._next["again"]:
            return self._leave()
        if self._next["every"] and now >= self._next["every"]:
            self._next["every"] = now + self._plan.every
            self._store(end=False)
        return None

    def _set_limit_passed(self) -> None:
        """Note the warning of the time limit, unless the limit was changed meanwhile."""
        left = _time_left(self._job)
        if left is None or left > self._plan.before + 1:
            self._next["limit"] = time.monotonic() + left - self._plan.before if left else 0.0
            return
        self._next["limit"] = 0.0
        self._warned = self._warned or signal.SIGALRM

    def _store(self, *, end: bool) -> bool:
        """Have the service make a checkpoint; report and return whether it has."""
        try:
            answer = self._request({"op": "checkpoint", "end": end})
        except CriuctlError as error:
            if self._code is None:
                self._tell(f"no checkpoint was made: {error.message}; the program runs on")
            return False
        if "over" in answer:
            return False
        self._stored = int(answer["number"])
        self._tell(f"checkpoint {self._stored}, frozen {answer['frozen_ms']:.0f} ms")
        return True

    def _leave(self) -> int | None:
        """Store and end the program, and have Slurm queue the job again; None if it runs on."""
        shown = _shown(self._job) if self._warned == signal.SIGTERM else None
        if shown is not None and shown.state != "RUNNING" and shown.restarts == self._restarts:
            return self._cancelled()
        if not self._store(end=True):
            self._next["again"] = time.monotonic() + _AGAIN
            return None
        if self._child:
            os.waitpid(self._child, 0)
        self._pipes.drain()
        if shown is not None and shown.restarts > self._restarts:
            return REQUEUED  # by Slurm itself
        return self._requeue()

    def _cancelled(self) -> int | None:
        """End with the job, unless the program handles SIGTERM: then it ends the job, or Slurm."""
        self._warned = 0
        if not _handles(self._root, signal.SIGTERM):
            return 128 + signal.SIGTERM
        with suppress(ProcessLookupError):  # where Slurm does not see a restored one
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        return None

    def _requeue(self) -> int:
        try:
            client.ask("scontrol", "requeue", str(self._job))
        except CriuctlError as error:
            self._tell(f"the job is stored, and was not queued again: {error.message}")
            return NOT_REQUEUED
        return REQUEUED


class _Shown(Struct, frozen=True):
    """What Slurm's controller says of a job."""

    state: str
    restarts: int
    left: float | None  # seconds until the time limit; None without one


def _shown(job: int) -> _Shown | None:
    """Return what the controller says of the job; None if it does not answer."""
    fields = "JobID:20,State:20,RestartCnt:20,EndTime:30"
    with suppress(CriuctlError):
        shown = client.ask("squeue", "--noheader", "--array", "-j", str(job), "-O", fields)
        for words in map(str.split, shown.splitlines()):
            if len(words) == 4 and words[0] == str(job) and words[2].isdigit():
                return _Shown(words[1], int(words[2]), _seconds_until(words[3]))
    return None


def _seconds_until(moment: str) -> float | None:
    with suppress(ValueError):
        return datetime.fromisoformat(moment).timestamp() - time.time()
    return None


def _time_left(job: int) -> float | None:
    """Return the seconds until the job's time limit; None without one, or if it is not known."""
    shown = _shown(job)
    return shown.left if shown is not None else None


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(CriuctlError):
        return bool(int(read_status(pid)["SigCgt"], 16) >> number - 1 & 1)
    return False


def say(text: str) -> None:
    """Print a line about the job to its standard error."""
    sys.stderr.write(f"criuctl: {text}\n")
    sys.stderr.flush()
