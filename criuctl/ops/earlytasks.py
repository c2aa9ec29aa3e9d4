"""What a restored process must be given before it has children, because they can only inherit it: its terminal.

The kernel lets only a session's leader take a controlling terminal; everybody else inherits it at the fork.  CRIU makes
the tree first and opens terminals afterwards, so a restored leader has its terminal back and the rest of its session has
not: a shell inside a shell would find its job control gone, and nobody could open ``/dev/tty``.  So the forks of CRIU
are followed with ptrace from the tree's root on, each leader up to its ``setsid``, and there it opens the terminal and takes
it.  What CRIU does later finds it done.

The root's role as a subreaper is given at the same occasion (see `criuctl.ops.mend`): there can be but one tracer.
Everybody is let go as soon as all leaders have their terminals, long before CRIU itself traces them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import CriuctlError
from ..proc import inject
from ..proc.namespaces import ns_pids
from ..proc.tree import children

_LOOK = 0.0003  # seconds between looks for the root process
_PAUSE = 0.0001  # seconds between looks for who has stopped
_BELOW_STACK = 4096  # far below the red zone, well inside the stack's mapping
_EVENT_STOP = 128
_NO_SUCH_CALL = -errno.ENOSYS  # what rax holds while a call is entered
_JOIN = 10.0


@dataclass(slots=True)
class EarlyTasks:
    """Follows the tree as it is made; a thread, because ptrace wants one."""

    find_root: Callable[[], int | None]  # the root's PID as we see it, once it exists
    terminals: Mapping[int, str]  # session leader, by its PID in the tree -> path of its terminal
    subreaper: bool = False  # the root is to adopt orphans
    given: set[int] = field(default_factory=set)  # leaders that have their terminals
    _tracees: dict[int, int] = field(default_factory=dict)  # PID as we see it -> in the tree
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch for the root."""
        self._thread = threading.Thread(target=self._run, name="criuctl-early", daemon=True)
        self._thread.start()

    def stop(self) -> set[int]:
        """Let everybody go: CRIU is about to trace them itself; the leaders who did not get their terminals.  Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN)
        return self._wanted

    def _run(self) -> None:
        root = None
        while root is None:
            if self._stop.wait(_LOOK):
                return
            root = self.find_root()
        try:
            self._join(root)
            self._follow(root)
        except (OSError, CriuctlError):
            return  # it has ended, or is not to be traced: CRIU's way is what is left, and the trace ends with this thread

    def _join(self, pid: int) -> None:
        """Trace a process from now on, and whom it has forked before that."""
        inject.seize(pid, forks=True)
        self._tracees[pid] = ns_pids(pid)[-1]
        inject.interrupt(pid)
        for child in children(pid):
            if child not in self._tracees:
                with suppress(OSError):  # it was forked under our trace, which it is in then
                    self._join(child)

    @property
    def _wanted(self) -> set[int]:
        return set(self.terminals) - self.given

    def _follow(self, root: int) -> None:
        while self._tracees and (self._wanted or self.subreaper):
            try:
                pid, status = os.waitpid(-1, inject.WALL | inject.WNOTHREAD | os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                if self._stop.wait(_PAUSE):
                    break
                continue
            if not os.WIFSTOPPED(status):
                self._tracees.pop(pid, None)
                continue
            if pid not in self._tracees:
                self._tracees[pid] = ns_pids(pid)[-1]
            number, event = os.WSTOPSIG(status), status >> 16
            if event == _EVENT_STOP or (number == inject.SYSCALL_STOP and inject.result(pid) != _NO_SUCH_CALL):
                self._act(pid, root)
            if self._wanted or self.subreaper:
                inner = self._tracees[pid]
                stepping = inner in self._wanted or (self.subreaper and pid == root)
                inject.go_on(pid, 0 if event or number == inject.SYSCALL_STOP else number, to_syscall=stepping)
            else:
                inject.let_go(pid)
                self._tracees.pop(pid)
        self._let_all_go()

    def _act(self, pid: int, root: int) -> None:
        """The process has just left a system call, or waits in one."""
        try:
            if self.subreaper and pid == root:
                inject.call(pid, inject.PRCTL, inject.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                self.subreaper = False
            inner = self._tracees[pid]
            if inner in self._wanted and os.getsid(pid) == pid:
                self._take_terminal(pid, self.terminals[inner])
                self.given.add(inner)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # it was not in a system call: it soon is in another one
                raise

    @staticmethod
    def _take_terminal(pid: int, path: str) -> None:
        address = (inject.stack_pointer(pid) - _BELOW_STACK) & ~0xF
        name = os.fsencode(path) + b"\0"
        saved = inject.read_memory(pid, address, len(name))
        inject.write_memory(pid, address, name)
        try:
            fd = inject.call(pid, inject.OPEN, address, os.O_RDWR | os.O_NOCTTY)
            if fd >= 0:
                inject.call(pid, inject.IOCTL, fd, inject.TIOCSCTTY, 0)
                inject.call(pid, inject.CLOSE, fd)
        finally:
            inject.write_memory(pid, address, saved)

    def _let_all_go(self) -> None:
        for pid in list(self._tracees):
            try:
                inject.interrupt(pid)
                _, status = os.waitpid(pid, inject.WALL)
                if os.WIFSTOPPED(status):
                    plain = not status >> 16 and os.WSTOPSIG(status) != inject.SYSCALL_STOP
                    inject.let_go(pid, os.WSTOPSIG(status) if plain else 0)
            except OSError:
                continue  # it has ended
        self._tracees.clear()
