"""Ending a command with all that it has started, also in the background.

The program that was started may end before its children do: a shell's background jobs ignore the
interrupt of a key. So the processes are looked for before the first signal, again while the command
runs, and the command has ended only when none of them is left. What had become a daemon before (its
parents have ended, and it has a session of its own) is not found, and stays.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity, read_process
from .event_loop import Loop
from .processes import Tree

_LOOK = 0.2  # seconds between two looks, and two signals
_PATIENCE = 4.0  # seconds that processes may take to end after SIGKILL


def below(
    members: Iterable[ProcessIdentity], mine: Callable[[ProcessIdentity, int], bool]
) -> list[ProcessIdentity]:
    """Return the processes that are `mine` (with their parent's PID), and all their descendants.

    `members` has parents before children.
    """
    inside: list[ProcessIdentity] = []
    pids: set[int] = set()
    for identity in members:
        with suppress(CriuctlError, ProcessLookupError):
            parent = read_process(identity.pid).ppid
            if parent in pids or mine(identity, parent):
                inside.append(identity)
                pids.add(identity.pid)
    return inside


def of_shell(
    members: Collection[ProcessIdentity], shell: int, before: Collection[ProcessIdentity]
) -> list[ProcessIdentity]:
    """Return what the shell with this PID has started since `before` were all of the session.

    Children whose parent has ended are known by their job: a process group that is new.
    """
    groups = set()
    for identity in before:
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(identity.pid))
    session = os.getsid(shell)

    def mine(identity: ProcessIdentity, parent: int) -> bool:
        if identity in before:
            return False
        pid = identity.pid
        return parent == shell or (os.getsid(pid) == session and os.getpgid(pid) not in groups)

    return below(members, mine)


class Ending:
    """The end of one command: its processes are asked to end, and killed after a grace period."""

    def __init__(
        self,
        loop: Loop,
        tree: Tree,
        find: Callable[[], Iterable[ProcessIdentity]],
        *,
        runs: Callable[[], bool],
        may_signal: Callable[[bool], bool],
        over: Callable[[], None],
    ) -> None:
        """`runs` says whether the command's own program runs, and `may_signal`, which gets whether
        the grace period is over, whether signals may be sent; `over` is called once, at the end.
        """
        self._loop, self._tree, self._find = loop, tree, find
        self._runs, self._may_signal, self._over = runs, may_signal, over
        self._known = dict.fromkeys(find())
        self._asked: set[ProcessIdentity] = set()
        self._hard = 0.0

    def begin(self, grace: float) -> None:
        """Kill what is left after `grace` seconds."""
        self._hard = time.monotonic() + grace
        self._loop.after(min(grace, _LOOK) or _LOOK, self._look)

    def left(self) -> list[ProcessIdentity]:
        """Return the processes of the command that live."""
        return [identity for identity in self._known if identity.alive()]

    def _look(self) -> None:
        runs, now = self._runs(), time.monotonic()
        if runs:
            self._known.update(dict.fromkeys(self._find()))
        left = self.left()
        if not runs and (not left or now > self._hard + _PATIENCE):
            self._over()
            return
        if self._may_signal(now >= self._hard):
            if now >= self._hard:
                self._tree.signal(signal.SIGKILL, left)
            elif not runs:  # the interrupt has ended the program: ask the others
                self._tree.signal(signal.SIGTERM, set(left) - self._asked)
                self._asked.update(left)
        if now > self._hard + 3 * _PATIENCE:
            self._over()  # it is stuck, or a loop of the shell itself that catches the interrupt
            return
        self._loop.after(_LOOK, self._look)
