"""An epoll that is shared with children of lower PIDs; one of them does not have what its parent
watches, or has something else there.
"""

from __future__ import annotations

import os
import select
import signal
import socket

from animal import Check, fork_below, path, serve

listener = socket.create_server(("127.0.0.1", 0))
file_read, file_write = os.pipe()
edge_read, edge_write = os.pipe()
kept_read, kept_write = os.pipe()
poll = select.epoll()
again = os.dup(poll.fileno())
poll.register(listener, select.EPOLLIN)
poll.register(file_read, select.EPOLLIN)
poll.register(edge_read, select.EPOLLIN | select.EPOLLET)
poll.register(kept_read, select.EPOLLIN)

children = []
for keeps in (True, False):  # the last one has the lowest PID
    ready, tell = os.pipe()
    child = fork_below()
    if not child:
        if not keeps:
            listener.close()
            os.dup2(os.open(path("something else"), os.O_RDWR | os.O_CREAT), file_read)
            os.dup2(kept_write, edge_read)
        os.close(tell)
        while True:
            signal.pause()
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    children.append(child)


def check(found: Check) -> None:
    found.true("the children's PIDs are lower", max(children) < os.getpid())
    found.equal("quiet", poll.poll(0), [])
    with socket.create_connection(listener.getsockname()):
        found.equal("listener", poll.poll(1), [(listener.fileno(), select.EPOLLIN)])
        listener.accept()[0].close()
    for read, write in ((file_read, file_write), (kept_read, kept_write)):
        os.write(write, b"x")
        found.equal("a byte", select.epoll.fromfd(os.dup(again)).poll(1), [(read, select.EPOLLIN)])
        os.read(read, 1)
    os.write(edge_write, b"x")
    found.equal("edge", poll.poll(1), [(edge_read, select.EPOLLIN)])
    found.equal("edge, again", poll.poll(0), [])
    os.read(edge_read, 1)
    poll.modify(file_read, 0)
    os.write(file_write, b"x")
    found.equal("not watched", poll.poll(0), [])
    os.read(file_read, 1)
    poll.unregister(file_read)
    poll.register(file_read, select.EPOLLIN)


serve(check)
