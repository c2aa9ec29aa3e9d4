"""System calls that the freeze has interrupted: entered again, as if nothing had happened.

A stopped thread has left the call that it waited in.  The kernel lets it go back where it can.  If
that needs a restart note of the kernel (poll, nanosleep, futex waits with a time limit), CRIU,
whose work in the thread overwrites that note, makes the call end with EINTR, and some calls
(epoll_wait, semop, sigwait, reading from a socket that has a time limit) always end so.  No signal
came, and some programs do not expect EINTR without one: ``tail -F``, ``script``, varnishd's worker.

So the thread is put back onto its ``syscall`` instruction, with what was left of a sleep, in the
images (`InterruptedCalls`).  Not if a signal waits that is going to interrupt the call: its
handler, if it has one, may have to.  For time limits in registers, and for sleeps, the elapsed time
is subtracted at the dump (`call_time_limits`); the others begin again.

That is not enough if a signal comes before the tree runs: its handler would run first, and the call
(also read, wait4, futex, which CRIU itself puts back) would be entered after it, and might wait
without end.  So the tracer of the stopped threads gives them what the kernel had left there, its
own note "enter again, unless a handler has run", and the kernel does what it would have done: at a
restore (`InterruptedCalls`), in a tree that runs on after its dump (`restart_living`), and in one
that is released before CRIU has done anything but stop it (`restart_seized`).

Only x86-64 is known here, and no 32-bit process.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from typing import Any

from msgspec import Struct

from ..criu.images import ImageSet, read, write
from ..errors import CriuctlError, NoSuchProcess
from ..proc import inject
from ..proc.procfs import read_memory, read_status, read_text
from ..proc.tree import Process
from ..report import Reporter
from .base import Repair, RestoredTree, RestoreImages

_MINUS_EINTR = (1 << 64) - errno.EINTR
_NATIVE = 1  # not a 32-bit process, whose calls have other numbers
_SYSCALL_LENGTH = 2
_NANOSLEEP, _CLOCK_NANOSLEEP, _TIMER_ABSTIME = 35, 230, 1
_FUTEX, _FUTEX_COMMAND, _FUTEX_WAITS = 202, 0x7F, (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_ENTERED_AGAIN = frozenset(  # calls that have done nothing yet when they end with EINTR
    (
        *(7, 232, 281, 441),  # poll, epoll_wait, epoll_pwait, epoll_pwait2
        *(65, 220),  # semop, semtimedop
        128,  # rt_sigtimedwait
        # Reading, writing, accepting: on a socket with SO_RCVTIMEO or SO_SNDTIMEO.
        *(0, 1, 19, 20, 43, 44, 45, 46, 47, 288, 299, 307),
        208,  # io_getevents
        *(_NANOSLEEP, _CLOCK_NANOSLEEP),  # begin again if they do not report what is left
    )
)
_PAUSES = frozenset(  # every handler ends them
    (
        # pause, rt_sigsuspend, select, pselect6, ppoll, io_pgetevents
        *(34, 130, 23, 270, 271, 333),
        # msgsnd, msgrcv; a sleep until some time, for others end with EINTR
        *(69, 70, _CLOCK_NANOSLEEP),
    )
)
_GOING_ON = frozenset(  # a handler that is not SA_RESTART ends them
    (
        # reading, writing, splicing
        *(0, 1, 17, 18, 19, 20, 295, 296, 327, 328, 40, 275, 276, 278, 326),
        *(2, 85, 257, 437, 16, 72, 73, 318),  # opening a FIFO, ioctl, fcntl, flock, getrandom
        *(42, 43, 44, 45, 46, 47, 288, 299, 307),  # connecting, accepting, sending, receiving
        *(61, 247, _FUTEX, 449),  # wait4, waitid, futex, futex_waitv
    )
)
_NUMBERS = frozenset(range(1, 65))
_WITH_ACTIONS = sorted(_NUMBERS - {signal.SIGKILL, signal.SIGSTOP})  # as the images list them
_NO_HANDLERS = (int(signal.SIG_DFL), int(signal.SIG_IGN))
_WORDS = 9  # bytes that the kernel shows of a call
_RESTARTSYS, _RESTARTNOHAND = 512, 514  # the kernel's notes, as errors that no program sees
_SYSCALL = b"\x0f\x05"


class InterruptedCalls(Repair):
    """System calls that a stop for the dump has interrupted, in the restored tree."""

    loses = "CRIU 4.2 lets some interrupted system calls end with EINTR, although no signal came."

    def __init__(self) -> None:
        # thread, by its number in the tree -> registers in its call
        self._calls: dict[int, Any] = {}

    def amend_restore(self, restore: RestoreImages) -> None:
        """Put each thread back onto its ``syscall`` instruction, unless a signal waits for it."""
        self._calls = _restart_saved(restore.images)

    def release(self, tree: RestoredTree) -> None:
        """Leave the decision to the kernel, which knows whether a signal has come since."""
        try:
            _put_back(self._calls, tree.pids.values(), handled=True)
        except (OSError, CriuctlError) as error:
            tree.reporter.warning(
                "a signal that came during the restore may not end a system call that the tree "
                f"waits in: {error}"
            )


def _restart_saved(images: ImageSet) -> dict[int, Any]:
    """Return the registers of the threads that are in calls, by number."""
    calls = {}
    processes = _processes(images)
    for number, messages in _cores(images):
        core = messages[0]
        registers = core.thread_info.gpregs
        call = type(registers)()
        call.CopyFrom(registers)
        if _noted(call):
            calls[number] = call
        shared, handled = processes.get(number, (set(), _NUMBERS))
        waiting = (_signals(core.thread_core.signals_p) | shared) & handled
        blocked = (
            core.thread_core.blk_sigset
            if core.thread_core.HasField("blk_sigset")
            else core.tc.blk_sigset
        )
        if all(blocked >> (one - 1) & 1 for one in waiting) and _restart(registers):
            write(images.folder, f"core-{number}.img", "CORE", messages)
    return calls


def restart_living(images: ImageSet, tree: Sequence[Process], reporter: Reporter) -> None:
    """Restart the calls of the tree itself, in post-dump: CRIU has done its work in the threads,
    and still holds them.
    """
    try:
        found = ((number, messages[0].thread_info.gpregs) for number, messages in _cores(images))
        calls = {number: registers for number, registers in found if _noted(registers)}
        _put_back(calls, [process.pid for process in tree if not process.zombie])
    except (OSError, CriuctlError) as error:
        reporter.warning(
            f"system calls that the tree waited in end with EINTR, without a signal: {error}"
        )


def restart_seized(tree: Sequence[Process], reporter: Reporter) -> None:
    """Restart the calls of a tree that CRIU has only stopped, and is about to release: calls that
    always end with EINTR then.
    """
    try:
        calls = {}
        for tid in (tid for process in tree if not process.zombie for tid in _threads(process.pid)):
            with suppress(NoSuchProcess):  # it was killed
                if (call := _Interrupted.of(tid)) is not None and _noted(call):
                    calls[int(read_status(tid)["NSpid"].split()[-1])] = call
        _put_back(calls, [process.pid for process in tree if not process.zombie])
    except (OSError, CriuctlError) as error:
        reporter.warning(
            f"system calls that the tree waited in end with EINTR, without a signal: {error}"
        )


class _Interrupted(Struct):
    """The registers of a thread that was stopped in a system call, if that has ended with EINTR."""

    orig_ax: int
    di: int
    si: int
    dx: int
    r10: int
    r8: int
    r9: int
    sp: int
    ip: int
    ax: int = _MINUS_EINTR
    mode: int = _NATIVE

    @classmethod
    def of(cls, tid: int) -> _Interrupted | None:
        """Return the thread's registers; None: it is in no such call."""
        words = read_text(tid, "syscall").split()
        return cls(*(int(word, 0) for word in words)) if len(words) == _WORDS else None


def _put_back(calls: dict[int, Any], pids: Iterable[int], *, handled: bool = False) -> None:
    """Have CRIU set the registers: only a thread's tracer can, and CRIU waits for criuctl in a
    system call.

    `handled`: in processes that have handlers.
    """
    if not calls:
        return
    found: dict[int, dict[int, Any]] = {}  # tracer -> its threads
    depths: dict[int, int] = {}  # tracer -> how many PID namespaces see it
    for pid in pids:
        is_call = cache(partial(_is_call, pid))
        for status, numbers in _numbered(pid):
            if handled and not int(status["SigCgt"], 16):
                break
            if (call := calls.get(numbers[-1])) is None or not (tracer := int(status["TracerPid"])):
                continue
            if is_call(call.ip - _SYSCALL_LENGTH):
                depth = depths.get(tracer) or depths.setdefault(
                    tracer, len(read_status(tracer)["NSpid"].split())
                )
                found.setdefault(tracer, {})[numbers[depth - 1]] = call
    for tracer, threads in found.items():
        with inject.stopped(tracer):
            inject.set_traced(tracer, threads)


def _numbered(pid: int) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Yield the threads of a process: a status, and the thread's numbers, from criuctl's PID
    namespace to its own.

    Where there is but one namespace, one status stands for all threads: CRIU traces all of them.
    """
    tids = _threads(pid)
    alone: dict[str, str] | None = None
    for tid in tids:
        with suppress(NoSuchProcess):  # it was killed
            status = alone or read_status(tid)
            numbers = [int(word) for word in status["NSpid"].split()]
            if len(numbers) == 1 and tid == pid:
                alone = status
            yield status, numbers if alone is None else [tid]


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):  # it was killed
        return []


def _is_call(pid: int, address: int) -> bool:
    """Return whether a ``syscall`` instruction is there: the number of a call may also be what
    another one has returned.
    """
    try:
        return read_memory(pid, address, _SYSCALL_LENGTH) == _SYSCALL
    except (OSError, CriuctlError):  # not mapped; or the thread has been killed
        return False


# -- what the images show
# ---------------------------------------------------------------------------------


def _cores(images: ImageSet) -> Iterator[tuple[int, list[Any]]]:
    """Yield the images of the threads."""
    for name in images.names():
        if name.startswith("core-"):
            messages = read(images.folder, name, "CORE")
            if messages and messages[0].HasField("thread_info"):
                yield int(name.removeprefix("core-").removesuffix(".img")), messages


def _processes(images: ImageSet) -> dict[int, tuple[set[int], Set[int]]]:
    """Return thread -> its process's pending signals, and those that have handlers.

    A signal without handler is pending as well, if only while CRIU has the process: a new window
    size, for example.
    """
    found: dict[int, tuple[set[int], Set[int]]] = {}
    names = set(images.names())
    for entry in read(images.folder, "pstree.img", "PSTREE"):
        if (name := f"core-{entry.pid}.img") in names:
            tc = read(images.folder, name, "CORE")[0].tc
            actions = zip(_WITH_ACTIONS, tc.sigactions, strict=False)
            handled = (
                {number for number, one in actions if one.sigaction not in _NO_HANDLERS}
                if tc.sigactions
                else _NUMBERS
            )
            found.update(
                dict.fromkeys([entry.pid, *entry.threads], (_signals(tc.signals_s), handled))
            )
    return found


def _signals(queue: Any) -> set[int]:
    return {int.from_bytes(one.siginfo[:4], "little") for one in queue.signals}


def _restart(registers: Any) -> bool:
    """Step back onto the ``syscall`` instruction, if the thread was in a call that may be entered
    again.
    """
    if registers.ax != _MINUS_EINTR or registers.mode != _NATIVE:
        return False
    if registers.orig_ax == _NANOSLEEP and registers.si:
        registers.di = registers.si  # the kernel has stored there how long is left
    elif (
        registers.orig_ax == _CLOCK_NANOSLEEP
        and registers.r10
        and not registers.si & _TIMER_ABSTIME
    ):
        registers.dx = registers.r10
    elif registers.orig_ax == _FUTEX:
        if registers.si & _FUTEX_COMMAND not in _FUTEX_WAITS:
            return False
    elif registers.orig_ax not in _ENTERED_AGAIN:
        return False
    registers.ax = registers.orig_ax
    registers.ip -= _SYSCALL_LENGTH
    return True


def _noted(registers: Any) -> bool:
    """Put the kernel's note into the registers of an interrupted call, which CRIU has ended or
    stepped back onto.
    """
    if _restart(registers):
        note = _RESTARTNOHAND
    elif registers.ax != registers.orig_ax or registers.mode != _NATIVE:
        return False
    elif registers.orig_ax in _PAUSES:
        note = _RESTARTNOHAND
    elif registers.orig_ax == _FUTEX and registers.si & _FUTEX_COMMAND not in _FUTEX_WAITS:
        return False
    elif registers.orig_ax in _GOING_ON:
        note = _RESTARTSYS
    else:
        return False
    registers.ax = (1 << 64) - note
    registers.ip += _SYSCALL_LENGTH
    return True
