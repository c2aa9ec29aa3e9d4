"""Signals that came to the frozen tree after CRIU had looked for them: added to its images.

CRIU reads a process's pending signals first, then its memory, then its timers.  A timer that runs out in between is recorded as
one that does not run, and its signal as one that never came: who waits for an alarm would wait for ever.  The same becomes of
what others send in that time.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..criu.images import ImageSet, read, write
from ..errors import NoSuchProcess
from ..proc.procfs import read_status
from ..proc.tree import Process

_SI_USER, _SI_KERNEL, _SI_TIMER = 0, 0x80, -2
_INFO = struct.Struct("<iii4xiiQ96x")  # siginfo: number, errno, code, timer, overrun, value
_NEVER = {signal.SIGKILL, signal.SIGSTOP}


def add(images: ImageSet, tree: Sequence[Process]) -> None:
    """In post-dump: the tree is still frozen."""
    names = set(images.names())
    for process in tree:
        with suppress(OSError, NoSuchProcess):  # somebody has killed it
            if not process.zombie and f"core-{process.ns_pid}.img" in names:
                _add_to(images, names, process)


def _add_to(images: ImageSet, names: set[str], process: Process) -> None:
    main = f"core-{process.ns_pid}.img"
    shared: set[int] = set()
    waiting = {}
    for tid in os.listdir(f"/proc/{process.pid}/task"):
        status = read_status(process.pid, f"task/{tid}/status")
        shared = _signals(status["ShdPnd"])
        waiting[f"core-{status['NSpid'].split()[-1]}.img"] = _signals(status["SigPnd"])
    if not shared and not any(waiting.values()):
        return
    timers = read(images.folder, main, "CORE")[0].tc.timers
    for name in waiting.keys() & names:
        messages = read(images.folder, name, "CORE")
        added = _add(messages[0].thread_core.signals_p, waiting[name], timers)
        if name == main:
            added = _add(messages[0].tc.signals_s, shared, timers) or added
        if added:
            write(images.folder, name, "CORE", messages)


def _add(queue: Any, waiting: set[int], timers: Any) -> bool:
    """Add what waits and is not there; not that of a timer that runs, which will send it."""
    missing = waiting - {int.from_bytes(s.siginfo[:4], "little") for s in queue.signals} - _running(timers)
    for number in sorted(missing):
        queue.signals.add().siginfo = _info(number, timers)
    return bool(missing)


def _running(timers: Any) -> set[int]:
    """The signals of timers that CRIU will have run."""
    plain = {signal.SIGALRM: timers.real, signal.SIGVTALRM: timers.virt, signal.SIGPROF: timers.prof}
    running: set[int] = {number for number, t in plain.items() if t.isec or t.iusec or t.vsec or t.vusec}
    return running | {t.si_signo for t in timers.posix if t.isec or t.insec or t.vsec or t.vnsec}


def _info(number: int, timers: Any) -> bytes:
    timer = next((t for t in timers.posix if t.si_signo == number), None)
    if timer is not None:
        return _INFO.pack(number, 0, _SI_TIMER, timer.it_id, 0, timer.sival_ptr)
    code = _SI_KERNEL if number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF) else _SI_USER
    return _INFO.pack(number, 0, code, 0, 0, 0)


def _signals(mask: str) -> set[int]:
    bits = int(mask, 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1} - _NEVER if bits else set()
