"""Unmodified redis-py: ``cache.py FOLDER quiet|busy PORT SOCKET_PATH``, numbers pushed on lists,
one list for each connection.

``quiet``: one push on each connection when asked.  ``busy``: threads push for ever.  A number
counts as acknowledged when the push was answered; after a lost connection the last number is looked
for before it is pushed again.  REDIS_SECRET is the password of the user ``app``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

import redis
import redis.asyncio
from animal import Check, path, serve
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

mode, port, unix = sys.argv[2], int(sys.argv[3]), sys.argv[4]
PASSWORD = os.environ["REDIS_SECRET"]
THINKS, MOST = 0.02, 0.2  # seconds


def client(**options: Any) -> Any:
    """A client that does not try again by itself: whether a push was done is for us to find out."""
    return redis.Redis(
        host="127.0.0.1", port=port, retry=Retry(NoBackoff(), 0), decode_responses=True, **options
    )


class Writer:
    """Pushes 1, 2, 3, ... on one list, over one client."""

    def __init__(self, name: str, made: Any) -> None:
        self.name, self.client = name, made
        self.last = 0
        self.lost = 0  # connections
        self.log = open(path(f"acknowledged-{name}"), "a")  # noqa: SIM115  # as long as we live

    def push(self) -> None:
        """One number, once."""
        number = self.last + 1
        while True:
            try:
                self.client.rpush(self.name, number)
                break
            except redis.ConnectionError:
                self.lost += 1
                if self.client.lindex(self.name, -1) == str(number):
                    break
        self.last = number
        self.log.write(f"{number}\n")
        self.log.flush()

    def forever(self) -> None:
        """Under load; the first thing that goes wrong is reported and ends it.

        It thinks for longer than a push takes, however slow the machine is: most connections are
        idle at any moment.
        """
        while True:
            began = time.monotonic()
            self.push()
            time.sleep(min(max(THINKS, 4 * (time.monotonic() - began)), MOST))


class Waits:
    """redis.asyncio, whose one connection hangs on an event loop's epoll, called as the others
    are.
    """

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = redis.asyncio.Redis(
            retry=AsyncRetry(NoBackoff(), 0), decode_responses=True, **options
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *words: asyncio.run_coroutine_threadsafe(
            self._call(name, *words), self.loop
        ).result()

    async def _call(self, name: str, *words: Any) -> Any:
        return await getattr(self.client, name)(*words)


pool = redis.ConnectionPool(
    host="127.0.0.1",
    port=port,
    protocol=2,
    db=2,
    retry=Retry(NoBackoff(), 0),
    decode_responses=True,
    client_name="pool",
)
writers = [
    Writer("single", client(protocol=2, db=1, client_name="single")),
    Writer("resp3", client(protocol=3, db=0, username="app", password=PASSWORD)),
    Writer(
        "unix",
        redis.Redis(
            unix_socket_path=unix, protocol=3, retry=Retry(NoBackoff(), 0), decode_responses=True
        ),
    ),
    Writer("epoll", Waits(port=port, protocol=3, client_name="epoll")),
    *(Writer(f"pool{n}", redis.Redis(connection_pool=pool)) for n in range(2)),
]
# Both connections of the pool exist from the beginning.
held = [pool.get_connection() for _ in range(2)]
for each in held:
    pool.release(each)
orders, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    child = Writer("child", client(protocol=2, client_name="child"))
    if mode == "busy":
        child.forever()
    while os.read(orders[0], 1):
        child.push()
        os.write(answers[1], bytes([child.last, child.lost]))

for writer in writers:
    writer.push()
if mode == "busy":
    for writer in writers:
        threading.Thread(target=writer.forever, daemon=True).start()


def check(found: Check) -> None:
    """Push once on every connection, if quiet; how far each has come, and how many connections were
    lost.
    """
    if mode == "quiet":
        for writer in writers:
            writer.push()
        os.write(orders[1], b"x")
        done, lost = os.read(answers[0], 2)
        found.facts |= {"child": done, "child_lost": lost}
        found.facts["infos"] = {w.name: w.client.client_info() for w in writers}
    found.facts |= {
        "last": {w.name: w.last for w in writers},
        "lost": {w.name: w.lost for w in writers},
    }


serve(check)
