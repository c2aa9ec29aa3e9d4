"""The service of a node: it listens, limits, and forks a `worker` for each job.

The socket is open to every user, because every user has jobs. What costs anything is done in the
worker, and of a user there are at most `PER_USER` at a time, `AT_ONCE` of all: a connection more is
closed without an answer. A worker outlives this process, so the service may be restarted while jobs
run (``KillMode=process`` in its unit).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from ...config import Config
from ...errors import Conflict, PlatformError
from ...proc.limits import CAP_SYS_RESOURCE, effective_capabilities
from ...proc.notify import ServiceManager
from ...proc.ownership import check_own
from . import jobs
from .checkpoints import Settings, apart, prepare
from .worker import Worker, ignore_interrupts

PER_USER, AT_ONCE = 64, 512
_BACKLOG = 128


class Service:
    """Listens at one socket until SIGTERM or SIGINT."""

    def __init__(
        self, config: Config, settings: Settings, path: Path, tell: Callable[[str], None]
    ) -> None:
        self._config, self._settings, self._path, self._tell = config, settings, path, tell
        self._workers: dict[int, int] = {}  # PID -> user
        self._stopped = False

    def run(self, ready: Callable[[], None]) -> None:
        """Serve; `ready` is called when the socket listens."""
        if os.geteuid() != 0:
            raise PlatformError("the service of Slurm's jobs needs root")
        cluster = jobs.cluster_name()
        with self._listening() as sock:
            wake, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(wakes)
            signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._stop)
            self._prepare_store()
            if not effective_capabilities() >> CAP_SYS_RESOURCE & 1:
                self._tell(
                    "warning: no job can be stored: CAP_SYS_RESOURCE is missing here, and without "
                    "it CRIU dumps no process of another user than root; give it to this service"
                )
            ready()
            manager = ServiceManager()
            manager.tell("READY=1", f"STATUS=jobs of cluster {cluster}")
            while not self._stopped:
                readable, _, _ = select.select([sock.fileno(), wake], [], [])
                if wake in readable:
                    os.read(wake, 4096)
                    self._reap()
                if sock.fileno() in readable and not self._stopped:
                    self._accept(sock, cluster)

    def _prepare_store(self) -> None:
        """Make or try the store; one that does not answer now may do so when a job needs it."""
        answer = apart(partial(prepare, self._config))
        warnings = answer.get("warnings") or [(answer.get("error") or {}).get("message", "")]
        for text in filter(None, warnings):
            self._tell(f"warning: {text}")

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True

    @contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        """Yield the socket, in a folder that root alone may write."""
        folder = self._path.parent
        folder.mkdir(mode=0o755, exist_ok=True)
        check_own(folder)
        folder.chmod(0o755)
        # Not a lock: the workers of a service that was stopped would hold it.
        if _answers(self._path):
            raise Conflict(f"another `criuctl slurm serve` listens at {self._path}")
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            sock.bind(os.fspath(self._path))
            self._path.chmod(0o666)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            try:
                yield sock
            finally:
                self._path.unlink(missing_ok=True)  # a worker never comes here

    def _accept(self, sock: socket.socket, cluster: str) -> None:
        try:
            connection, _ = sock.accept()
        except OSError:  # it has gone again
            return
        with connection:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            uid = struct.unpack("iII", raw)[1]
            if len(self._workers) >= AT_ONCE or Counter(self._workers.values())[uid] >= PER_USER:
                return
            pid = os.fork()
            if pid == 0:
                sock.close()
                self._work(connection, cluster)
            self._workers[pid] = uid

    def _work(self, connection: socket.socket, cluster: str) -> None:
        """Run in the new process; does not return."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            ignore_interrupts()
            connection.setblocking(True)
            Worker(self._config, self._settings, cluster, connection).serve()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._workers.pop(pid, None)


def _answers(path: Path) -> bool:
    """Return whether a service listens at the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


__all__ = ["AT_ONCE", "PER_USER", "Service"]
