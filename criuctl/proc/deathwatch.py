"""End a tree when the criuctl that feeds it dies.

A separate program: ``python -I -S deathwatch.py FD``.

A lazily restored tree depends on criuctl until its last page has arrived. If criuctl is killed
before, the kernel would give the tree zeros for the missing pages, and it would go on with them.
This process reads FD, a socket to criuctl: ``PID START`` when the tree exists, with the PID and
start time of its root; it answers ``watching``. ``done`` means that every page has arrived. The end
of the stream without it means that criuctl is gone, and then that process and all its descendants
are killed.

It is started with a duplicate of the page server's socket, so that CRIU's daemon waits for an
answer, and the tree with it, rather than give up before the tree has ended.
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


def _receive(channel: socket.socket) -> bytes:
    """Return the next message; empty at the end of the stream, however it ended."""
    try:
        return channel.recv(64)
    except OSError:
        return b""


def main() -> int:
    """Wait for ``done``; kill the tree if the stream ends without it."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = _receive(channel).split()
    if len(words) != 2:
        return 0  # there never was a tree
    root, start = map(int, words)
    try:
        channel.sendall(b"watching\n")
    except OSError:
        pass  # criuctl is gone already
    if _receive(channel) == b"done\n":
        return 0
    for _ in range(_ROUNDS):
        try:
            if _start_time(root) != start:
                return 1
        except OSError:
            return 1
        for pid in _tree(root):
            try:
                os.kill(pid, signal.SIGSTOP)  # first stop all forking
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
