"""Processes that wait in vfork(2) for a child, which has their memory until it starts its program.

They sleep uninterruptibly: no tracer can seize them, and CRIU gives up after a time-out. The kernel
names the function in which they sleep.
"""

from __future__ import annotations

import os

# names in different kernels
_CHANNELS = ("kernel_clone", "_do_fork", "do_fork", "wait_for_vfork_done")


def waits_in_vfork(pid: int) -> bool:
    """Return whether a thread of the process waits for a child that has not run execve yet."""
    tasks = f"/proc/{pid}/task"
    try:
        return any(_waits(f"{tasks}/{tid}") for tid in os.listdir(tasks))
    except OSError:
        return False


def _waits(task: str) -> bool:
    try:
        with open(f"{task}/stat", "rb") as stat, open(f"{task}/wchan") as channel:
            return (
                stat.read().rpartition(b")")[2].split()[0] == b"D" and channel.read() in _CHANNELS
            )
    except OSError:  # it has ended
        return False
