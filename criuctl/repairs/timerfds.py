"""Timer descriptors (timerfd), and what CRIU 4.2 gets wrong about them.

- A periodic one whose last expiry was not read yet comes back disarmed, and its event loop hangs.
  At the dump the kernel is asked for its time, which makes it count on, so that CRIU sees what it
  has left; in images of former dumps it is armed to expire at once.
- One that was last set to an absolute time, and is disarmed or has run out, expires once more.
- Timers run on while a restored tree waits for its memory and its connections, and one that was set
  to an absolute time comes up to a second early.  Just before the tree runs, each is set again to
  what it had left at the dump.
"""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..proc.syscalls import borrowed, timerfd_gettime, timerfd_settime
from .base import FrozenTree, Repair, RestoredTree, RestoreImages

_ARM_NOW = 1  # nanosecond
_SECOND = 10**9  # nanoseconds
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_SET_TICKS = 0x40085400  # TFD_IOC_SET_TICKS


class TimerDescriptors(Repair):
    """Periodic timers with unread expiries, disarmed absolute ones, and the time that a restore
    takes.
    """

    loses = (
        "CRIU 4.2 disarms a periodic timerfd with an unread expiry, and lets others expire early."
    )

    def __init__(self) -> None:
        # file ids whose time was absolute, which CRIU must not see
        self._disarmed: set[int] = set()

    def record(self, frozen: FrozenTree) -> None:
        """Have periodic timers with unread expiries count on, so that CRIU sees what they have
        left.
        """
        for pid, held in frozen.opened.items():
            for d in held:
                if d.kind == "timerfd" and _overdue(
                    dict(line.split(": ", 1) for line in d.extra if ": " in line)
                ):
                    with suppress(ProcessLookupError), borrowed(pid, d.fd) as timer:
                        timerfd_gettime(timer)

    def amend_restore(self, restore: RestoreImages) -> None:
        """Arm periodic timers with an unread expiry, and keep disarmed absolute ones disarmed."""

        def edit(entry: Any) -> None:
            if not entry.HasField("tfd") or entry.tfd.vsec or entry.tfd.vnsec:
                return
            if entry.tfd.ticks and (entry.tfd.isec or entry.tfd.insec):
                entry.tfd.vnsec = _ARM_NOW
            elif entry.tfd.settime_flags & _ABSOLUTE:
                # CRIU adds the clock's time, also to a disarmed one
                entry.tfd.settime_flags &= ~_ABSOLUTE
                self._disarmed.add(entry.id)

        if any(entry.HasField("tfd") for entry in restore.images.files()):
            restore.images.edit_files(edit)

    def release(self, tree: RestoredTree) -> None:
        """Set every running timer to what it had left at the dump, from now on."""
        files = tree.images.files()
        timers = {
            e.id: e.tfd
            for e in files
            if e.HasField("tfd") and (_runs(e.tfd) or e.id in self._disarmed)
        }
        if not timers:
            return
        holders = tree.images.holders()
        for number, timer in timers.items():
            if number in self._disarmed:
                timer.settime_flags |= _ABSOLUTE
            for pid, fd in holders.get(number, [])[:1]:
                try:
                    _set(tree.pids[pid], fd, timer)
                except (OSError, KeyError) as error:
                    tree.reporter.warning(
                        f"PID {pid}: descriptor {fd}, a timer, could not be set again: {error}"
                    )


def _overdue(fdinfo: Mapping[str, str]) -> bool:
    return fdinfo["ticks"] != "0" and fdinfo["it_value"] == "(0, 0)" != fdinfo["it_interval"]


def _runs(timer: Any) -> bool:
    return bool(timer.vsec or timer.vnsec)


def _set(pid: int, fd: int, timer: Any) -> None:
    left = timer.vsec * _SECOND + timer.vnsec
    now = time.clock_gettime_ns(timer.clockid) if left and timer.settime_flags & _ABSOLUTE else 0
    with borrowed(pid, fd) as own:
        timerfd_settime(own, timer.settime_flags, now + left, timer.isec * _SECOND + timer.insec)
        if timer.ticks:  # unread expiries
            fcntl.ioctl(own, _SET_TICKS, struct.pack("Q", timer.ticks))
