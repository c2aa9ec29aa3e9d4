"""Has a datagram in the making (UDP_CORK), which CRIU refuses, from one SIGUSR2 to the next:
``corked.py FOLDER [PORT]``.

That is the second child, and there is a file ``corked`` meanwhile.  CRIU saves before that a child
which may end, and the parent with what a dump takes besides: memory, a line that is half typed on a
terminal inside of the tree, and TCP connections, one of them to PORT.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from animal import Check, path, pattern, serve, sleeper

UDP_CORK = 1


def cork(_number: int, _frame: object) -> None:
    """From one state to the other."""
    global corked
    corked = not corked
    datagrams.setsockopt(socket.IPPROTO_UDP, UDP_CORK, corked)
    if corked:
        os.close(os.open(path("corked"), os.O_CREAT | os.O_WRONLY, 0o600))
    else:
        os.unlink(path("corked"))


corked = False
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    sleeper()
if os.fork() == 0:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    signal.signal(signal.SIGUSR2, cork)
    sleeper()

memory = pattern(3 << 20)
master, unnamed = os.openpty()
# its flags are the same after a restore
slave = os.open(os.ttyname(unnamed), os.O_RDWR | os.O_NOCTTY)
os.close(unnamed)
os.write(master, b"half a line")
listening = socket.create_server(("127.0.0.1", 0))
ends = [socket.create_connection(listening.getsockname()), listening.accept()[0]]
outside = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[2:]]


def check(found: Check) -> None:
    """The line is finished and read, and the next one begun; a word goes over the connection."""
    found.true("memory", memory == pattern(3 << 20))
    os.write(master, b" is whole\n")
    found.equal("line", os.read(slave, 64), b"half a line is whole\n")
    os.write(master, b"half a line")
    ends[0].sendall(b"word")
    found.equal("word", ends[1].recv(64), b"word")


serve(check)
