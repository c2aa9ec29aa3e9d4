"""Drive CRIU through one dump or one restore.

The driver knows CRIU's order of events and its failure behaviour, and nothing about stores: memory
goes to a `PageSink`, everything else is left in the images folder, and the caller acts at the three
moments that matter, by callbacks.

Dump: ``pre-dump`` (the tree still runs) -> ``query-ext-files`` (frozen) -> pages stream ->
``post-dump`` (frozen, all images written). **The commit callback runs inside post-dump**: when it
raises, CRIU gets a negative answer and lets the tree go on as if nothing had happened; when it
returns, CRIU ends the tree (or thaws it).

Restore: ``post-restore`` comes when every descriptor is in place and nothing has executed. When the
callback there raises, CRIU kills what it restored. Later notifications cannot veto any more.
``pre-resume`` is the last: CRIU has done all its work, and would let go of one thread after the
other. If a thread is gone by then, because another one that runs already has killed it or ended
their process, CRIU takes that for a failure and kills all the others. So CRIU itself is ended
there, and the kernel lets go of all its tracees at once.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..errors import CriuctlError
from ..proc.command import Starter
from .binary import CriuBinary
from .options import (
    CONFIG_NAME,
    LOG_NAME,
    DumpOptions,
    RestoreOptions,
    config_text,
    dump_options,
    restore_options,
)
from .pages import B, PageGuard, PageImage, PageReceiver, PageSink, socket_pair
from .rpc import CriuGone, CriuRefused, Swrk, end_tracer
from .scan_hook import ScanHook

# bytes of log that are read back: the processes are named at its beginning, the failure at its end
_LOG_START, _LOG_END = 1 << 20, 15 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


class CriuFailed(CriuctlError):
    """CRIU failed; `log` is its log, for a diagnosis.

    `undone`: CRIU itself reported the failure, so the tree is as it was before and CRIU has
    finished.
    """

    code = "criu-failed"

    def __init__(self, message: str, log: str, *, undone: bool = False) -> None:
        super().__init__(message)
        self.log = log
        self.undone = undone


class Frozen(Struct, frozen=True):
    """What the caller specifies about the frozen tree."""

    guards: Mapping[int, PageGuard]  # the guarded page of each task, by CRIU's PID
    external: Sequence[str] = ()  # more external resources, known only now


class DumpSteps(Struct, frozen=True):
    """The caller's callbacks at the moments of a dump; raising an exception vetoes the dump."""

    # every task is stopped; CRIU has neither looked at sockets nor locked connections yet
    frozen: Callable[[], Frozen]
    # all pages and images exist, the tree is still frozen
    commit: Callable[[list[PageImage]], None]
    begins: Callable[[], None] = lambda: None  # CRIU is about to stop the first task


def folder_path(folder: int) -> str:
    """Return the path of the images folder for CRIU, which inherits the descriptor."""
    return f"/proc/self/fd/{folder}"


def read_log(folder: int) -> str:
    """Return CRIU's log so far, or "" without one.

    Of the long log of many processes, its beginning and its end.
    """
    try:
        fd = os.open(LOG_NAME, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return ""
    with open(fd, "rb") as file:
        read = file.read(_LOG_START)
        left_out = os.fstat(fd).st_size - _LOG_END - len(read)
        if left_out > 0:
            file.seek(left_out, os.SEEK_CUR)
            read += b"\n[%d bytes are left out]\n" % left_out
        return (read + file.read(_LOG_END)).decode(errors="replace")


def run_id(folder: int) -> str | None:
    """Return the id of the CRIU run that logged into `folder`, which is in its firewall table's
    name.

    CRIU makes up an id when it starts and another one when it takes a request; the last one counts.
    """
    found = re.findall(
        r"^\([0-9.]+\) CRIU run id = ([0-9a-f-]{36})", read_log(folder), re.MULTILINE
    )
    return found[-1] if found else None


def empty(folder: int) -> None:
    """Remove the images and the log of a failed run, before a run that will not write all of
    them.
    """
    for name in os.listdir(folder):
        os.unlink(name, dir_fd=folder)


class Dumper:
    """A CRIU for one dump; `close` it.

    It may be asked early: it prepares in parallel, which may take a tenth of a second, and waits in
    pre-dump with the tree untouched.
    """

    def __init__(
        self,
        criu: CriuBinary,
        folder: int,
        enter: Sequence[str] = (),
        scans: ScanHook | None = None,
    ) -> None:
        """Images go to `folder`; `enter` is an argv prefix that puts CRIU into other namespaces;
        `scans` hides memory from it.
        """
        self._criu, self._folder, self._enter, self._scans = criu, folder, enter, scans
        self._asked: DumpOptions | None = None
        # the source of its pages, until a receiver has it
        self._pages: socket.socket | None = None
        self._receiver: PageReceiver[Any] | None = None
        self._swrk: Swrk | None = None
        self._running = ExitStack()

    def unfiltered(self) -> None:
        """Hide nothing from later CRIUs."""
        self._scans = None

    def ask(self, options: DumpOptions) -> None:
        """Start CRIU and request the dump; raises what a failed dump raises."""
        self.close()
        with ExitStack() as stack:
            self._pages, theirs = socket_pair()
            freezer = [options.freezer] if options.freezer is not None else []
            fds = [self._folder, theirs.fileno(), *freezer]
            if config_text(options):
                with open(os.open(CONFIG_NAME, _NEW, 0o600, dir_fd=self._folder), "w") as file:
                    file.write(config_text(options))
            with theirs:  # CRIU holds a copy; the stream must end when CRIU does
                if self._scans is not None:
                    fds.append(self._scans.descriptor())
                self._swrk = swrk = stack.enter_context(
                    self._criu.swrk(enter=self._enter, pass_fds=fds, to_the_end=True)
                )
                swrk.ask("DUMP", dump_options(folder_path(self._folder), theirs.fileno(), options))
            self._running = stack.pop_all()
        self._asked = options

    @property
    def conversation(self) -> int:
        """Our end of the socket to CRIU.

        While other processes have it open too, CRIU waits for an answer if we are killed.
        """
        assert self._swrk is not None
        return self._swrk.sock.fileno()

    @property
    def pid(self) -> int:
        """CRIU's PID, or that of its parent."""
        assert self._swrk is not None
        return self._swrk.pid

    def close(self) -> None:
        """Close the connection to a waiting CRIU, which then ends.

        Its dump has not begun, or is rolled back by now.
        """
        self._asked = None
        self._running.close()
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def break_off(self) -> None:
        """Take no more pages, and answer CRIU's next question with no.

        A question that is being answered is left alone.
        """
        if self._swrk is not None:
            self._swrk.refuse()
        if self._receiver is not None:
            self._receiver.stop()

    @property
    def asks(self) -> bool:
        """Whether CRIU waits for one of the steps of `dump`."""
        return self._swrk is not None and self._swrk.asks

    def veto(self) -> None:
        """Make CRIU roll back now if it waits for a step of `dump`.

        May be called from another thread.
        """
        if self._swrk is not None:
            self._swrk.veto()

    def dump(self, options: DumpOptions, sink: PageSink[B], steps: DumpSteps) -> None:
        """Dump a tree: pages into `sink`, metadata images into the folder.

        A CRIU that was asked early does it, if it was asked for the same. Raises what a callback or
        the sink raised, else `CriuFailed`. In every case but success the tree runs on when this
        returns, because CRIU has ended by then.
        """
        receiver: PageReceiver[B] | None = None
        committed = threading.Event()
        try:
            with closing(self):
                if self._asked != options:
                    self.ask(options)
                assert self._pages is not None and self._swrk is not None
                receiver, self._pages = PageReceiver(self._pages, sink), None
                self._receiver = receiver
                receiver.start()
                self._swrk.answer(partial(_notify, receiver, self._hooked(steps), committed))
        except (CriuRefused, CriuGone) as error:
            if receiver is not None:
                receiver.stop()
                if not committed.is_set():
                    receiver.raise_failure()
            refused = isinstance(error, CriuRefused) and not committed.is_set()
            undone = refused and (receiver is None or not receiver.is_alive())
            raise CriuFailed(str(error), read_log(self._folder), undone=undone) from error
        except BaseException:
            if receiver is not None:
                receiver.stop()
            raise

    def _hooked(self, steps: DumpSteps) -> DumpSteps:
        """Return these steps; before the first one, `scans` hooks into CRIU."""
        scans = self._scans
        if scans is None:
            return steps

        def begins() -> None:
            scans.attach(self.pid, os.path.basename(self._criu.argv[-1]))
            steps.begins()

        return replace(steps, begins=begins)


def _notify(
    receiver: PageReceiver[B], steps: DumpSteps, committed: threading.Event, script: str, _pid: int
) -> bool | Sequence[str]:
    if script == "pre-dump":
        steps.begins()
    elif script == "query-ext-files":
        frozen = steps.frozen()
        receiver.guards = frozen.guards
        return frozen.external
    elif script == "post-dump":
        steps.commit(receiver.finish())
        committed.set()
    return True


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
    about_to_run: Callable[[], int | None] | None = None,
    broken_off: Callable[[], None] | None = None,
) -> None:
    """Restore a tree from `folder`.

    `placed` is called with the root's PID before anything executes. `start` starts CRIU as another
    process's child: the tree's root becomes a child of that process too. `about_to_fork` is called
    with CRIU's PID, or that of its parent, before CRIU makes the tree. `about_to_run` is called
    when every task stands before its first instruction, stopped by CRIU; they run once it has
    returned. It returns the PID of their tracer, 0 if unknown, or None if it has ended CRIU itself.
    Raises what `placed` or `about_to_run` raised, else `CriuFailed`; then nothing of the tree is
    left. `broken_off` is called first: a CRIU that is past post-restore would let the tree run, so
    it must be killed before that.
    """

    def notify(script: str, pid: int) -> bool:
        if script == "pre-restore" and about_to_fork is not None:
            about_to_fork(swrk.pid)
        elif script == "post-restore":
            placed(pid)
        return True

    try:
        with criu.swrk(
            enter=enter, pass_fds=[folder, *pass_fds, *options.inherit.values()], start=start
        ) as swrk:
            swrk.expendable = True
            try:
                swrk.call(
                    "RESTORE",
                    restore_options(folder_path(folder), options),
                    notify,
                    until="pre-resume",
                )
                tracer = about_to_run() if about_to_run is not None else 0
            except BaseException:
                if broken_off is not None:
                    broken_off()
                raise
            swrk.expendable = False
            if tracer is not None and (not tracer or not end_tracer(tracer)):
                swrk.go_on()
    except (CriuRefused, CriuGone) as error:
        raise CriuFailed(str(error), read_log(folder)) from error
