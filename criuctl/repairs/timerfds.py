"""Timer descriptors (timerfd), and what CRIU 4.2 gets wrong about them.

- A periodic one whose last expiry was not read yet comes back disarmed, and its event loop hangs.  At the dump the kernel is
  asked what such a one has left, which makes it count on from then; in images of former dumps it is armed to expire at once.
- One that was last set to an absolute time, and is disarmed or has run out, expires once more.  Mended in the images.
- They run on while a restored tree waits for its memory and its connections, and one that was set to an absolute time comes up
  to a second early.  Last of all each is wound up anew, to what it had left at the dump.
"""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..criu.images import ImageSet
from ..proc.descriptors import Descriptor
from ..proc.syscalls import borrowed, timerfd_gettime, timerfd_settime
from ..report import Reporter

_ARM_NOW = 1  # nanosecond
_SECOND = 10**9  # nanoseconds
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_SET_TICKS = 0x40085400  # TFD_IOC_SET_TICKS


def count_expiries(opened: Mapping[int, Sequence[Descriptor]]) -> None:
    """Of the frozen tree: have its periodic timers with unread expiries run on, so that CRIU sees what they have left."""
    for pid, held in opened.items():
        for d in held:
            if d.kind == "timerfd" and _overdue(dict(line.split(": ", 1) for line in d.extra if ": " in line)):
                with suppress(ProcessLookupError), borrowed(pid, d.fd) as timer:
                    timerfd_gettime(timer)


def _overdue(told: Mapping[str, str]) -> bool:
    """By what fdinfo tells."""
    return told["ticks"] != "0" and told["it_value"] == "(0, 0)" != told["it_interval"]


def arm_timers(images: ImageSet) -> set[int]:
    """Have CRIU arm periodic timers with an unread expiry again, and leave alone those that do not run.

    Returns the file ids of those that `wind_timers` has to tell that the time they were set to was absolute.
    """
    parted: set[int] = set()

    def edit(entry: Any) -> None:
        if not entry.HasField("tfd") or entry.tfd.vsec or entry.tfd.vnsec:
            return
        if entry.tfd.ticks and (entry.tfd.isec or entry.tfd.insec):
            entry.tfd.vnsec = _ARM_NOW
        elif entry.tfd.settime_flags & _ABSOLUTE:
            entry.tfd.settime_flags &= ~_ABSOLUTE  # CRIU adds the clock's time, also to none
            parted.add(entry.id)

    if any(entry.HasField("tfd") for entry in images.files()):
        images.edit_files(edit)
    return parted


def wind_timers(images: ImageSet, parted: Collection[int], pids: Mapping[int, int], reporter: Reporter) -> None:
    """Let every timer descriptor that runs have from now on what it had left at the dump; `pids` are the tree's PIDs -> ours."""
    timers = {e.id: e.tfd for e in images.files() if e.HasField("tfd") and (e.tfd.vsec or e.tfd.vnsec or e.id in parted)}
    if not timers:
        return
    holders = images.holders()
    for number, timer in timers.items():
        if number in parted:
            timer.settime_flags |= _ABSOLUTE
        for pid, fd in holders.get(number, [])[:1]:
            try:
                _wind(pids[pid], fd, timer)
            except (OSError, KeyError) as error:
                reporter.warning(f"PID {pid}: descriptor {fd}, a timer, could not be wound up: {error}")


def _wind(pid: int, fd: int, timer: Any) -> None:
    left = timer.vsec * _SECOND + timer.vnsec
    now = time.clock_gettime_ns(timer.clockid) if left and timer.settime_flags & _ABSOLUTE else 0
    with borrowed(pid, fd) as own:
        timerfd_settime(own, timer.settime_flags, now + left, timer.isec * _SECOND + timer.insec)
        if timer.ticks:  # expiries that nobody has read
            fcntl.ioctl(own, _SET_TICKS, struct.pack("Q", timer.ticks))
