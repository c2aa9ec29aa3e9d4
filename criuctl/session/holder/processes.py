"""The processes of a session: find, signal, freeze and reap them.

They are the descendants of the tree's root, the orphans that the holder has adopted as the
subreaper, and the processes in the session's control group; never the holder's own helpers.  A
process is signalled by PID and start time as just read, never by a PID alone.

Without a freezer a tree is stopped parents first, so that no shell sees its job stop and takes the
terminal, and continued children first.  Walks are repeated until one finds no new process.  A
process that was stopped before stays stopped.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ...errors import CriuctlError
from ...proc.procfs import read_bytes, read_raw
from ...proc.tree import ProcessIdentity, children
from ...proc.vforks import waits_in_vfork
from .cgroup import SessionGroup

_MAX_WALKS = 50
_MAX_DEPTH = 1000  # ancestors that are looked at
_TIOCSIG = 0x40045436  # _IOW("T", 0x36, int); not in the termios module
_TYPED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)  # those of keys: TIOCSIG takes no others
_STOPPED = ("T", "t")
_STANDING = (*_STOPPED, "Z", "X", None)
_STOP_SECONDS = 1.0
_VFORK_TRIES, _VFORK_PAUSE = 100, 0.002  # a child between vfork and exec has little to do
_HOLD_SECONDS = 0.2  # for a process that waits for a disk; the holder's clients wait
_HOLD_TRIES, _HOLD_THREADS = 5, 16  # a tracer stops fewer threads as fast


class Tree:
    """The processes of one session."""

    def __init__(self, group: SessionGroup | None) -> None:
        self.root: ProcessIdentity | None = None
        self.group = group
        self.helpers: set[int] = set()  # PIDs of children of the holder that are not the session's
        self.stopped: list[ProcessIdentity] = []  # by `_stop`, parents first
        self.frozen = ""  # the method by which it stands still
        # Processes that were stopped before the tree was frozen; None: not looked at yet.
        self.asleep: frozenset[ProcessIdentity] | None = None

    def members(self) -> list[ProcessIdentity]:
        """Return all processes that live, parents before children."""
        order: list[int] = []
        if self.root is not None and self.root.exists():
            order.append(self.root.pid)
        order += [
            pid for pid in _children(os.getpid()) if pid not in order and pid not in self.helpers
        ]
        seen, at = set(order), 0
        while at < len(order):
            below = [pid for pid in _children(order[at]) if pid not in seen]
            order += below
            seen.update(below)
            at += 1
        if self.group is not None:
            order += [pid for pid in self.group.pids() if pid not in seen and pid != os.getpid()]
        found = []
        for pid in order:
            try:
                identity = ProcessIdentity.of(pid)
            except CriuctlError:
                continue
            if identity.alive():
                found.append(identity)
        return found

    def contains(self, pid: int) -> bool:
        """Whether a process belongs to the session: by its ancestors, or by its control group."""
        root, at = self.root, pid
        for _ in range(_MAX_DEPTH):
            if root is not None and at == root.pid:
                return root.exists()
            try:
                above = int(read_bytes(at, "stat").rpartition(b")")[2].split()[1])
            except CriuctlError:
                return False
            if above == os.getpid():  # an orphan, or the init; a helper's child is none of them
                return at not in self.helpers
            if above <= 1:
                break
            at = above
        return self.group is not None and pid in self.group.pids()

    def signal(self, number: int, to: Iterable[ProcessIdentity]) -> int:
        """Signal these processes; return how many got the signal."""
        count = 0
        for identity in to:
            try:
                fd = identity.open_pidfd()
            except CriuctlError:
                continue
            try:
                signal.pidfd_send_signal(fd, number)
                count += 1
            except OSError:
                pass  # gone, or a set-uid program that this user may not signal
            finally:
                os.close(fd)
        return count

    def signal_foreground(
        self, master: int, number: int, members: Iterable[ProcessIdentity]
    ) -> int | None:
        """Signal the foreground group of the terminal behind `master`.

        Return how many of `members` were in it; None: there is no such group.
        """
        try:
            group = os.tcgetpgrp(master)
            if group <= 0:
                return None
            inside = in_group(members, group)
            if number not in _TYPED:
                return self.signal(number, inside)
            fcntl.ioctl(master, _TIOCSIG, number)  # the terminal signals its present group
        except OSError:
            return None
        return len(inside)

    def returns(
        self, stopped: Iterable[ProcessIdentity], asleep: Iterable[ProcessIdentity]
    ) -> None:
        """Take over a restored tree that stood still: processes `stopped` by the pause, or
        before.
        """
        self.stopped, self.asleep = list(stopped), frozenset(asleep)

    def freeze(self) -> tuple[str, int]:
        """Freeze all processes; return the method and their number.

        If possible not in the middle of a vfork: a process that waits there for a frozen child
        cannot be seized.
        """
        fresh = not self.frozen and self.asleep is None
        for _ in range(_VFORK_TRIES if fresh else 0):
            frozen = self._freeze()
            if not any(waits_in_vfork(identity.pid) for identity in self.members()):
                return frozen
            self.thaw()
            select.select([], [], [], _VFORK_PAUSE)
        return self._freeze()

    def end_with_root(self, init: int) -> None:
        """Kill the rest of a frozen tree whose root has ended.

        `init`, PID 1 of the namespace, would do that if it were not frozen too.  No process of the
        tree runs in between.
        """
        if self.frozen:
            self.signal(
                signal.SIGKILL, [identity for identity in self.members() if identity.pid != init]
            )
            self.thaw()

    def _freeze(self) -> tuple[str, int]:
        if self.root is not None and _has_ended(self.root):
            return "", 0  # what is left is about to end, by a PID 1 that must not stand still
        members = self.members()
        if self.asleep is None and not self.frozen:
            # Before the freeze: afterwards they look as frozen as the others, and one that a tracer
            # has just let go of looks awake for a moment.
            self.asleep = frozenset(
                identity for identity in members if identity.state() in _STOPPED
            )
        if self.group is not None and members:
            # A process may have been started or restored outside the group.
            inside = set(self.group.pids())
            for identity in members:
                if identity.pid not in inside:
                    self.group.add(identity.pid)
            if self.group.freeze():
                self.frozen = self.group.method
                return self.frozen, len(members)
            self.group.thaw()
        self._stop()
        self.frozen = "SIGSTOP"
        return self.frozen, len(members)

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self.group is not None:
            self.group.thaw()
        self.signal(signal.SIGCONT, reversed(self.stopped))
        self.stopped, self.asleep = [], None
        self.frozen = ""

    def seizable(self) -> str | None:
        """Let a tracer seize a tree that stands still.

        Return the control group that the tracer has to thaw; None: it needs none.  With a freezer
        of version 1 a tracer would wait for ever for a process that was stopped: there all are
        stopped before the group is thawed, and run no further than to that signal.
        """
        if self.group is None or self.frozen != self.group.method:
            return None
        if self.group.version > 1:
            return self.group.path
        self._stop()
        self.group.thaw()
        deadline = time.monotonic() + _STOP_SECONDS
        while (
            not all(identity.state() in _STANDING for identity in self.stopped)
            and time.monotonic() < deadline
        ):
            select.select([], [], [], 0.001)
        return None

    def hold(self, asker: int) -> str | None:
        """Freeze a tree of many threads while a tracer seizes them; return its group.

        None: it runs on.  A tracer stops one thread after the other and waits until each was
        scheduled, which with many busy threads exceeds its time limit.  Only version 2 lets frozen
        processes be seized without the tracer's knowledge.  The process `asker` must not be frozen
        itself: it has to ask for the thaw.
        """
        if self.group is None or self.group.version < 2 or self.frozen:
            return None
        members = self.members()
        if (
            sum(_threads(identity.pid) for identity in members) <= _HOLD_THREADS
            or not asker
            or self.group.has(asker)
        ):
            return None
        for _ in range(_HOLD_TRIES):
            frozen = self.group.freeze(_HOLD_SECONDS, 0)
            if frozen and not any(waits_in_vfork(identity.pid) for identity in members):
                return self.group.path
            self.group.thaw()
            if not frozen:
                break
            select.select([], [], [], _VFORK_PAUSE)
        return None

    def unhold(self) -> None:
        """Undo `hold`: the tracer has seized all, or has given up."""
        if self.group is not None:
            self.group.thaw()

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        asleep = self.asleep
        return {
            "root": self.root._asdict() if self.root is not None else None,
            "stopped": [identity._asdict() for identity in self.stopped],
            "frozen": self.frozen,
            "asleep": None if asleep is None else [identity._asdict() for identity in asleep],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        self.stopped = [ProcessIdentity(**values) for values in state["stopped"]]
        self.frozen = state["frozen"]
        if state.get("asleep") is not None:
            self.asleep = frozenset(ProcessIdentity(**values) for values in state["asleep"])
        if state["root"] is not None:
            self.root = ProcessIdentity(**state["root"])

    # -- inside -----------------------------------------------------------------------------------

    def _stop(self) -> None:
        asleep = self.asleep or frozenset()
        known: set[ProcessIdentity] = set()
        for _ in range(_MAX_WALKS):
            new = [identity for identity in self.members() if identity not in known]
            if not new:
                return
            for identity in new:
                known.add(identity)
                if (
                    identity not in self.stopped
                    and identity not in asleep
                    and self.signal(signal.SIGSTOP, (identity,))
                ):
                    self.stopped.append(identity)


def _has_ended(process: ProcessIdentity) -> bool:
    """Return whether a process is gone or a zombie; not if only its first thread has ended."""
    return process.state() in ("Z", "X", "x", None) and _threads(process.pid) < 2


def _threads(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def _children(pid: int) -> list[int]:
    try:
        return children(pid)
    except CriuctlError:
        return []


def reap(on_exit: Callable[[int, int], None]) -> None:
    """Reap every child that has ended; `on_exit` gets PID and wait status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        on_exit(pid, status)


def adopts(pid: int) -> bool:
    """Return whether a process is the init of a session: it adopts orphans, reaps children that it
    does not know, and passes signals on to the first program.
    """
    try:
        words = read_raw(f"/proc/{pid}/cmdline").split(b"\0")
    except OSError:
        return False
    return os.path.basename(words[0]) == b"tini" and b"-s" in words[1:2]


def exit_code(status: int) -> tuple[int, int | None]:
    """Return (code as a shell's ``$?``, signal or None) of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return (128 - code, -code) if code < 0 else (code, None)


def in_group(members: Iterable[ProcessIdentity], group: int) -> list[ProcessIdentity]:
    """Return those of `members` that are in a process group."""
    inside = []
    for identity in members:
        with suppress(ProcessLookupError):
            if os.getpgid(identity.pid) == group:
                inside.append(identity)
    return inside
