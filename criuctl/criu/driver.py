"""Driving CRIU through one dump or one restore.

The driver knows CRIU's order of events and its failure behaviour, and nothing of stores: memory goes to a
`PageSink`, everything else is left in the images folder, and the caller acts at the three moments that
matter, by callbacks.

Dump: ``pre-dump`` (the tree still runs) -> ``query-ext-files`` (frozen) -> pages stream -> ``post-dump``
(frozen, all images written).  **The commit callback runs inside post-dump**: when it raises, CRIU is told
no and lets the tree go on as if nothing had happened; when it returns, CRIU ends the tree (or thaws it).

Restore: ``post-restore`` comes when every descriptor is in place and nothing has executed.  When the
callback there raises, CRIU kills what it restored.  Later notifications cannot veto any more.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CriuctlError
from ..proc.command import Starter
from .binary import CriuBinary
from .options import LOG_NAME, DumpOptions, RestoreOptions, dump_options, restore_options
from .pages import B, PageGuard, PageImage, PageReceiver, PageSink, socket_pair
from .rpc import CriuGone, CriuRefused

_LOG_LIMIT = 16 << 20  # bytes of log that are read back


class CriuFailed(CriuctlError):
    """CRIU could not do it; `log` is what it wrote, for a diagnosis."""

    code = "criu-failed"

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class Frozen:
    """What the caller says of the frozen tree."""

    guards: Mapping[int, PageGuard]  # the guarded page of each task, by CRIU's PID
    external: Sequence[str] = ()  # more resources that come from outside again, known only now


@dataclass(frozen=True, slots=True)
class DumpSteps:
    """What the caller does at the moments of a dump; what raises, vetoes."""

    frozen: Callable[[], Frozen]  # every task is stopped; CRIU has not looked at sockets yet, nor locked connections
    commit: Callable[[list[PageImage]], None]  # all pages and images are there, the tree is still frozen


def folder_path(folder: int) -> str:
    """The images folder as CRIU, which inherits the descriptor, names it."""
    return f"/proc/self/fd/{folder}"


def read_log(folder: int) -> str:
    """CRIU's log so far, or "" when there is none."""
    try:
        fd = os.open(LOG_NAME, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return ""
    with open(fd, "rb") as file:
        return file.read(_LOG_LIMIT).decode(errors="replace")


def run_id(folder: int) -> str | None:
    """The id of the CRIU run that logged into `folder`, after which its firewall table is named.

    CRIU makes up an id when it starts and another one when it takes a request; the last one counts.
    """
    found = re.findall(r"^\([0-9.]+\) CRIU run id = ([0-9a-f-]{36})", read_log(folder), re.MULTILINE)
    return found[-1] if found else None


def dump(
    criu: CriuBinary, folder: int, options: DumpOptions, sink: PageSink[B], steps: DumpSteps, *, enter: Sequence[str] = ()
) -> None:
    """Dump a tree: pages into `sink`, metadata images into `folder`.

    Raises what a callback or the sink raised, else `CriuFailed`.  In every case but success the tree runs
    on when this returns, because CRIU has ended by then.
    """
    ours, theirs = socket_pair()
    receiver = PageReceiver(ours, sink)
    committed = threading.Event()

    def notify(script: str, _pid: int) -> bool | Sequence[str]:
        if script == "query-ext-files":
            frozen = steps.frozen()
            receiver.guards = frozen.guards
            return frozen.external
        elif script == "post-dump":
            steps.commit(receiver.finish())
            committed.set()
        return True

    receiver.start()
    try:
        freezer = [options.freezer] if options.freezer is not None else []
        with theirs, criu.swrk(enter=enter, pass_fds=[folder, theirs.fileno(), *freezer]) as swrk:
            request = dump_options(folder_path(folder), theirs.fileno(), options)
            theirs.close()  # CRIU holds its own copy; the stream must end when CRIU does
            swrk.call("DUMP", request, notify)
    except (CriuRefused, CriuGone) as error:
        receiver.stop()
        if not committed.is_set():
            receiver.raise_failure()
        raise CriuFailed(str(error), read_log(folder)) from error
    except BaseException:
        receiver.stop()
        raise


def restore(
    criu: CriuBinary,
    folder: int,
    options: RestoreOptions,
    placed: Callable[[int], None],
    *,
    enter: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    start: Starter | None = None,
    about_to_fork: Callable[[int], None] | None = None,
    about_to_run: Callable[[], None] | None = None,
) -> int:
    """Restore a tree from `folder`; `placed` is called with the root's PID before anything executes.

    `start` starts CRIU as somebody else's child: the tree's root is that one's too.  `about_to_fork` is told CRIU's
    PID, or that of its parent, when it is about to make the tree; `about_to_run` when every task stands before its first
    instruction, in CRIU's hands (what raises there, comes too late for CRIU).  Returns the root's PID in CRIU's PID namespace.
    Raises what `placed` raised, else `CriuFailed`; nothing of the tree is left then.
    """

    def notify(script: str, pid: int) -> bool:
        if script == "pre-restore" and about_to_fork is not None:
            about_to_fork(swrk.pid)
        elif script == "post-restore":
            placed(pid)
        elif script == "pre-resume" and about_to_run is not None:
            about_to_run()
        return True

    try:
        with criu.swrk(enter=enter, pass_fds=[folder, *pass_fds, *options.inherit.values()], start=start) as swrk:
            response = swrk.call("RESTORE", restore_options(folder_path(folder), options), notify)
            return int(response.restore.pid)
    except (CriuRefused, CriuGone) as error:
        raise CriuFailed(str(error), read_log(folder)) from error
