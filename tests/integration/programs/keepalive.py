"""Clients without a session at the server: ``keepalive.py FOLDER HTTP_PORT CACHE_PORT``:
http.client, urllib3, memcached.
"""

from __future__ import annotations

import http.client
import socket
import sys

import urllib3
from animal import Check, serve

http_port, cache_port = int(sys.argv[2]), int(sys.argv[3])
plain = http.client.HTTPConnection("127.0.0.1", http_port)
pool = urllib3.HTTPConnectionPool("127.0.0.1", http_port, maxsize=1, retries=False)
cache = socket.create_connection(("127.0.0.1", cache_port))
lines = cache.makefile("rb")
count = 0


def check(found: Check) -> None:
    """One request each, over the connection that there has been from the beginning."""
    global count
    count += 1
    plain.request("GET", f"/plain/{count}")
    found.equal("http.client", plain.getresponse().read(), b"/plain/%d" % count)
    found.equal("urllib3", pool.request("GET", f"/pool/{count}").data, b"/pool/%d" % count)
    cache.sendall(b"set k 0 0 %d\r\n%d\r\nget k\r\n" % (len(str(count)), count))
    answer = [lines.readline() for _ in range(4)]
    found.equal(
        "memcached",
        answer,
        [b"STORED\r\n", b"VALUE k 0 %d\r\n" % len(str(count)), b"%d\r\n" % count, b"END\r\n"],
    )
    found.facts["connections"] = pool.num_connections


serve(check)
