"""One job's part of the service: a process of root's for each job that runs `criuctl slurm run`.

It lives as long as the job's connection, and acts for the process at its other end only (`jobs`).
A program to store is named by a pidfd, and must be a child of that process, in its job, of its
user. No request names a checkpoint.

A restored program is a child of this process, so that its exit code is known, and comes into the
job's control groups. Where Slurm tracks jobs by descent instead, it does not see that tree: so
whatever runs here is killed when the connection ends, which it does when Slurm ends the job.

The lease is looked at every `Settings.fence_every` seconds: a node that was thought dead, and comes
back, ends its copy.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from ...config import Config
from ...criu.tenant import Tenant
from ...errors import Conflict, CriuctlError
from ...host.registry import exclusive
from ...proc import syscalls
from ...proc.procfs import open_pidfd, read_status
from ...proc.tree import ProcessIdentity
from ...restore.outcome import kill_tree
from . import checkpoints, jobs, protocol
from .checkpoints import Bound, Settings, apart

_WORDLESS = 30.0  # seconds for the first message of a connection
_TRY = 0.5  # seconds between two tries of a checkpoint
_STRAYS = 5.0  # seconds between two looks for orphans of the tree


class Refused(CriuctlError):
    """The job asks for what is not possible in its state; the connection goes on."""

    code = "refused"


class Worker:
    """Serves one connection; `serve` returns when it is over."""

    def __init__(
        self, config: Config, settings: Settings, cluster: str, sock: socket.socket
    ) -> None:
        self._config, self._settings, self._cluster, self._sock = config, settings, cluster, sock
        self._who: jobs.Asker | None = None
        self._bound: Bound | None = None
        self._root: ProcessIdentity | None = None  # what runs, once this node is its home
        self._watched = -1  # pidfd of the child that ends with a restored program
        self._child = 0
        self._streams: dict[str, str] = {}  # by name: the pipes, as CRIU names them
        self._stored_at = 0.0  # monotonic; of the last checkpoint
        self._tried_at = 0.0  # monotonic; of the last try of one
        self._looks_at = 0.0  # monotonic; when the lease is looked at next

    def serve(self) -> None:
        """Answer until the job has gone, and kill what is left of its tree."""
        syscalls.set_child_subreaper(True)
        self._sock.settimeout(_WORDLESS)
        with ExitStack() as stack:
            try:
                self._greet(stack)
                self._sock.settimeout(None)
                self._answer_all()
            except CriuctlError as error:
                self._say(protocol.failure(error))
            except OSError:
                pass  # the other side is gone, or says nothing
            finally:
                if self._root is not None:
                    kill_tree(self._root)

    def _greet(self, stack: ExitStack) -> None:
        """Find out which job asks; one connection of a job at a time."""
        try:
            self._who = who = jobs.asker(self._sock)
        finally:  # a refusal is lost (ECONNRESET) if the socket is closed with a message unread
            message = protocol.receive(self._sock)
        if message is None:
            return
        body, fds = message
        protocol.close(fds)
        if body.get("op") != "hello":
            raise Refused("the first message is not hello")
        job = jobs.job_of(who, self._cluster)
        busy = f"another `criuctl slurm run` of job {job.number} is connected on this node"
        stack.enter_context(exclusive(self._config, f"slurm/{job.name}", busy))
        groups = jobs.groups_of_job(who)
        self._bound = Bound(job, Tenant(who.uid, who.groups), groups, self._settings)
        answer = apart(partial(checkpoints.found, self._config, self._bound))
        self._say(answer | {"job": job.number, "name": job.name, "restarts": job.restarts})

    # -- the conversation --------------------------------------------------------------------------

    def _answer_all(self) -> None:
        if self._bound is None:
            return
        self._looks_at = time.monotonic() + self._settings.fence_every
        while True:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if self._watched >= 0:
                poll.register(self._watched, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(self._patience() * 1000)}
            if self._watched in ready:
                self._report_end()
            elif self._sock.fileno() in ready:
                message = protocol.receive(self._sock)
                if message is None:
                    return
                self._answer(*message)
            elif self._root is not None and time.monotonic() >= self._looks_at:
                self._look_at_lease()
            self._reap_strays()

    def _patience(self) -> float:
        """Return the seconds until there is something to do without being asked."""
        if self._root is None:
            return _STRAYS
        return min(_STRAYS, max(0.0, self._looks_at - time.monotonic()))

    def _reap_strays(self) -> None:
        """Reap processes of the tree whose parents have ended: they are children of this one."""
        with suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid == self._child and self._watched >= 0:
                    return  # `_report_end` does that
                os.waitpid(found.si_pid, 0)

    def _answer(self, body: dict[str, Any], fds: list[int]) -> None:
        sent: list[int] = []
        try:
            answer = self._act(body, fds, sent)
        except CriuctlError as error:
            answer = protocol.failure(error)
        finally:
            protocol.close(fds)
        try:
            self._say(answer, sent)
        finally:
            protocol.close(sent)

    def _act(self, body: dict[str, Any], fds: list[int], sent: list[int]) -> dict[str, Any]:
        asked = body.get("op")
        if asked == "start":
            return self._start(fds)
        if asked == "restore":
            return self._restore(fds, sent)
        if asked == "checkpoint":
            return self._checkpoint(end=body.get("end") is True)
        if asked == "ended":
            return self._ended(body.get("code"))
        raise Refused("that is no request of a job")

    def _say(self, body: dict[str, Any], fds: list[int] | None = None) -> None:
        with suppress(OSError):  # it is gone, which the next receive shows
            protocol.send(self._sock, body, fds or [])

    # -- the beginning -----------------------------------------------------------------------------

    def _start(self, fds: list[int]) -> dict[str, Any]:
        bound, who = self._idle()
        if len(fds) != 1 + len(checkpoints.stream_names()):
            raise Refused("start needs a pidfd and two pipes")
        pidfd, *pipes = fds
        pid = jobs.pid_behind(pidfd)
        mine = [p for p, job in jobs.processes().items() if job == bound.job.number]
        root = jobs.check_target(pid, who, mine)
        if jobs.pid_behind(pidfd) != pid:  # still the same process after all that was read of it
            raise Refused("the program has ended")
        self._take_streams(pipes)
        answer = apart(partial(checkpoints.begin, self._config, bound, root))
        if answer["ok"]:
            self._root = root
        return answer

    def _restore(self, fds: list[int], sent: list[int]) -> dict[str, Any]:
        bound, _who = self._idle()
        if len(fds) != len(checkpoints.stream_names()):
            raise Refused("restore needs two pipes")
        if apart(partial(checkpoints.found, self._config, bound)).get("checkpoint") is None:
            raise Refused("there is no checkpoint of this job")
        self._take_streams(fds)
        streams = dict(zip(checkpoints.stream_names(), fds, strict=True))
        answer = apart(partial(checkpoints.restore, self._config, bound, streams))
        if answer["ok"]:
            pid = answer["pid"]
            self._root = ProcessIdentity.of(pid)
            sent.append(open_pidfd(pid))
            parent = int(read_status(pid)["PPid"])  # this, or PID 1 of the tree's namespace
            self._child = pid if parent == os.getpid() else parent
            self._watched = open_pidfd(self._child)
        return answer

    def _idle(self) -> tuple[Bound, jobs.Asker]:
        assert self._bound is not None and self._who is not None
        if self._root is not None:
            raise Refused("the job runs already")
        return self._bound, self._who

    def _take_streams(self, pipes: list[int]) -> None:
        keys = [checkpoints.key_of_pipe(fd) for fd in pipes]
        if len(set(keys)) != len(keys):
            raise Refused("the two streams are one pipe")
        self._streams = dict(zip(checkpoints.stream_names(), keys, strict=True))

    # -- while it runs -----------------------------------------------------------------------------

    def _checkpoint(self, *, end: bool) -> dict[str, Any]:
        assert self._bound is not None
        if self._root is None:
            raise Conflict("the job runs nothing that could be stored")
        now = time.monotonic()
        pause = self._stored_at + self._settings.min_interval - now
        if not end and self._stored_at and pause > 0:
            raise Refused(f"the last checkpoint was just made; the next may be in {pause:.0f} s")
        if self._tried_at and now - self._tried_at < _TRY:
            raise Refused("that was just tried")
        self._tried_at = now
        work = partial(checkpoints.dump, self._config, self._bound, self._streams, end=end)
        answer = apart(work)
        if answer["ok"]:
            self._stored_at = time.monotonic()
            if end:
                self._forget_tree()
        elif answer["error"]["code"] == "fenced":
            self._forget_tree()
        return answer

    def _look_at_lease(self) -> None:
        assert self._bound is not None
        self._looks_at = time.monotonic() + self._settings.fence_every
        answer = apart(partial(checkpoints.fence, self._config, self._bound))
        if answer["ok"] and answer["reason"]:
            self._forget_tree()
            self._say({"event": "fenced", "reason": answer["reason"]})

    def _forget_tree(self) -> None:
        """Note that the tree has been ended by criuctl."""
        self._root = None
        if self._watched >= 0:
            os.close(self._watched)
            self._watched = -1
            os.waitpid(self._child, 0)

    # -- its end -----------------------------------------------------------------------------------

    def _report_end(self) -> None:
        """Reap a restored program, and report its exit code."""
        _, status = os.waitpid(self._child, 0)
        number = os.waitstatus_to_exitcode(status)
        code = number if number >= 0 else 128 - number
        os.close(self._watched)
        self._watched = -1
        self._over(code)
        self._say({"event": "exited", "code": code})

    def _ended(self, code: Any) -> dict[str, Any]:
        if self._root is not None and self._root.alive():
            raise Refused("the program has not ended")
        if not isinstance(code, int) or self._root is None:
            raise Refused("nothing has ended")
        self._over(code)
        return {"ok": True}

    def _over(self, code: int) -> None:
        assert self._bound is not None
        if self._root is not None:
            kill_tree(self._root)
        self._root = None
        apart(partial(checkpoints.finish, self._config, self._bound, succeeded=code == 0))


def ignore_interrupts() -> None:
    """Leave stopping to the connection: a worker goes on when the service is restarted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
