"""A wire that takes its time: ``python delay.py SECONDS OUTER:INNER...`` holds each frame between
two links for so long.

The kernel's netem would do it, but not every kernel has it.  Frames pass through two packet sockets
with the header that says what the network card is to do with them (checksums, segments), so large
ones stay large and a Gbit/s passes.  It ends with its standard input.
"""

from __future__ import annotations

import collections
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
MAX_FRAME = 80_000


class Link:
    """One side of a wire, and what is on its way to it."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        self.socket.bind((name, ETH_P_ALL))
        self.socket.setblocking(False)
        self.coming: collections.deque[tuple[float, bytes]] = collections.deque()

    def deliver(self, now: float) -> None:
        """Send what is due; what the link does not take is lost, as on any wire."""
        while self.coming and self.coming[0][0] <= now:
            try:
                self.socket.send(self.coming.popleft()[1])
            except OSError:
                continue


def run(delay: float, pairs: list[tuple[str, str]]) -> None:
    """Until standard input ends."""
    other: dict[Link, Link] = {}
    for outer, inner in pairs:
        one, two = Link(outer), Link(inner)
        other |= {one: two, two: one}
    print("ready", flush=True)
    links = {link.socket.fileno(): link for link in other}
    given = sys.stdin.fileno()
    while True:
        due = min((link.coming[0][0] for link in other if link.coming), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([given, *links], [], [], wait)
        if given in ready:
            return
        now = time.monotonic()
        for number in ready:
            receive(links[number], other[links[number]], now + delay)
        for link in other:
            link.deliver(now)


def receive(source: Link, target: Link, due: float) -> None:
    """Take all that waits."""
    while True:
        try:
            target.coming.append((due, source.socket.recv(MAX_FRAME)))
        except BlockingIOError:
            return


if __name__ == "__main__":
    run(
        float(sys.argv[1]),
        [(outer, inner) for outer, _, inner in (word.partition(":") for word in sys.argv[2:])],
    )
