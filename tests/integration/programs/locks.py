"""Every kind of file lock: flock (shared, exclusive), fcntl ranges, open-file-description locks,
each still held afterwards.
"""

from __future__ import annotations

import fcntl
import os
import struct

from animal import Check, path, serve

F_OFD_GETLK, F_OFD_SETLK = 36, 37


def new(name: str) -> int:
    fd = os.open(path(name), os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 1000)
    return fd


def flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


exclusive, shared, ranges, description, childs = (
    new(name) for name in ("exclusive", "shared", "ranges", "description", "childs")
)
fcntl.flock(exclusive, fcntl.LOCK_EX)
fcntl.flock(shared, fcntl.LOCK_SH)
fcntl.lockf(ranges, fcntl.LOCK_EX, 100, 0)
fcntl.lockf(ranges, fcntl.LOCK_SH, 50, 500)
fcntl.fcntl(description, F_OFD_SETLK, flock(fcntl.F_WRLCK, 10, 20))
inherited = os.dup(exclusive)
go_read, go_write = os.pipe()
locked_read, locked_write = os.pipe()
# shares the flock's open file description, and has locked what its parent has opened
if os.fork() == 0:
    fcntl.lockf(childs, fcntl.LOCK_EX, 20, 7)
    fcntl.lockf(childs, fcntl.LOCK_SH, 0, 500)
    os.write(locked_write, b"x")
    os.read(go_read, 1)
    os._exit(0)


os.read(locked_read, 1)


def refused(action: str) -> bool:
    """Whether a stranger to these descriptors is refused the lock."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            if action == "exclusive":
                fcntl.flock(os.open(path("exclusive"), os.O_RDWR), fcntl.LOCK_SH | fcntl.LOCK_NB)
            elif action == "shared":
                fcntl.flock(os.open(path("shared"), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif action == "range":
                fcntl.lockf(
                    os.open(path("ranges"), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99
                )
            elif action == "child's":
                fcntl.lockf(
                    os.open(path("childs"), os.O_RDWR), fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 26
                )
            elif action == "child's, to the end":
                fcntl.lockf(
                    os.open(path("childs"), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 << 40
                )
            elif action == "read range":
                fcntl.lockf(
                    os.open(path("ranges"), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 549
                )
            else:
                fcntl.fcntl(
                    os.open(path("description"), os.O_RDWR),
                    F_OFD_SETLK,
                    flock(fcntl.F_RDLCK, 29, 1),
                )
        except OSError:
            code = 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def check(found: Check) -> None:
    for action in (
        "exclusive",
        "shared",
        "range",
        "read range",
        "description",
        "child's",
        "child's, to the end",
    ):
        found.true(f"{action} lock is held", refused(action))
    pid = os.fork()
    if pid == 0:  # what is outside the ranges is free
        try:
            fcntl.lockf(os.open(path("ranges"), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 100)
            fcntl.lockf(os.open(path("ranges"), os.O_RDWR), fcntl.LOCK_SH | fcntl.LOCK_NB, 50, 500)
        except OSError:
            os._exit(1)
        os._exit(0)
    found.equal("free ranges", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
    found.equal("duplicate", os.path.sameopenfile(inherited, exclusive), True)


serve(check)
