"""Sockets that stay inside the tree: listeners of every kind, loopback TCP with queues, unix
sockets by path and name.
"""

from __future__ import annotations

import os
import socket

from animal import Check, path, pattern, serve

os.chdir(path("."))
data = pattern(200_000, 8)


def listener(
    family: socket.AddressFamily, address: tuple[str, int] | str, kind: int = socket.SOCK_STREAM
) -> socket.socket:
    sock = socket.socket(family, kind)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    if kind != socket.SOCK_DGRAM:
        sock.listen(17)
    return sock


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.socket(server.family, server.type)
    client.connect(server.getsockname())
    return client, server.accept()[0]


tcp4 = listener(socket.AF_INET, ("127.0.0.1", 0))
tcp6 = listener(socket.AF_INET6, ("::1", 0))
anywhere = listener(socket.AF_INET6, ("::", 0))
udp = listener(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM)
unix = listener(socket.AF_UNIX, "by-relative-path.sock")
absolute = listener(socket.AF_UNIX, path("stream.sock"))
abstract = listener(socket.AF_UNIX, f"\0zoo-{path('')}"[:90])
seqpacket = listener(socket.AF_UNIX, path("seq.sock"), socket.SOCK_SEQPACKET)
datagram = listener(socket.AF_UNIX, path("dgram.sock"), socket.SOCK_DGRAM)
ports = (tcp4.getsockname(), tcp6.getsockname(), udp.getsockname())

client, server = connected(tcp4)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
client.sendall(data)  # waits in the server's queue
server.sendall(b"to the client")
client6, server6 = connected(tcp6)
server6.sendall(b"six")
half_client, half_server = connected(tcp4)
half_client.sendall(b"that was all")
half_client.shutdown(socket.SHUT_WR)
closed_client, closed_server = connected(tcp4)
closed_server.sendall(b"bye")
closed_server.close()
FIN_WAIT2, CLOSE_WAIT = 5, 8
for sock, state in (
    (half_client, FIN_WAIT2),
    (half_server, CLOSE_WAIT),
    (closed_client, CLOSE_WAIT),
):
    while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != state:
        os.sched_yield()
listeners = {"path": absolute, "relative": unix, "abstract": abstract, "seq": seqpacket}
streams = {name: connected(sock) for name, sock in listeners.items()}
for one, other in streams.values():
    one.send(b"from client")
    other.send(b"from server")
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.connect(path("dgram.sock"))
sender.send(b"datagram 1")
sender.send(b"datagram 2")
udp_client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp_client.connect(udp.getsockname())
go_read, go_write = os.pipe()
child = os.fork()
if child == 0:  # holds the other ends too, and accepts for the parent on request
    while os.read(go_read, 1):
        accepted = tcp4.accept()[0]
        accepted.sendall(accepted.recv(64).upper())
        accepted.close()
    os._exit(0)
left = True


def receive(sock: socket.socket, size: int) -> bytes:
    sock.settimeout(30)
    parts = b""
    while len(parts) < size and (block := sock.recv(size - len(parts))):
        parts += block
    return parts


def check(found: Check) -> None:
    global left
    found.equal("addresses", (tcp4.getsockname(), tcp6.getsockname(), udp.getsockname()), ports)
    if left:
        left = False
        found.equal("queued TCP bytes", receive(server, len(data)), data)
        found.equal("queued TCP bytes, back", receive(client, 13), b"to the client")
        found.equal("queued TCP6 bytes", receive(client6, 3), b"six")
        found.equal("half-closed TCP", receive(half_server, 64), b"that was all")
        half_server.sendall(b"heard you")
        found.equal("half-closed TCP, back", receive(half_client, 9), b"heard you")
        found.equal("TCP whose peer closed", receive(closed_client, 64), b"bye")
        for name, (one, other) in streams.items():
            found.equal(
                f"unix {name}", (other.recv(64), one.recv(64)), (b"from client", b"from server")
            )
        found.equal(
            "datagrams", (datagram.recv(64), datagram.recv(64)), (b"datagram 1", b"datagram 2")
        )
    client.sendall(b"more")
    found.equal("TCP goes on", receive(server, 4), b"more")
    found.equal("TCP options", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), 1)
    udp_client.send(b"udp")
    udp.settimeout(30)
    found.equal("UDP goes on", udp.recv(64), b"udp")
    sender.send(b"again")
    found.equal("datagram goes on", datagram.recv(64), b"again")
    for name, listening in (
        ("tcp4", tcp4),
        ("tcp6", tcp6),
        ("anywhere", anywhere),
        ("path", absolute),
        ("abstract", abstract),
    ):
        if name == "tcp4":
            os.write(go_write, b"?")
            with socket.create_connection(tcp4.getsockname(), 30) as fresh:
                fresh.sendall(b"hello")
                found.equal("child accepts", receive(fresh, 5), b"HELLO")
            continue
        address = listening.getsockname()
        with socket.socket(listening.family, socket.SOCK_STREAM) as fresh:
            fresh.connect(("::1", address[1], 0, 0) if name == "anywhere" else address)
            accepted, _ = listening.accept()
            fresh.sendall(b"new")
            found.equal(f"{name} accepts", receive(accepted, 3), b"new")
            accepted.close()


serve(check)
