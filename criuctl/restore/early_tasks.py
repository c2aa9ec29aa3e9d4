"""What a restored process must get while CRIU creates it: its terminal, which its children can only
inherit; its exit code.

The kernel lets only a session's leader take a controlling terminal; every other process inherits it
at the fork.  CRIU creates the tree first and opens terminals afterwards, so a restored leader has
its terminal back and the rest of its session does not: a shell inside a shell would have no job
control, and no process could open ``/dev/tty``.  So CRIU and all that it forks are followed with
ptrace, from when it is about to create the tree, and each leader up to its ``setsid``: there it
opens the terminal and takes it.  (Not earlier: CRIU first tries out ptrace on children of its own.)
What CRIU does later finds it done.

The root becomes a subreaper at the same time, because a process has one tracer.  CRIU sets that too
late: an orphan would be adopted by the subreaper around the tree, and the restore of one that has
ended, and was not reaped, would wait forever.  The exit codes of zombies are set here, too: CRIU
forks them to end once more, but with seven bits of their code, so that 255 would be 127 and 128 a
success.  Every process is detached as soon as nothing is left to set, before CRIU itself traces it.

Only stops are waited for: a process that ends is left for its parent to reap, which may be another
thread of criuctl.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct, field

from ..criu.images import ImageSet, read
from ..errors import CriuctlError
from ..proc import inject
from ..proc.namespaces import namespaces, ns_pids
from ..proc.procfs import read_memory
from ..proc.tree import children

_PAUSE = 0.0001  # seconds between looks for stopped processes
_BELOW_STACK = 4096  # far below the red zone, well inside the stack's mapping
_NO_SUCH_CALL = -errno.ENOSYS  # the value of rax while a call is entered
_JOIN = 10.0
_STOPPING = 1.0  # seconds that an interrupted process may take to stop
_STOPS = os.WSTOPPED | os.WNOHANG | inject.WALL | inject.WNOTHREAD


class EarlyTasks(Struct):
    """Follows the tree as it is created; a thread, because ptrace is bound to one."""

    root: int  # PID of the tree's root in the tree
    terminals: Mapping[int, str]  # session leader, by its PID in the tree -> path of its terminal
    subreaper: bool = False  # the root becomes a subreaper
    namespace: int | None = None  # the PID namespace that the tree gets, if it is not criuctl's
    # zombie, by its PID in the tree -> exit code; entries are removed when they are set
    codes: dict[int, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)  # leaders that have their terminals
    # PID on this host -> PID in the tree; 0: not of the tree
    _tracees: dict[int, int] = field(default_factory=dict)
    _following: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def follow(self, criu: int) -> None:
        """Start to follow CRIU, which is `pid` or a child of it, and waits before it creates the
        tree.
        """
        self._thread = threading.Thread(
            target=self._run, args=(criu,), name="criuctl-early", daemon=True
        )
        self._thread.start()
        self._following.wait(_JOIN)

    def stop(self) -> set[int]:
        """Detach from every process, because CRIU is about to trace them itself.

        Return the leaders that did not get their terminals.  Idempotent.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN)
        return self._wanted

    def _run(self, criu: int) -> None:
        try:
            self._join(criu)
            self._following.set()
            self._loop()
        except (OSError, CriuctlError):
            # It cannot be traced: CRIU's own way is what is left, and the trace ends with this
            # thread.
            return
        finally:
            self._following.set()

    def _join(self, pid: int) -> None:
        """Trace a process from now on, and those that it has forked before that."""
        inject.seize(pid, forks=True)
        self._tracees[pid] = self._number(pid)
        inject.interrupt(pid)
        for child in children(pid):
            if child not in self._tracees:
                with suppress(OSError):  # it was forked while traced, and is traced already
                    self._join(child)

    def _number(self, pid: int) -> int:
        """Return the PID in the tree's namespace, 0 outside it."""
        if self.namespace is not None and namespaces(pid).get("pid") != self.namespace:
            return 0
        return ns_pids(pid)[-1]

    @property
    def _wanted(self) -> set[int]:
        return set(self.terminals) - self.given

    @property
    def _busy(self) -> bool:
        return bool(self._wanted or self.subreaper or self.codes) and not self._stop.is_set()

    def _loop(self) -> None:
        try:
            while self._busy:
                try:
                    found = os.waitid(os.P_ALL, 0, _STOPS)
                except ChildProcessError:
                    return
                if found is None:
                    self._stop.wait(_PAUSE)
                    continue
                with suppress(ProcessLookupError, CriuctlError):  # killed while it was stopped
                    self._stopped(found.si_pid, found.si_status & 0xFF, found.si_status >> 8)
        finally:
            self._let_all_go()

    def _stopped(self, pid: int, number: int, event: int) -> None:
        if pid not in self._tracees:
            self._tracees[pid] = self._number(pid)
        inner = self._tracees[pid]
        if (
            inner in self.codes
            and number == inject.SYSCALL_STOP
            and inject.end_with(pid, self.codes[inner])
        ):
            del self.codes[inner], self._tracees[pid]
            inject.let_go(pid)  # a traced process that ends waits for its tracer to see that
            return
        if event == inject.EVENT_STOP or (
            number == inject.SYSCALL_STOP and inject.result(pid) != _NO_SUCH_CALL
        ):
            self._act(pid, inner)
        stepping = (
            inner in self._wanted or inner in self.codes or (self.subreaper and inner == self.root)
        )
        inject.go_on(
            pid, 0 if event or number == inject.SYSCALL_STOP else number, to_syscall=stepping
        )

    def _act(self, pid: int, inner: int) -> None:
        """Act on a process that has just left a system call, or waits in one."""
        try:
            if self.subreaper and inner == self.root:
                inject.call(pid, inject.PRCTL, inject.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                self.subreaper = False
            if inner in self._wanted and os.getsid(pid) == pid:
                self._take_terminal(pid, self.terminals[inner])
                self.given.add(inner)
        except OSError as error:
            # it was not in a system call: it will soon be in another one
            if error.errno != errno.EAGAIN:
                raise

    @staticmethod
    def _take_terminal(pid: int, path: str) -> None:
        address = (inject.stack_pointer(pid) - _BELOW_STACK) & ~0xF
        name = os.fsencode(path) + b"\0"
        saved = read_memory(pid, address, len(name))
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
            with suppress(OSError):  # it has ended
                inject.interrupt(pid)
                deadline = time.monotonic() + _STOPPING
                while (
                    found := os.waitid(os.P_PID, pid, _STOPS)
                ) is None and time.monotonic() < deadline:
                    time.sleep(_PAUSE)
                if found is not None:
                    number, event = found.si_status & 0xFF, found.si_status >> 8
                    inject.let_go(pid, 0 if event or number == inject.SYSCALL_STOP else number)
        self._tracees.clear()


def needs_subreaper(images: ImageSet) -> bool:
    """Return whether the root adopts orphans, and some of its children need a helper of CRIU.

    CRIU forks such children from a helper: those in a session that is not the root's.
    """
    tree = read(images.folder, "pstree.img", "PSTREE")
    core = read(images.folder, f"core-{tree[0].pid}.img", "CORE")[0]
    if not core.tc.child_subreaper:
        return False
    return any(
        entry.ppid == tree[0].pid and entry.sid not in (tree[0].sid, entry.pid)
        for entry in tree[1:]
    )
