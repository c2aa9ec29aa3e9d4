"""Signals that came to the frozen tree after CRIU had read them: added to its images.

CRIU reads a process's pending signals first, then its memory, then its timers.  A timer that runs
out in between is recorded as one that does not run, and its signal as one that never came: a
process that waits for an alarm would wait without end.  The same happens to what other processes
send in that time.

The kernel shows every process which signals are pending, but not how many, nor their siginfo:
timers that share a signal would be one, and data sent with a signal would be lost.  Only the tracer
can read that, so CRIU, which waits for criuctl, is made to read it.  If that is not possible, what
came is guessed from the timers.
"""

from __future__ import annotations

import os
import signal
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ..criu.images import ImageSet, read, write
from ..errors import CriuctlError, NoSuchProcess
from ..proc import inject
from ..proc.procfs import field_of, read_bytes, read_status
from ..proc.tree import Process
from .base import FrozenTree, Repair

_SI_USER, _SI_KERNEL, _SI_TIMER = 0, 0x80, -2
_INFO = struct.Struct("<iii4xiiQ96x")  # siginfo: number, errno, code, timer, overrun, value
_NEVER = {signal.SIGKILL, signal.SIGSTOP}
_REALTIME = 32  # from here on several of a number can wait


class _Queue(Struct):
    """The pending signals of a thread, or of its whole process."""

    name: str  # of the image of the thread
    tid: int  # PID in criuctl's namespace
    waiting: set[int]
    shared: bool


class LateSignals(Repair):
    """Signals that became pending between CRIU's look at them and the end of its dump."""

    loses = "CRIU 4.2 loses signals, above all of timers, that come while it reads the memory."

    def amend_frozen(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Add what is pending now."""
        names = set(images.names())
        for process in frozen.processes:
            with suppress(OSError, NoSuchProcess):  # it was killed
                if not process.zombie and f"core-{process.ns_pid}.img" in names:
                    _add_to(images, names, process)


def _add_to(images: ImageSet, names: set[str], process: Process) -> None:
    main = f"core-{process.ns_pid}.img"
    queues = [queue for queue in _queues(process, main) if queue.name in names]
    if not queues:
        return
    messages = {
        name: read(images.folder, name, "CORE")
        for name in {main, *(queue.name for queue in queues)}
    }
    timers = messages[main][0].tc.timers
    for queue in queues:
        core = messages[queue.name][0]
        recorded = core.tc.signals_s if queue.shared else core.thread_core.signals_p
        if late := list(_late(recorded, queue, timers)):
            for siginfo in late:
                recorded.signals.add().siginfo = siginfo
            write(images.folder, queue.name, "CORE", messages[queue.name])


def _queues(process: Process, main: str) -> Iterator[_Queue]:
    """Return those that are not empty."""
    shared: set[int] = set()
    for tid in os.listdir(f"/proc/{process.pid}/task"):
        status = read_bytes(process.pid, f"task/{tid}/status")
        shared |= _signals(field_of(status, b"ShdPnd"))
        if own := _signals(field_of(status, b"SigPnd")):
            inner = int(field_of(status, b"NSpid").split()[-1])
            yield _Queue(f"core-{inner}.img", int(tid), own, shared=False)
    if shared:
        yield _Queue(main, process.pid, shared, shared=True)


def _late(recorded: Any, queue: _Queue, timers: Any) -> Iterator[bytes]:
    """Return what has come since it was recorded, as siginfo."""
    before = Counter(int.from_bytes(one.siginfo[:4], "little") for one in recorded.signals)
    missing = queue.waiting - before.keys()
    if not missing and max(queue.waiting) < _REALTIME:
        return
    running = _running(timers)
    try:
        now = _pending(queue)
    except (OSError, CriuctlError):
        now = []
    for siginfo in now:
        number, _errno, code, timer, *_ = _INFO.unpack(siginfo)
        missing.discard(number)
        if before[number]:
            before[number] -= 1
        elif number not in _NEVER and (number, timer if code == _SI_TIMER else code) not in running:
            yield siginfo
    # no more than its number is known
    for number in sorted(missing - {number for number, _ in running}):
        yield _info(number, timers)


def _pending(queue: _Queue) -> list[bytes]:
    """Return what is pending there, read by CRIU."""
    status = read_status(queue.tid)
    tracer = int(status["TracerPid"])
    # how many PID namespaces see it
    depth = len(read_status(tracer)["NSpid"].split()) if tracer else 1
    number = int(status["NSpid"].split()[depth - 1])
    with inject.stopped(tracer):
        return inject.queued_signals(tracer, number, shared=queue.shared)


def _running(timers: Any) -> set[tuple[int, int]]:
    """Return the signals, and their timers, of timers that CRIU recorded as running.

    They include timers that have run out since CRIU read them.
    """
    plain = {
        signal.SIGALRM: timers.real,
        signal.SIGVTALRM: timers.virt,
        signal.SIGPROF: timers.prof,
    }
    running = {
        (int(number), _SI_KERNEL)
        for number, t in plain.items()
        if t.isec or t.iusec or t.vsec or t.vusec
    }
    return running | {
        (t.si_signo, t.it_id) for t in timers.posix if t.isec or t.insec or t.vsec or t.vnsec
    }


def _info(number: int, timers: Any) -> bytes:
    timer = next((t for t in timers.posix if t.si_signo == number), None)
    if timer is not None:
        return _INFO.pack(number, 0, _SI_TIMER, timer.it_id, 0, timer.sival_ptr)
    code = _SI_KERNEL if number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF) else _SI_USER
    return _INFO.pack(number, 0, code, 0, 0, 0)


def _signals(mask: bytes) -> set[int]:
    bits = int(mask, 16)
    return (
        {number for number in range(1, 65) if bits >> (number - 1) & 1} - _NEVER if bits else set()
    )
