"""Unix sockets whose files were renamed after bind(2): listeners, a datagram socket, over a
symlink, with their folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from animal import Check, path, serve


def bound(
    kind: socket.SocketKind, name: str, then: str = "", how: Callable[[str, str], None] = os.rename
) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(path(name))
    if kind != socket.SOCK_DGRAM:
        sock.listen(8)
    if then:
        how(path(name), path(then))
    return sock


def moved(name: str, then: str) -> None:
    """As a rename, but for what is there already."""
    os.link(name, then)
    os.unlink(name)


for folder in ("real", "before"):
    os.mkdir(path(folder))
os.symlink("real", path("link"))
# as by a program that was started again while the old one lives on
replaced = bound(socket.SOCK_STREAM, "admin.0.tmp", "admin.sock")
listeners = {
    "admin.sock": bound(socket.SOCK_STREAM, "admin.1.tmp", "admin.sock"),
    "seq.sock": bound(socket.SOCK_SEQPACKET, "seq.tmp", "seq.sock"),
    "link/s": bound(socket.SOCK_STREAM, "link/s"),
    "real/t": bound(socket.SOCK_STREAM, "link/t.tmp", "real/t"),
    "after/s": bound(socket.SOCK_STREAM, "before/s"),
    "linked": bound(socket.SOCK_STREAM, "linked.tmp", "linked", moved),
    "s" * 40: bound(socket.SOCK_STREAM, "short", "s" * 40),
    "s": bound(socket.SOCK_STREAM, "l" * 40, "s"),
}
os.rename(path("before"), path("after"))
os.chmod(path("admin.sock"), 0o640)
datagram = bound(socket.SOCK_DGRAM, "log.tmp", "log")
for name in listeners:
    assert os.path.exists(path(name)), name
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.connect(path("log"))
sender.send(b"queued")


def connected(server: socket.socket, name: str) -> tuple[socket.socket, socket.socket]:
    client = socket.socket(server.family, server.type)
    client.connect(path(name))
    return client, server.accept()[0]


old_client, old_accepted = connected(listeners["admin.sock"], "admin.sock")
old_client.send(b"from before")
waiting = socket.socket(socket.AF_UNIX)
waiting.connect(path("real/t"))  # it is not accepted until the first check
left = True


def check(found: Check) -> None:
    global left
    if left:
        left = False
        found.equal("queued on a connection", old_accepted.recv(64), b"from before")
        found.equal("queued datagram", datagram.recv(64), b"queued")
        accepted, _ = listeners["real/t"].accept()
        waiting.send(b"accepted late")
        found.equal("a client that waited", accepted.recv(64), b"accepted late")
    sender.send(b"more")
    found.equal("connected datagrams", datagram.recv(64), b"more")
    for name, listener in listeners.items():
        client, accepted = connected(listener, name)
        client.send(name.encode())
        found.equal(f"a client of {name}", accepted.recv(64), name.encode())
    found.equal("mode", os.stat(path("admin.sock")).st_mode & 0o777, 0o640)
    # next to the original it is another one
    name = listeners["link/s"].getsockname().partition(".copy-")[0]
    found.equal("the name of one that was not renamed", name, path("link/s"))
    for name in (
        "admin.0.tmp",
        "admin.1.tmp",
        "seq.tmp",
        "real/t.tmp",
        "before",
        "short",
        "l" * 40,
        "log.tmp",
        "linked.tmp",
    ):
        found.true(f"there is no {name}", not os.path.lexists(path(name)))


serve(check)
