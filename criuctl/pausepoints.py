"""Named pause points: where a test may stop criuctl in the middle of an operation and do harm to
it.

Crash tests must kill criuctl, or CRIU, or the store, at every step of a dump and of a restore.
Sleeping and hoping to hit the step proves nothing, so the steps themselves are the pause points:
`Reporter.step` calls `reached` with the step's name.  When the variable ``CRIUCTL_PAUSE_AT`` holds
that name (``store#2``: its second occurrence), criuctl writes the line ``paused <step>`` to
``CRIUCTL_PAUSE_FIFO`` (the path of a FIFO, or the number of an inherited descriptor) and waits
until the reading end is closed; the process that holds that end kills what it wants to kill and
lets go.
``CRIUCTL_PAUSE_AT=*`` pauses nowhere: each step only writes its line ``reached <step>``, which is
how a test learns what steps there are.

Invariants: nothing waits when no process reads (a FIFO without a reader, a descriptor that is
closed, are passed by), signals are served while waiting, and without the variable the cost is one
dictionary lookup.
"""

from __future__ import annotations

import errno
import os
import select

VARIABLE = "CRIUCTL_PAUSE_AT"
FIFO = "CRIUCTL_PAUSE_FIFO"
EVERY = "*"
_LOOK = 100  # milliseconds

_times: dict[str, int] = {}  # how often each step was reached; kept only while the variable is set


def reached(step: str) -> None:
    """Pause here if a test asked for `step`; returns at once in every other case."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    where = os.environ.get(FIFO, "")
    _times[step] = _times.get(step, 0) + 1
    name = step if _times[step] == 1 else f"{step}#{_times[step]}"
    if where and wanted in (name, EVERY):
        _tell(name, where, wait=wanted != EVERY)


def _tell(step: str, where: str, *, wait: bool) -> None:
    """Write to `where` that `step` is reached and, with `wait`, stay until no process holds its
    reading end any more.
    """
    try:
        fd = (
            os.dup(int(where))
            if where.isdigit()
            else os.open(where, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        )
    except OSError as error:
        # no process reads: there is nothing to wait for
        if error.errno in (errno.ENXIO, errno.EBADF, errno.ENOENT):
            return
        raise
    try:
        os.write(fd, f"{'paused' if wait else 'reached'} {step}\n".encode())
        if wait:
            poll = select.poll()
            poll.register(fd, 0)  # POLLERR is always reported: the last reader is gone
            # A signal that comes just before the call does not interrupt it.
            while not poll.poll(_LOOK):
                pass
    except BrokenPipeError:  # the reader left between open and write
        return
    finally:
        os.close(fd)
