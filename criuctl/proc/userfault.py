"""A userfaultfd of another process, made from outside.

A userfaultfd belongs to the address space of the process that makes it, but its descriptor may be
anywhere. So the system call is run inside the process (`inject`), the descriptor is copied out with
pidfd_getfd(2), and the process closes its own one. When the last copy is closed, also because its
owner was killed, the kernel unregisters all memory: nothing is left in the process.

A thread of the program stands still for a fraction of a millisecond, and has foreign registers
then. So a process of its own does that, which ignores the signals that can be ignored and does not
end with criuctl: only a SIGKILL for itself, in that moment, could leave the thread with them.

Not touched are processes under a seccomp filter that is not a session's (the call could be
forbidden on pain of death), those that another program traces, 32-bit ones, and threads that do not
stop at once.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from ..errors import CriuctlError, NoSuchProcess
from . import call_limits, inject, sessionchild
from .procfs import all_tids, open_pidfd, read_status, read_text
from .syscalls import USER_MODE_ONLY, pidfd_getfd, same_file, userfaultfd_number
from .traced_calls import syscall_site
from .written_pages import enable

_STOPPING = 1.0  # seconds for a thread to stop
_ALL = 30.0  # seconds for all processes together
_PAUSE = 0.0002
_ANSWER = struct.Struct("=i")
_TEXT = 512  # bytes of a reason
_LINK = "anon_inode:[userfaultfd]"

Taken = dict[int, int | str]  # by PID: the descriptor, or why there is none


def take(pids: Sequence[int]) -> Taken:
    """Return a userfaultfd of each of these processes, ready for asynchronous write-protection.

    The caller closes them. Raises no error for a process that allows none.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            child = os.fork()
            if child == 0:
                _work(theirs, pids)
        pidfd = os.pidfd_open(child)
        try:
            return _received(ours, pids)
        finally:
            # It ends by itself; one that does not waits for a thread, in which it has done nothing.
            if not select.select([pidfd], [], [], _ALL)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            with suppress(ChildProcessError):  # reaped elsewhere
                os.waitpid(child, 0)


def _received(ours: socket.socket, pids: Sequence[int]) -> Taken:
    taken: Taken = {}
    ours.settimeout(_ALL)
    try:
        for pid in pids:
            text, fds, _flags, _address = socket.recv_fds(ours, _TEXT, 1)
            if not text and not fds:
                break  # it has ended
            if fds:
                os.set_inheritable(fds[0], False)
                taken[pid] = fds[0]
            else:
                taken[pid] = text.decode(errors="replace")
    except OSError:
        pass  # it hangs
    return dict.fromkeys(pids, "a thread did not stop") | taken


def _work(answers: socket.socket, pids: Sequence[int]) -> None:
    """Do it, in the forked process; does not return."""
    try:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            with suppress(OSError):
                signal.signal(number, signal.SIG_IGN)
        until = time.monotonic() + _ALL / 2
        for pid in pids:
            try:
                fd = _made(pid, until)
            except (OSError, CriuctlError) as error:
                text = error.message if isinstance(error, CriuctlError) else error.strerror or ""
                answers.sendall(text.encode(errors="replace")[:_TEXT] or b"?")
            else:
                socket.send_fds(answers, [b"+"], [fd])
                os.close(fd)
    except BaseException:  # our end is gone: nothing is to be done any more
        os._exit(1)
    os._exit(0)


def _made(pid: int, until: float) -> int:
    """Return a userfaultfd of the process; raise what prevents it."""
    pidfd = open_pidfd(pid)
    try:
        while True:
            for tid in _candidates(pid):
                if _stopped(tid):
                    try:
                        made = _run(pid, pidfd, tid)
                    finally:
                        with suppress(OSError):
                            inject.let_go(tid)
                    if made is not None:
                        _close_inherited(pid, *made)
                        return made[0]
            if time.monotonic() > until:
                raise NoSuchProcess(f"no thread of PID {pid} could be stopped")
            time.sleep(_PAUSE)
    finally:
        os.close(pidfd)


def _candidates(pid: int) -> list[int]:
    """Return the threads that may be asked, the most suitable one first."""
    waiting, running = [], []
    for tid in all_tids(pid):
        try:
            status = read_status(pid, f"task/{tid}/status")
        except NoSuchProcess:
            continue
        if status["TracerPid"].strip() != "0":
            raise OSError(errno.EBUSY, "another program traces it")
        state = status["State"].strip()[:1]
        if state == "S":
            waiting.append(tid)
        elif state == "R":
            running.append(tid)
        elif state in "TtZX":
            raise OSError(errno.EAGAIN, "it does not run")
    if not waiting and not running and not all_tids(pid):
        raise NoSuchProcess(f"there is no process with PID {pid}")
    # a wait that a stop always interrupts last
    waiting.sort(key=lambda tid: _call(pid, tid) in inject.ENDED_BY_STOPS)
    return [*waiting, *running]


def _call(pid: int, tid: int) -> int:
    with suppress(CriuctlError, ValueError, IndexError):
        return int(read_text(pid, f"task/{tid}/syscall").split()[0])
    return -1


def _stopped(tid: int) -> bool:
    """Trace the thread and stop it; return whether it stands. Otherwise it is not traced."""
    try:
        inject.seize(tid)
    except OSError:
        return False
    until = time.monotonic() + _STOPPING
    with suppress(OSError):
        inject.interrupt(tid)
        while True:
            stop = inject.stopped_with(tid)
            if stop is None:
                if time.monotonic() > until:
                    # It cannot be let go of before it stands: our end does it.
                    raise SystemExit(f"thread {tid} does not stop")
                time.sleep(_PAUSE)
            elif stop >> 8 == inject.EVENT_STOP:
                return True
            else:
                inject.go_on(tid, stop & 0xFF)
                inject.interrupt(tid)
    return False


def _run(pid: int, pidfd: int, tid: int) -> tuple[int, int] | None:
    """Make the userfaultfd in the stopped thread and take it out: our descriptor, and its number in
    the process; None: ask again later.
    """
    if not call_limits.may_call(tid):
        return None
    if not call_limits.seccomp_filters(tid) <= _harmless_filters():
        raise OSError(errno.EPERM, "a seccomp filter restricts it")
    with inject.calling(tid, site=syscall_site(pid), restart=True) as run:
        made = run(userfaultfd_number(), os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY)
        if made < 0:
            raise OSError(-made, os.strerror(-made))
        try:
            fd = pidfd_getfd(pidfd, made)
        finally:
            run(inject.CLOSE, made)
    try:
        enable(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, made


def _close_inherited(pid: int, fd: int, number: int) -> None:
    """Close the descriptor in children that another thread has forked in that moment."""
    for tid in all_tids(pid):
        with suppress(CriuctlError):
            for child in map(int, read_text(pid, f"task/{tid}/children").split()):
                if not _inherited(child, fd, number):
                    continue
                until = time.monotonic() + _STOPPING
                while _inherited(child, fd, number) and time.monotonic() < until:
                    if _stopped(child):
                        try:
                            site = syscall_site(child)
                            with inject.calling(child, site=site, restart=True) as run:
                                run(inject.CLOSE, number)
                        finally:
                            inject.let_go(child)


def _inherited(child: int, fd: int, number: int) -> bool:
    try:
        link = os.readlink(f"/proc/{child}/fd/{number}")
    except OSError:
        return False
    return link == _LINK and same_file((os.getpid(), fd), (child, number))


@cache
def _harmless_filters() -> frozenset[bytes]:
    """Return the seccomp filters that sessions have, which do not concern these calls."""
    return frozenset(
        sessionchild.packed(refused) for refused in (["io_uring"], ["mptcp"], ["io_uring", "mptcp"])
    )
