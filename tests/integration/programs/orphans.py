"""Orphans of a session and group that are alive, adopted by a subreaper root: one that lives, and
one that was not reaped.
"""

from __future__ import annotations

import ctypes
import os

from animal import Check, libc, serve, sleeper

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
pid_read, pid_write = os.pipe()


def orphan(*, ends: bool) -> None:
    """A grandchild whose parent has ended; it ends with 7, or sleeps."""
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            os.write(pid_write, b"%s %d\n" % (b"dead" if ends else b"living", os.getpid()))
            if not ends:
                sleeper()
            os._exit(7)
        os._exit(0)
    os.waitpid(middle, 0)
    os.write(pid_write, b"orphan %d\n" % middle)


leader = os.fork()
if leader == 0:
    os.setsid()
    orphan(ends=False)
    orphan(ends=True)
    sleeper()
lines = b""
while lines.count(b"\n") < 4:  # who they are, and that their parents have ended
    lines += os.read(pid_read, 64)
pids = {which: int(pid) for which, pid in (line.split() for line in lines.decode().splitlines())}
living, dead = pids["living"], pids["dead"]
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
dead_pending = True


def check(found: Check) -> None:
    global dead_pending
    with open(f"/proc/{living}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    found.equal("the living orphan's parent", parent, os.getpid())
    found.equal("its group and session", (os.getpgid(living), os.getsid(living)), (leader, leader))
    value = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    found.equal("subreaper", value.value, 1)
    if dead_pending:
        dead_pending = False
        found.equal("the dead orphan", os.waitstatus_to_exitcode(os.waitpid(dead, 0)[1]), 7)


serve(check)
