"""What a migration costs: how long a tree stands still on its way to another host, and how long all
of it takes.

Two hosts of the lab, on a wire of 1 Gbit/s.  The tree rewrites a part of its memory all the time
and tells a third host that it lives, every other millisecond: the largest gap between two of its
messages is the downtime.  By hand: ``criu dump`` into memory,
``rsync`` over ssh, ``criu restore`` there.
"""

from __future__ import annotations

import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from hosts_lab.host import Host
from support.hosts import Hosts

from .errors import BenchFailed
from .interrupts import waiting
from .report import SUBJECT, Bound, Section

if TYPE_CHECKING:
    from .cases import Bench

BY_HAND, AT_ONCE = "by hand", "no pre-copy"
DOWNTIME = Bound(0.3, BY_HAND)
NOTICED = Bound(0.35)
RATE = "1gbit"

_PORT = 4100
_REWRITTEN = 0.05  # of its memory, each second
_BEFORE, _AFTER = 0.5, 0.5  # seconds that it is listened to before it leaves and when it has come
_PATIENCE = 300
# Half of its memory is random, half compresses; what is rewritten stays so.  The stretch moves
# through the memory, or pages are taken by chance.
_PAYLOAD = """
import mmap, os, random, socket, sys, time
size, part = int(sys.argv[1]), float(sys.argv[2])
address, scattered = (sys.argv[3], int(sys.argv[4])), sys.argv[5] == "True"
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, size, 1 << 20):
    memory[start : start + (1 << 20)] = os.urandom(1 << 19) + b"%016d" % start * (1 << 15)
tell = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
place, last, due = 0, time.monotonic(), 0.0
while True:
    tell.sendto(b"x", address)
    time.sleep(0.002)
    now = time.monotonic()
    due, last = due + min(now - last, 0.1) * part * size / 4096, now
    while due >= 1:
        memory[place : place + 4096] = os.urandom(2048) + b"%016d" % place * 128
        place = random.randrange(0, size, 4096) if scattered else (place + 4096) % size
        due -= 1
"""


def migrations(bench: Bench, size: int, *, scattered: bool) -> Iterator[Section]:
    """A tree of `size` bytes, by every way in turn."""
    where = ", all over" if scattered else ""
    section = Section(
        f"migration of {size >> 20} MiB that rewrites 5 % a second{where}, at {RATE}",
        {"case": "migrate", "size": size, "rate": RATE, "scattered": scattered},
    )
    for number in range(bench.runs):
        for way in (BY_HAND, AT_ONCE, SUBJECT):
            bench.say(f"migrate: {way}, round {number + 1} of {bench.runs}")
            down, total = _once(bench, size, way, scattered)
            section.row("stands still", "s", DOWNTIME).add(way, down)
            if way == SUBJECT:
                section.row("that of itself", "s", NOTICED).add(way, down)
            section.row("total").add(way, total)
    yield section


def _once(bench: Bench, size: int, way: str, scattered: bool) -> tuple[float, float]:
    hosts = Hosts()
    try:
        a, b, c = hosts.a, hosts.b, hosts.c
        hosts.slow(rate=RATE)
        with _Listener(c) as listener:
            words = [
                "python3",
                "-I",
                "-S",
                "-c",
                _PAYLOAD,
                str(size),
                str(_REWRITTEN),
                c.address,
                str(_PORT),
                str(scattered),
            ]
            pid = a.inner_pid(a.spawn(words, cwd="/").pid)
            listener.heard(60 + size / 50e6)
            with waiting():
                time.sleep(_BEFORE)
            listener.forget()
            began = time.monotonic()
            if way == BY_HAND:
                _by_hand(bench, a, b, pid)
            else:
                options = ["--no-pre-copy"] if way == AT_ONCE else []
                _run(
                    a,
                    [
                        "criuctl",
                        "migrate",
                        str(pid),
                        b.ssh_url,
                        "--name",
                        "bench",
                        "--json",
                        *options,
                    ],
                )
            total = time.monotonic() - began
            listener.heard(60)
            with waiting():
                time.sleep(_AFTER)
            return listener.gap, total
    finally:
        hosts.close()


def _by_hand(bench: Bench, a: Host, b: Host, pid: int) -> None:
    criu = shlex.join(bench.criu.argv)
    folder = "/dev/shm/images"
    restore = f"{criu} restore --no-default-config -d -D {folder} -o restore.log --shell-job"
    remote = shlex.quote(f"{restore} || tail {folder}/restore.log >&2")
    script = f"""
        set -e
        mkdir -p {folder}
        {criu} dump --no-default-config -t {pid} -D {folder} -o dump.log --shell-job ||
            {{ tail {folder}/dump.log >&2; exit 1; }}
        rsync --archive --whole-file --rsh ssh {folder} root@{b.address}:/dev/shm/
        ssh root@{b.address} {remote} </dev/null >/dev/null
    """
    _run(a, ["sh", "-c", script])


def _run(host: Host, argv: list[str]) -> None:
    command = host.start(argv)
    with waiting():
        code = command.process.wait(_PATIENCE)
    if code:
        raise BenchFailed(f"{argv[0]}: exit {code}: {command.output()[-2000:]}")


class _Listener:
    """Hears that the tree lives; `gap` is the longest silence in seconds."""

    def __init__(self, host: Host) -> None:
        self._socket = host.open_socket(socket.SOCK_DGRAM)
        self._socket.bind((host.address, _PORT))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._last = self._count = 0.0
        self.gap = 0.0

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def forget(self) -> None:
        """Listen again."""
        self.gap = 0.0

    def heard(self, seconds: float) -> None:
        """Wait until it is heard."""
        before, deadline = self._count, time.monotonic() + seconds
        while self._count == before:
            if time.monotonic() > deadline:
                raise BenchFailed("the tree is not heard")
            with waiting():
                time.sleep(0.01)

    def _listen(self) -> None:
        while True:
            try:
                heard = self._socket.recv(16)
            except OSError:
                return
            if not heard:
                return
            now = time.monotonic()
            if self._count:
                self.gap = max(self.gap, now - self._last)
            self._last = now
            self._count += 1
