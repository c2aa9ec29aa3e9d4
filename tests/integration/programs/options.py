"""Socket options that CRIU does not save: of a listener, of a connection inside, of datagram
sockets; multicast groups.
"""

from __future__ import annotations

import socket
import struct

from animal import Check, serve

UDP, V6 = socket.IPPROTO_UDP, socket.IPPROTO_IPV6
SO_TIMESTAMPNS, IP_RECVTTL, UDP_GRO, IP_ADD_SOURCE_MEMBERSHIP = 35, 12, 104, 39
IP_RECVERR, IP_MINTTL, IPV6_RECVERR, IPV6_DONTFRAG, TCP_INQ = 11, 21, 25, 62, 36
HOME = socket.inet_aton("127.0.0.1")

listener = socket.create_server(("127.0.0.1", 0))
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 16)
client = socket.create_connection(listener.getsockname())
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
client.setsockopt(socket.IPPROTO_TCP, TCP_INQ, 1)
client.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 3)
server, _ = listener.accept()
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 7)

receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("", 0))
receiver.settimeout(10)
receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
receiver.setsockopt(
    socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.9.8.7") + HOME
)
only_from = socket.inet_aton("239.9.8.6") + HOME + socket.inet_aton("10.9.8.7")
receiver.setsockopt(socket.IPPROTO_IP, IP_ADD_SOURCE_MEMBERSHIP, only_from)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.bind(("127.0.0.1", 0))
sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, HOME)
sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 5)
sender.setsockopt(UDP, UDP_GRO, 1)
sender.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)

newer = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) if socket.has_dualstack_ipv6() else None
if newer is not None:
    newer.bind(("::", 0))
    newer.setsockopt(V6, socket.IPV6_RECVPKTINFO, 1)
    newer.setsockopt(V6, IPV6_RECVERR, 1)
    newer.setsockopt(V6, IPV6_DONTFRAG, 1)
    newer.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)  # for what comes by IPv4
    newer.setsockopt(V6, socket.IPV6_MULTICAST_IF, socket.if_nametoindex("lo"))
    newer.setsockopt(
        V6,
        socket.IPV6_JOIN_GROUP,
        socket.inet_pton(socket.AF_INET6, "ff01::987") + struct.pack("@I", 1),
    )


def check(found: Check) -> None:
    tcp, ip = socket.IPPROTO_TCP, socket.IPPROTO_IP
    found.equal("TCP_FASTOPEN", listener.getsockopt(tcp, socket.TCP_FASTOPEN), 16)
    found.equal("TCP_DEFER_ACCEPT", listener.getsockopt(tcp, socket.TCP_DEFER_ACCEPT), 7)
    found.equal("TCP_USER_TIMEOUT", client.getsockopt(tcp, socket.TCP_USER_TIMEOUT), 9000)
    found.equal(
        "TCP_CONGESTION", client.getsockopt(tcp, socket.TCP_CONGESTION, 16).split(b"\0")[0], b"reno"
    )
    found.equal("SO_TIMESTAMPNS", receiver.getsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS), 1)
    found.equal("IP_MULTICAST_IF", sender.getsockopt(ip, socket.IP_MULTICAST_IF, 4), HOME)
    found.equal("IP_MULTICAST_TTL", sender.getsockopt(ip, socket.IP_MULTICAST_TTL), 5)
    found.equal("UDP_GRO", sender.getsockopt(UDP, UDP_GRO), 1)
    found.equal("IP_RECVERR", sender.getsockopt(ip, IP_RECVERR), 1)
    found.equal("TCP_INQ", client.getsockopt(tcp, TCP_INQ), 1)
    found.equal("IP_MINTTL", client.getsockopt(ip, IP_MINTTL), 3)
    port = receiver.getsockname()[1]
    for text, group in ((b"unwanted", "239.9.8.6"), (b"wanted", "239.9.8.7")):
        sender.sendto(text, (group, port))
    found.equal("what came to the group", receiver.recv(99), b"wanted")
    if newer is not None:
        found.equal("IPV6_RECVPKTINFO", newer.getsockopt(V6, socket.IPV6_RECVPKTINFO), 1)
        found.equal("IPV6_RECVERR", newer.getsockopt(V6, IPV6_RECVERR), 1)
        found.equal("IPV6_DONTFRAG", newer.getsockopt(V6, IPV6_DONTFRAG), 1)
        found.equal("IP_RECVERR of IPv6", newer.getsockopt(ip, IP_RECVERR), 1)
        # this process is the only one of the group
        with open("/proc/self/net/igmp6", encoding="ascii") as file:
            found.true(
                "it is in the newer group", "ff010000000000000000000000000987" in file.read()
            )


serve(check)
