"""Runs on the machines: counts, sends each number to the machine outside, answers over TCP, and
remembers its memory.

    teller.py NAME ADDRESS PORT MIB [LISTEN]         listens on 7070, or there

Each number goes out in a datagram ``NAME NUMBER HOST``: a second copy sends a number twice, one
that is lost sends nothing more.  MIB of memory are filled at the start and summed up; the first
twentieth of it is then rewritten all the time.  A client that asks ``sum`` gets the answer whether
the rest is what it was; anything else is answered with the number.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import zlib

name, address, port, mib = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
own = int(sys.argv[5]) if len(sys.argv) > 5 else 7070
heap = bytearray(os.urandom(1 << 20) * mib)
for start in range(0, len(heap), 4096):  # no two pages are the same
    heap[start : start + 8] = start.to_bytes(8, "little")
hot = len(heap) // 20
cold = memoryview(heap)[hot:]
summed = zlib.crc32(cold)
number = 0


def serve(client: socket.socket) -> None:
    """Answer one client, line by line."""
    with client, client.makefile("rwb") as lines:
        for line in lines:
            good = line.strip() != b"sum" or zlib.crc32(cold) == summed
            lines.write(b"%d\n" % number if good else b"damaged\n")
            lines.flush()


def listen() -> None:
    """Take clients for ever."""
    with socket.create_server(("0.0.0.0", own)) as listener:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=serve, args=(client,), daemon=True).start()


threading.Thread(target=listen, daemon=True).start()
tell = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    number += 1
    tell.sendto(f"{name} {number} {os.uname().nodename}".encode(), (address, port))
    place = number % (hot // 4096) * 4096
    heap[place : place + 4096] = os.urandom(4096)
    time.sleep(0.02)
