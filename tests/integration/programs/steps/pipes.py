"""Pipes and unix sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from . import Place, Step, kind, readable

SO_PASSSEC = 34
TYPES = [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET]
OPTIONS = {
    "rcvbuf": (socket.SO_RCVBUF, [4096, 50000, 400000]),
    "sndbuf": (socket.SO_SNDBUF, [8192, 50000, 400000]),
    "priority": (socket.SO_PRIORITY, [1, 6]),
    "mark": (socket.SO_MARK, [77]),
    "rcvlowat": (socket.SO_RCVLOWAT, [2, 9]),
    "keepalive": (socket.SO_KEEPALIVE, [1]),
    "passsec": (SO_PASSSEC, [1]),
}


def options(place: Place, one: socket.socket) -> list[str]:
    """Set some; the names of those."""
    chosen = [name for name in OPTIONS if place.random.random() < 0.25]
    for name in chosen:
        number, values = OPTIONS[name]
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, number, place.one(values))
    if place.random.random() < 0.3:
        one.setsockopt(
            socket.SOL_SOCKET,
            place.one([socket.SO_RCVTIMEO, socket.SO_SNDTIMEO]),
            struct.pack("ll", 3, 250000),
        )
    if place.random.random() < 0.3:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, place.one([0, 5])))
    return chosen


def option_values(one: socket.socket) -> dict[str, object]:
    """The options and their values as the kernel reports them."""
    found: dict[str, object] = {}
    for name, (number, _) in OPTIONS.items():
        with contextlib.suppress(OSError):
            found[name] = one.getsockopt(socket.SOL_SOCKET, number)
    for number in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO, socket.SO_LINGER):
        found[str(number)] = one.getsockopt(socket.SOL_SOCKET, number, 16).hex()
    return found


@kind
def pipe(place: Place) -> Step:
    """With something in it, of some size, perhaps with one end closed."""
    r, w = os.pipe2(os.O_NONBLOCK | place.some([os.O_CLOEXEC]))
    fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, place.one([65536, 1 << 19]))
    for _ in range(place.random.randrange(4)):
        os.write(w, place.bytes(900))
    closed = place.random.random() < 0.3
    if closed:
        os.close(w)
    yield
    while True:
        if not closed:
            os.write(w, b"mark")
        found = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(r, 5000):
                found.append(part.hex())
        yield [
            found,
            fcntl.fcntl(r, fcntl.F_GETPIPE_SZ) if not closed else 0,
            fcntl.fcntl(r, fcntl.F_GETFL),
        ]


@kind
def pair(place: Place) -> Step:
    """A pair of unix sockets with data both ways, perhaps shut down one way."""
    a, b = socket.socketpair(socket.AF_UNIX, place.one(TYPES))
    a.setblocking(False)
    b.setblocking(False)
    for one in (a, b):
        options(place, one)
        for _ in range(place.random.randrange(3)):
            one.send(place.bytes(500))
    if place.random.random() < 0.3:
        a.shutdown(place.one([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
    yield
    while True:
        found: list[object] = []
        for one, other in ((a, b), (b, a)):
            try:
                one.send(b"mark")
            except OSError as error:
                found.append(error.errno)
            with contextlib.suppress(BlockingIOError):
                while data := other.recv(1 << 16):
                    found += [data.hex()]
            found.append(option_values(one))
        yield found


@kind
def sent_descriptors(place: Place) -> Step:
    """Descriptors on their way through a socket: of files, pipes, events, and of a socket."""
    a, b = socket.socketpair(socket.AF_UNIX, place.one(TYPES))
    b.settimeout(10)
    count = place.random.randint(1, 3)
    for number in range(count):
        with open(place.path(f"sent-{number}"), "wb") as file:
            file.write(b"0123456789")
        fds = [os.open(place.path(f"sent-{number}"), os.O_RDWR)]
        os.lseek(fds[0], number, os.SEEK_SET)
        if place.random.random() < 0.5:
            fds += os.pipe()
            os.write(fds[2], b"in a sent pipe")
        if place.random.random() < 0.3:
            fds.append(os.eventfd(3))
        socket.send_fds(a, [b"%d" % number], fds)
        for fd in fds:
            os.close(fd)
    yield
    found: list[object] = []
    for _ in range(count):
        if not readable(b.fileno(), 0):
            found.append("taken by another")
            break
        data, fds, flags, _ = socket.recv_fds(b, 1, 9)
        found.append(
            [
                data.hex(),
                flags,
                os.read(fds[0], 4).hex(),
                [os.readlink(f"/proc/self/fd/{fd}")[:4] for fd in fds],
            ]
        )
        if len(fds) > 2:
            found.append(os.read(fds[1], 99).hex())
        for fd in fds:
            os.close(fd)
    yield found


@kind
def named_stream(place: Place) -> Step:
    """A listener with a name, connections to it: accepted or not, perhaps with its file removed."""
    path = (
        place.one([place.path("sock")[-90:], "\0" + place.label + place.folder])
        if len(place.folder) < 60
        else "\0" + place.label
    )
    listener = socket.socket(socket.AF_UNIX, place.one([socket.SOCK_STREAM, socket.SOCK_SEQPACKET]))
    listener.bind(path)
    listener.listen(place.random.randint(1, 9))
    listener.setblocking(False)
    clients, servers = [], []
    for _ in range(place.random.randrange(3)):
        client = socket.socket(socket.AF_UNIX, listener.type)
        client.connect(path)
        clients.append(client)
        servers.append(listener.accept()[0])
        client.send(place.bytes(90))
    if path[0] != "\0" and place.random.random() < 0.3:
        os.unlink(path)
    yield
    while True:
        found: list[object] = []
        for client, server in zip(clients, servers, strict=True):
            server.send(b"back")
            found += [
                server.recv(99).hex() if readable(server.fileno(), 0) else "",
                client.recv(9).hex(),
            ]
        client = socket.socket(socket.AF_UNIX, listener.type)
        try:
            client.connect(path)
            found.append(listener.accept()[0].send(b"x"))
        except OSError as error:
            found.append(error.errno)
        client.close()
        yield found


@kind
def waiting_stream(place: Place) -> Step:
    """Connections that were not accepted yet, nothing sent on them."""
    name = "\0waiting" + place.label + place.folder
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(5)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(name)
    yield
    client.send(b"hello")
    if readable(listener.fileno(), 0):
        server, _ = listener.accept()
        yield server.recv(9).hex()
        client.send(b"again")
        yield server.recv(9).hex()


@kind
def named_datagram(place: Place) -> Step:
    """Bound, connected, with datagrams of a nameless and a named sender."""
    name = "\0datagram" + place.label + place.folder
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.bind(name)
    one.setblocking(False)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if place.random.random() < 0.5:
        sender.bind(name + "sender")
    if place.random.random() < 0.5:
        sender.connect(name)
    for _ in range(place.random.randrange(4)):
        sender.sendto(place.bytes(200), name)
    yield
    while True:
        sender.sendto(b"mark", name)
        found: list[object] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = one.recv(999)
                found.append(data.hex())
        yield found


@kind
def unbound(place: Place) -> Step:
    """A fresh socket that nothing was done with but for its options."""
    one = socket.socket(socket.AF_UNIX, place.one(TYPES))
    options(place, one)
    one.setblocking(place.random.random() < 0.5)
    yield
    while True:
        yield [option_values(one), fcntl.fcntl(one, fcntl.F_GETFL)]


@kind
def socket_in_itself(place: Place) -> Step:
    """A socket with one end in its own peer's queue: a file server's descriptor passed on and not
    taken yet.
    """
    a, b = socket.socketpair()
    c, d = socket.socketpair()
    socket.send_fds(a, [b"x"], [c.fileno()])
    c.close()
    d.send(b"into what is on its way")
    yield
    if not readable(b.fileno(), 0):
        yield "taken by another"
        return
    _, fds, _, _ = socket.recv_fds(b, 1, 1)
    with socket.socket(fileno=fds[0]) as taken:
        yield taken.recv(99).hex()
