"""Attributes of threads that CRIU does not save: I/O priority (`ionice`), timer slack, personality
(`setarch`); and of a process, the contents of its core dump.

Noted at the dump if they are not the default; set in post-restore, also back to the default: what
CRIU restores has criuctl's own.  Sources: ioprio_set(2), proc_pid_timerslack_ns(5), personality(2),
core(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ..checkpoint.manifest import ProcessRecord
from ..errors import CriuctlError
from ..proc import inject
from ..proc.procfs import inner_thread, read_raw
from ..proc.syscalls import io_priority, set_io_priority
from ..report import Reporter
from .base import Repair, RestoredTree

USUAL = {"io_priority": 0, "timer_slack": 50_000, "personality": 0, "core_filter": 0x33}
"""The defaults: no I/O priority; nanoseconds; Linux; anonymous memory, ELF headers, private huge
pages.
"""

_REAL_TIME = (os.SCHED_FIFO, os.SCHED_RR, 6)  # and SCHED_DEADLINE: they have no timer slack
_PERSONALITY = 135  # the system call, of x86-64
_NO_CLASS = 1 << 13  # I/O priorities below this have no class, which means none


def unusual(pid: int, threads: int) -> dict[str, dict[str, int]]:
    """Return what is not the default in this process: a thread's ID in its namespace -> name ->
    value, the names as in `USUAL`.
    """
    found: dict[str, dict[str, int]] = {}
    with suppress(OSError):  # it has ended
        for tid in [pid] if threads == 1 else map(int, os.listdir(f"/proc/{pid}/task")):
            if different := {
                name: value
                for name, value in _of(tid, leads=tid == pid).items()
                if value != USUAL[name]
            }:
                found[inner_thread(pid, tid)] = different
    return found


class ThreadAttributes(Repair):
    """ioprio_set(2), timer slack, personality(2) of each thread, coredump_filter of each
    process.
    """

    loses = "CRIU 4.2 does not save I/O priority, timer slack, personality and coredump_filter."

    def mend(self, tree: RestoredTree) -> None:
        """Give each thread its attributes; a warning for what cannot be set."""
        _set_all(tree.manifest.processes, tree.pids, tree.reporter)


def _set_all(records: Iterable[ProcessRecord], pids: Mapping[int, int], reporter: Reporter) -> None:
    own = _of(os.getpid(), leads=True)
    inherited = any(own[name] != USUAL[name] for name in own)
    for record in records:
        pid = pids.get(record.ns_pid)
        # a zombie has none
        if pid is None or record.state == "Z" or not (record.manners or inherited):
            continue
        failed: dict[str, str] = {}
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                wanted = USUAL | record.manners.get(inner_thread(pid, tid), {})
                for name, value in _of(tid, leads=tid == pid).items():
                    if value != wanted[name]:
                        try:
                            _set(tid, name, wanted[name])
                        except (OSError, CriuctlError) as error:
                            failed[name] = str(error)
        for name, why in failed.items():
            reporter.warning(
                f"PID {record.ns_pid}: its {name.replace('_', ' ')} is not what it was: {why}"
            )


def _of(tid: int, *, leads: bool) -> dict[str, int]:
    """Return the attributes of one thread; those of a process if it `leads` it.  What cannot be
    known is left out.
    """
    found: dict[str, int] = {}
    with suppress(OSError):
        priority = io_priority(tid)
        found["io_priority"] = priority if priority >= _NO_CLASS else 0
    with suppress(OSError, ValueError):
        if os.sched_getscheduler(tid) not in _REAL_TIME:
            found["timer_slack"] = _read(tid, "timerslack_ns")
    with suppress(OSError, ValueError):
        found["personality"] = _read(tid, "personality", 16)
    if leads:
        with suppress(OSError, ValueError):  # a kernel thread, a zombie: it has no memory
            found["core_filter"] = _read(tid, "coredump_filter", 16)
    return found


def _set(tid: int, name: str, value: int) -> None:
    if name == "io_priority":
        set_io_priority(tid, value)
    elif name == "personality":
        with inject.stopped(tid):
            result = inject.call(tid, _PERSONALITY, value)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
    elif name == "timer_slack":
        _write(tid, "timerslack_ns", value)
        if not value and _read(tid, "timerslack_ns"):
            _write(tid, "timerslack_ns", 1)  # zero stands for the thread's default there
    else:
        _write(tid, "coredump_filter", value)


def _read(tid: int, name: str, base: int = 10) -> int:
    return int(read_raw(f"/proc/{tid}/{name}"), base)


def _write(tid: int, name: str, value: int) -> None:
    Path(f"/proc/{tid}/{name}").write_text(str(value))
