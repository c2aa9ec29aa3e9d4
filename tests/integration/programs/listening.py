"""A server of unix sockets: ``listening.py FOLDER KIND:NAME...``, kinds stream, seqpacket, dgram,
abstract and deleted.

Each client sends a word; a check tells which words have come where, and tries each
name as a client of its own.  When there is a file ``remove``, it removes its sockets' files first,
as servers do that end.
"""

from __future__ import annotations

import os
import socket
import sys

from animal import Check, path, serve

KINDS = {"seqpacket": socket.SOCK_SEQPACKET, "dgram": socket.SOCK_DGRAM}
sockets: dict[str, tuple[str, socket.socket]] = {}
for word in sys.argv[2:]:
    kind, _, name = word.partition(":")
    sock = socket.socket(socket.AF_UNIX, KINDS.get(kind, socket.SOCK_STREAM))
    sock.bind(f"\0{name}" if kind == "abstract" else name)
    if kind != "dgram":
        sock.listen(8)
    if kind == "deleted":
        os.unlink(name)
    elif kind != "abstract":
        os.chmod(name, 0o640)
    sock.setblocking(False)
    sockets[name] = (kind, sock)


def heard(sock: socket.socket) -> list[str]:
    """The words that have come since the last look."""
    words = []
    while True:
        try:
            if sock.type == socket.SOCK_DGRAM:
                words.append(sock.recv(64).decode())
                continue
            with sock.accept()[0] as accepted:
                accepted.settimeout(10)
                words.append(accepted.recv(64).decode())
        except BlockingIOError:
            return words


def check(found: Check) -> None:
    found.facts["heard"] = {name: heard(sock) for name, (_, sock) in sockets.items()}
    found.facts["names"] = {
        name: sock.getsockname() for name, (kind, sock) in sockets.items() if kind != "abstract"
    }
    if os.path.exists(path("remove")):
        found.facts["removed"] = []
        for name in sockets:
            try:
                os.unlink(name)
                found.facts["removed"].append(name)
            except OSError:
                pass
        return
    for name, (kind, sock) in sockets.items():
        if kind == "deleted":
            continue
        with socket.socket(socket.AF_UNIX, sock.type) as client:
            client.connect(f"\0{name}" if kind == "abstract" else name)
            client.send(b"own")
            found.equal(f"its own client of {name}", heard(sock), ["own"])


serve(check)
