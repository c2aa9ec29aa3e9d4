"""Ends a tree when the criuctl that feeds it dies: a program of its own, ``python -I -S deathwatch.py FD PID START``.

A lazily restored tree depends on criuctl until its last page has arrived.  If criuctl is killed before, the
kernel would give the tree zeros for what is missing, and it would go on with them.  This process waits on FD, a
socket to criuctl: ``done`` means that every page has arrived; the end of the stream without it means that
criuctl is gone, and then the process PID (which began at START) and all its descendants are killed.

It is started with a duplicate of the page server's socket, so that CRIU's daemon waits for an answer, and the
tree with it, rather than give up before the tree has ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

_ROUNDS = 5  # a tree that forks while it is killed is walked again


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        data = file.read()
    return int(data[data.rindex(b")") + 2 :].split()[19])


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children") as file:
                    found += [int(word) for word in file.read().split()]
        except OSError:
            continue  # it has ended
    return found


def main() -> int:
    """Wait for the word; kill without it."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    root, start = int(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel.sendall(b"watching\n")
    if channel.recv(16) == b"done\n":
        return 0
    for _ in range(_ROUNDS):
        try:
            if _start_time(root) != start:
                return 1
        except OSError:
            return 1
        for pid in _tree(root):
            try:
                os.kill(pid, signal.SIGSTOP)  # first nobody forks any more
            except OSError:
                continue
        for pid in reversed(_tree(root)):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
    return 1


if __name__ == "__main__":
    sys.exit(main())
