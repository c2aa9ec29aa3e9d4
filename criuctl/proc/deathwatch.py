"""End a tree when the criuctl that feeds it dies.

A separate program: ``python -I -S deathwatch.py FD``.

A lazily restored tree depends on criuctl until its last page has arrived. If criuctl is killed
before, the kernel would give the tree zeros for the missing pages, and it would go on with them.
This process reads FD, a socket of packets to criuctl: ``hold``, with a copy of a userfaultfd of the
tree, and ``PID START`` when the tree exists, with the PID and start time of its root; it answers
``watching``. ``done`` means that every page has arrived. The end without it means that criuctl is
gone, and then the processes of that moment are killed, and all their descendants.

It has the userfaultfds so that threads that need a page wait until they are killed.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

_ROUNDS = 5  # a tree that forks while it is killed is walked again


def _start_time(pid: int) -> int:
    """Return when it started; -1: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return -1
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
    """Return the next message that is not ``hold``; empty at the end, however it ended."""
    try:
        while True:
            # what is held stays open as long as this process is there
            data, _fds, _flags, _address = socket.recv_fds(channel, 64, 1)
            if data != b"hold\n":
                return data
    except OSError:
        return b""


def main() -> int:
    """Wait for ``done``; kill the tree if the stream ends without it."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = _receive(channel).split()
    if len(words) != 2:
        return 0  # there never was a tree
    root, start = map(int, words)
    # its children may outlive it
    watched = [(pid, _start_time(pid)) for pid in _tree(root)]
    if (root, start) not in watched:
        watched = []
    try:
        channel.sendall(b"watching\n")
    except OSError:
        pass  # criuctl is gone already
    if _receive(channel) == b"done\n":
        return 0
    for _ in range(_ROUNDS):
        # first stop all forking
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in reversed([one for identity in watched for one in _alive(*identity)]):
                try:
                    os.kill(pid, number)
                except OSError:
                    continue
    return 1


def _alive(pid: int, start: int) -> list[int]:
    """Return the process, if it is still the same one, and its descendants."""
    return _tree(pid) if _start_time(pid) == start else []


if __name__ == "__main__":
    sys.exit(main())
