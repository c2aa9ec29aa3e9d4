"""System calls that the freeze has interrupted: entered again, as if nothing had been.

A stopped thread has left the call that it waited in.  The kernel lets it go back where it can; where it would do so by a note
of its own (poll, nanosleep, futex waits with a time limit) CRIU, whose work in the thread overwrites that note, makes the call
end with EINTR, and some calls (epoll_wait, semop, sigwait, reading from a socket that has a time limit) always end so.  No signal
came, and programs that never expected one end: ``tail -F``, ``script``, varnishd's worker.

So the thread is put back onto its ``syscall`` instruction, with what was left of a sleep: at a restore in the images
(`restart_saved`), and in a tree that runs on after its dump (`restart_living`).  Not where a signal waits that is going to
interrupt the call: its handler may have to.  Time limits begin anew; a sleep that did not ask what was left keeps its EINTR.

Only x86-64 is known here, and no 32-bit process.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..criu.images import ImageSet, read, write
from ..errors import CriuctlError
from ..proc import inject
from ..proc.procfs import read_lines
from ..proc.tree import Process
from ..report import Reporter

_MINUS_EINTR = (1 << 64) - errno.EINTR
_NATIVE = 1  # not a 32-bit process, whose calls have other numbers
_SYSCALL_LENGTH = 2
_NANOSLEEP, _CLOCK_NANOSLEEP, _TIMER_ABSTIME = 35, 230, 1
_FUTEX, _FUTEX_COMMAND, _FUTEX_WAITS = 202, 0x7F, (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_ENTERED_AGAIN = frozenset(  # what has done nothing yet when it ends with EINTR
    (
        *(7, 232, 281, 441),  # poll, epoll_wait, epoll_pwait, epoll_pwait2
        *(65, 220, 69, 70),  # semop, semtimedop, msgsnd, msgrcv
        128,  # rt_sigtimedwait
        *(0, 1, 19, 20, 43, 44, 45, 46, 47, 288),  # reading, writing, accepting: on a socket with SO_RCVTIMEO or SO_SNDTIMEO
        *(208, 333),  # io_getevents, io_pgetevents
    )
)
_TRIES, _PAUSE = 100, 0.002  # to meet CRIU in a system call, where it waits for us


def restart_saved(images: ImageSet) -> None:
    """The threads of the images."""
    for name, messages in _interrupted(images):
        write(images.folder, name, "CORE", messages)


def restart_living(images: ImageSet, tree: Sequence[Process], reporter: Reporter) -> None:
    """The threads of the tree itself, in post-dump: CRIU has done its work in them, and still holds them.

    Only who traces a thread can set its registers, so CRIU, which waits for our word in a system call, is made to.
    """
    waiting = {_number(name): messages[0].thread_info.gpregs for name, messages in _interrupted(images)}
    if not waiting:
        return
    try:
        threads = [
            (tid, tracer)
            for process in tree
            if not process.zombie
            for tid in map(int, os.listdir(f"/proc/{process.pid}/task"))
            if _numbers(tid)[-1] in waiting and (tracer := int(_status(tid, "TracerPid")[0]))
        ]
        for tracer in {by for _tid, by in threads}:
            depth = len(_numbers(tracer))
            numbers = [_numbers(tid) for tid, by in threads if by == tracer]
            _set(tracer, {inner[depth - 1]: waiting[inner[-1]] for inner in numbers})
    except (OSError, CriuctlError) as error:
        reporter.warning(f"system calls that the tree waited in end with EINTR, without a signal: {error}")


def _set(tracer: int, threads: dict[int, Any]) -> None:
    """Have CRIU put these threads, known by their numbers in its PID namespace, back onto their calls."""
    for left in reversed(range(_TRIES)):
        try:
            with inject.stopped(tracer):
                inject.set_traced(tracer, threads, _MINUS_EINTR)
            return
        except BlockingIOError:  # it is about to wait
            if not left:
                raise
        time.sleep(_PAUSE)


# -- what the images tell ---------------------------------------------------------------------------------


def _interrupted(images: ImageSet) -> Iterator[tuple[str, list[Any]]]:
    """The images of the threads that are to enter their calls again, with the registers for that."""
    shared = _shared_signals(images)
    for name in images.names():
        if not name.startswith("core-"):
            continue
        messages = read(images.folder, name, "CORE")
        if messages and messages[0].HasField("thread_info"):
            core = messages[0]
            waiting = _signals(core.thread_core.signals_p) | shared.get(_number(name), set())
            blocked = core.thread_core.blk_sigset if core.thread_core.HasField("blk_sigset") else core.tc.blk_sigset
            if all(blocked >> (number - 1) & 1 for number in waiting) and _restart(core.thread_info.gpregs):
                yield name, messages


def _number(name: str) -> int:
    return int(name.removeprefix("core-").removesuffix(".img"))


def _shared_signals(images: ImageSet) -> dict[int, set[int]]:
    """Thread -> the signals that wait for its process as a whole."""
    found: dict[int, set[int]] = {}
    names = set(images.names())
    for entry in read(images.folder, "pstree.img", "PSTREE"):
        if (name := f"core-{entry.pid}.img") in names:
            numbers = _signals(read(images.folder, name, "CORE")[0].tc.signals_s)
            found.update(dict.fromkeys([entry.pid, *entry.threads], numbers))
    return found


def _signals(queue: Any) -> set[int]:
    return {int.from_bytes(signal.siginfo[:4], "little") for signal in queue.signals}


def _restart(registers: Any) -> bool:
    """Step back onto the ``syscall`` instruction, if the thread was in a call that may be entered again."""
    if registers.ax != _MINUS_EINTR or registers.mode != _NATIVE:
        return False
    if registers.orig_ax == _NANOSLEEP and registers.si:
        registers.di = registers.si  # the kernel has stored there how long is left
    elif registers.orig_ax == _CLOCK_NANOSLEEP and registers.r10 and not registers.si & _TIMER_ABSTIME:
        registers.dx = registers.r10
    elif registers.orig_ax == _FUTEX:
        if registers.si & _FUTEX_COMMAND not in _FUTEX_WAITS:
            return False
    elif registers.orig_ax not in _ENTERED_AGAIN:
        return False
    registers.ax = registers.orig_ax
    registers.ip -= _SYSCALL_LENGTH
    return True


# -- who is who -------------------------------------------------------------------------------------------


def _numbers(tid: int) -> list[int]:
    """A thread's numbers, from our PID namespace to its own."""
    return [int(number) for number in _status(tid, "NSpid")]


def _status(tid: int, key: str) -> list[str]:
    return next(line.split()[1:] for line in read_lines(tid, "status") if line.startswith(f"{key}:"))
