"""The processes of a session as its holder handles them: who they are, signals, standing still, ending.

They are the descendants of the tree's root and of whatever came to the holder as the subreaper, and who is in the session's
control group; never the holder's own helpers.  A process is signalled through what was just read
of it (PID and start time), never by a PID alone.

Without a freezer a tree is stopped parents first, so that no shell sees its job stop and takes the terminal, and continued
children first; walks are repeated until one finds nobody new.  Who was stopped before stays stopped.
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
from ...proc.tree import ProcessIdentity, children
from ...proc.vforks import waits_in_vfork
from .cgroup import SessionGroup

_MAX_WALKS = 50
_TIOCSIG = 0x40045436  # _IOW("T", 0x36, int); not in the termios module
_TYPED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)  # which a key can send: TIOCSIG takes no other
_STOPPED = ("T", "t")
_STANDING = (*_STOPPED, "Z", "X", None)
_STOP_SECONDS = 1.0
_VFORK_TRIES, _VFORK_PAUSE = 100, 0.002  # a child between vfork and exec has little to do
_HOLD_SECONDS = 0.2  # for one that sleeps in a disk: clients of the holder wait meanwhile
_HOLD_TRIES, _HOLD_THREADS = 5, 16  # fewer threads than these a tracer has stopped as fast


class Tree:
    """The processes of one session."""

    def __init__(self, group: SessionGroup | None) -> None:
        self.root: ProcessIdentity | None = None
        self.group = group
        self.helpers: set[int] = set()  # children of the holder that are not the session's
        self.stopped: list[ProcessIdentity] = []  # whom `stop` stopped, parents first
        self.frozen = ""  # by which method it stands still
        self.asleep: frozenset[ProcessIdentity] | None = None  # who had been stopped before everybody was, once looked at

    def members(self) -> list[ProcessIdentity]:
        """Everybody who lives, parents before children."""
        order: list[int] = []
        if self.root is not None and self.root.exists():
            order.append(self.root.pid)
        order += [pid for pid in _children(os.getpid()) if pid not in order and pid not in self.helpers]
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

    def signal(self, number: int, to: Iterable[ProcessIdentity]) -> int:
        """Signal these; how many there were to get it."""
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
                pass  # gone meanwhile, or a set-uid program that is not ours to signal
            finally:
                os.close(fd)
        return count

    def signal_foreground(self, master: int, number: int, members: Iterable[ProcessIdentity]) -> int | None:
        """Signal the foreground group of the terminal behind `master`; how many of `members` were in it, None: it has none."""
        try:
            group = os.tcgetpgrp(master)
            if group <= 0:
                return None
            inside = _in_group(members, group)
            if number not in _TYPED:
                return self.signal(number, inside)
            fcntl.ioctl(master, _TIOCSIG, number)  # by the terminal itself: the group of this very moment
        except OSError:
            return None
        return len(inside)

    def returns(self, stopped: Iterable[ProcessIdentity], asleep: Iterable[ProcessIdentity]) -> None:
        """A tree that stood still comes back in its restorer's hands: whom the pause has `stopped`, who was `asleep` before."""
        self.stopped, self.asleep = list(stopped), frozenset(asleep)

    def freeze(self) -> tuple[str, int]:
        """Let everybody stand still; by which method, and how many.

        Not in the middle of a vfork, if that can be helped: who waits there for a child that stands still cannot be seized.
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
        """The root has ended, and `init`, PID 1 of its namespace, ends the rest, unless it stands still with them.

        Nobody else of a tree that stands still runs in between.
        """
        if self.frozen:
            self.signal(signal.SIGKILL, [identity for identity in self.members() if identity.pid != init])
            self.thaw()

    def _freeze(self) -> tuple[str, int]:
        if self.root is not None and _has_ended(self.root):
            return "", 0  # what is left is about to end, by a PID 1 that must not stand still
        members = self.members()
        if self.asleep is None and not self.frozen:
            # Afterwards they look as frozen as the others, and one that a tracer has just let go of looks awake for a moment.
            self.asleep = frozenset(identity for identity in members if identity.state() in _STOPPED)
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
        """Let a tracer seize a tree that stands still: the group through which it has to, None if it needs to know nothing.

        The freezer of version 1 would let it wait for ever for a process that was stopped: there all are stopped instead, before
        the group is thawed, and get no further than to that signal.
        """
        if self.group is None or self.frozen != self.group.method:
            return None
        if self.group.version > 1:
            return self.group.path
        self._stop()
        self.group.thaw()
        deadline = time.monotonic() + _STOP_SECONDS
        while not all(identity.state() in _STANDING for identity in self.stopped) and time.monotonic() < deadline:
            select.select([], [], [], 0.001)
        return None

    def hold(self, asker: int) -> str | None:
        """Let a tree of many threads stand still while a tracer seizes them: the group to thaw (`unhold`), None if it runs on.

        A tracer stops one thread after the other and waits for each until it has been scheduled, which with many that are busy
        takes longer than all of its patience.  Only version 2 lets what stands still be seized without the tracer's knowing.
        Who asks must not stand still himself: nobody would thaw it.
        """
        if self.group is None or self.group.version < 2 or self.frozen:
            return None
        members = self.members()
        if sum(_threads(identity.pid) for identity in members) <= _HOLD_THREADS or not asker or self.group.has(asker):
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
        """Undo `hold`: all are in the tracer's hands, or nothing comes of it."""
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
                if identity not in self.stopped and identity not in asleep and self.signal(signal.SIGSTOP, (identity,)):
                    self.stopped.append(identity)


def _has_ended(process: ProcessIdentity) -> bool:
    """Whether it is gone, or a zombie: not if only its first thread has ended."""
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


def exit_code(status: int) -> tuple[int, int | None]:
    """(code as a shell's ``$?``, signal or None) of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return (128 - code, -code) if code < 0 else (code, None)


def _in_group(members: Iterable[ProcessIdentity], group: int) -> list[ProcessIdentity]:
    inside = []
    for identity in members:
        with suppress(ProcessLookupError):
            if os.getpgid(identity.pid) == group:
                inside.append(identity)
    return inside
