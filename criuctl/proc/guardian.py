"""A process that keeps the descriptors of another one open when that is killed, and ends trees
then.

For a keeper of userfaultfds. If it is killed, the kernel would close them, and let the processes
read zeros in the place of their missing pages. The *guardian* shares the keeper's table of
descriptors, so they stay open, and every thread that touches such a page waits, until the guardian
has ended all of the trees. If the guardian is killed instead, the keeper finds that out
(`Guardian.gone`) and starts another one. Only a SIGKILL for both at the same time leaves trees
without their memory.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress

from ..errors import NoSuchProcess
from . import syscalls
from .tree import ProcessIdentity, read_tree

_DONE = b"done\n"
_ROUNDS = 5  # a tree that forks while it is killed is walked again


class Guardian:
    """The guardian of this process, which has one thread; made in the keeper."""

    def __init__(self, report: Callable[[list[ProcessIdentity]], None]) -> None:
        """`report` is called in the guardian with the trees that it has ended."""
        self._report = report
        # Lines: a sign, PID and start time. One write is whole even if its writer is killed.
        self._trees = os.memfd_create("trees", os.MFD_CLOEXEC)
        self.pidfd = -1
        self.start()

    def start(self) -> None:
        """Start it, also again."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        keeper = os.pidfd_open(os.getpid())
        child = syscalls.fork_sharing_descriptors()
        if child == 0:
            try:
                self._guard(keeper)
            finally:
                os._exit(1)
        self.pidfd = os.pidfd_open(child)

    def add(self, root: ProcessIdentity) -> None:
        """End this tree, too, if this process is killed."""
        os.write(self._trees, b"+ %d %d\n" % (root.pid, root.start_time))

    def remove(self, root: ProcessIdentity) -> None:
        """Leave this tree alone: it needs the keeper no more."""
        os.write(self._trees, b"- %d %d\n" % (root.pid, root.start_time))

    def dismiss(self) -> None:
        """End the guardian: nothing needs it any more."""
        os.write(self._trees, _DONE)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        os.close(self._trees)

    def _guard(self, keeper: int) -> None:
        """Run in the guardian; returns when the keeper has ended."""
        select.select([keeper], [], [])
        lines = os.pread(self._trees, os.fstat(self._trees).st_size, 0)
        if lines.endswith(_DONE):
            return
        trees: dict[ProcessIdentity, bool] = {}
        for line in lines.splitlines():
            sign, pid, start = line.split()
            trees[ProcessIdentity(int(pid), int(start))] = sign == b"+"
        alive = [tree for tree, needs in trees.items() if needs and tree.alive()]
        for tree in alive:
            end_tree(tree)
        with suppress(Exception):  # the trees are ended in any case
            self._report(alive)


def end_tree(root: ProcessIdentity) -> None:
    """Kill this process and its descendants; it need not be there any more."""
    for _ in range(_ROUNDS):
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first stop all forking
            try:
                found = read_tree(root.pid) if root.exists() else []
            except NoSuchProcess:
                return
            for process in reversed(found):
                with suppress(NoSuchProcess, ProcessLookupError):
                    pidfd = process.identity.open_pidfd()
                    try:
                        signal.pidfd_send_signal(pidfd, number)
                    finally:
                        os.close(pidfd)
