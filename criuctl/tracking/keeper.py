"""Keep the userfaultfds of one tree from a snapshot to the next one.

A separate program: ``python -I -S keeper.py LISTENER RECORD SECONDS PATH UFFD:PIDFD...``

The tracking of a process lives as long as a descriptor of its userfaultfd, so that of a snapshot is
left with this program. RECORD is a file with a JSON object, whose ``tasks`` are in the order of the
descriptors; the program does not know more of it. The next snapshot connects to PATH, a socket that
only its owner can reach, and sends one byte:

- ``?``: the answer is the length of the record (8 bytes, little-endian) and the record.
- ``t``: the same without the tasks that have ended, then the descriptors of the others, up to 200
  with each further byte. This program ends then.

It also ends when all processes have ended, and after SECONDS. However it ends, also by SIGKILL, the
kernel forgets the tracking, and nothing is left in the processes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time

_BATCH = 200
_PATIENCE = 5.0  # seconds for a client to say what it wants


def _credible(connection: socket.socket) -> bool:
    """Return whether our own user has connected."""
    size = struct.calcsize("=3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("=3i", peer)[1] == os.geteuid())


def _answer(
    connection: socket.socket,
    record: dict[str, object],
    living: list[tuple[object, int]],
    path: str,
) -> bool:
    """Answer one client; return whether it has taken everything."""
    connection.settimeout(_PATIENCE)
    request = connection.recv(1)
    if request not in (b"?", b"t"):
        return False
    data = json.dumps({**record, "tasks": [task for task, _fd in living]}).encode()
    if request == b"t":
        os.unlink(path)  # its place is free for the next one
    connection.sendall(struct.pack("<Q", len(data)) + data)
    if request == b"?":
        return False
    fds = [fd for _task, fd in living]
    for at in range(0, len(fds), _BATCH):
        socket.send_fds(connection, [b"+"], fds[at : at + _BATCH])
    return True


def main() -> int:
    """Keep them until they are taken."""
    listener, record_fd, seconds, path = sys.argv[1:5]
    if os.fork():  # the parent need not wait for us
        return 0
    os.setsid()
    os.chdir("/")
    for signal_number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_IGN)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    with open(int(record_fd), "rb") as file:
        record = json.load(file)
    pairs = [tuple(map(int, word.split(":"))) for word in sys.argv[5:]]
    tasks = {
        pidfd: (task, uffd) for task, (uffd, pidfd) in zip(record["tasks"], pairs, strict=True)
    }
    server = socket.socket(fileno=int(listener))
    poll = select.poll()
    for fd in (server.fileno(), *tasks):
        poll.register(fd, select.POLLIN)
    until = time.monotonic() + float(seconds)
    taken = False
    while tasks and not taken and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            if fd in tasks:  # that process has ended
                poll.unregister(fd)
                os.close(tasks.pop(fd)[1])
                os.close(fd)
            elif fd == server.fileno() and not taken:
                try:
                    with server.accept()[0] as connection:
                        if _credible(connection):
                            taken = _answer(connection, record, list(tasks.values()), path)
                except OSError:
                    taken = not os.path.exists(path)  # it could not be given back
    if not taken:
        try:
            os.unlink(path)
        except OSError:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
