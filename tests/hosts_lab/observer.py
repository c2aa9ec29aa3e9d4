"""An observer that watches two hosts from outside, and the program that it watches.

A *teller* counts, and sends each number, with the name of the host that it finds itself on, in a
datagram to the observer, which listens on a third host. A second copy sends a number a second time;
so does one that went back to an older state; one that is lost sends nothing more. So the record of
the numbers is the proof: every one once, in order.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from support.keeper import Launched, wait_until

from .host import Host

PORT = 4000
SO_RCVBUFFORCE = 33  # the socket module has no name for it
SECONDS = 60.0
# The marker of the command line and a size of memory are its arguments; a datagram to its own port
# ends it.
PROGRAM = """
import os, socket, sys, time
name, address, mib = sys.argv[1], sys.argv[2], float(sys.argv[3])
heap = os.urandom(int(mib * (1 << 20)))
{more}
tell = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tell.bind(("0.0.0.0", 0))
number = 0
while True:
    number += 1
    tell.sendto(f"{{name}} {{number}} {{os.uname().nodename}}".encode(), (address, 4000))
    time.sleep(0.005)
"""


@dataclass
class Heard:
    """All that was heard of one teller."""

    numbers: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)  # for each number, the host that sent it


class Observer:
    """See the module's docstring; listens while inside."""

    def __init__(self, host: Host) -> None:
        self._socket = host.open_socket(socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
        self._socket.bind((host.address, PORT))
        self._address = host.address
        self._heard: dict[str, Heard] = {}
        self._lock = threading.Lock()
        self._counter = itertools.count(1)
        self._over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._over = True
        with suppress(OSError):
            # wakes the listener; a datagram socket says that it is not connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def launch(
        self, host: Host, *, mib: float = 0.5, more: str = "", prefix: tuple[str, ...] = ()
    ) -> Teller:
        """Start a teller on `host`, and wait until it is heard; `more` is Python that it runs
        first.
        """
        name = f"teller-{next(self._counter)}"
        code = PROGRAM.format(more=more)
        process = host.spawn(
            [*prefix, "/usr/bin/python3", "-I", "-S", "-c", code, name, self._address, str(mib)],
            cwd="/",
        )
        teller = Teller(self, name, host, process)
        teller.wait_heard(host)
        return teller

    def heard(self, name: str) -> Heard:
        """What was heard until now."""
        with self._lock:
            heard = self._heard.get(name, Heard())
            return Heard(list(heard.numbers), list(heard.hosts))

    def _listen(self) -> None:
        while not self._over:
            try:
                text = self._socket.recv(200).decode()
            except OSError:
                return
            if text:
                name, number, host = text.split()
                with self._lock:
                    heard = self._heard.setdefault(name, Heard())
                    heard.numbers.append(int(number))
                    heard.hosts.append(host)


class Teller:
    """One teller, wherever it is."""

    def __init__(self, observer: Observer, name: str, host: Host, process: Launched) -> None:
        self._observer = observer
        self.name = name
        self.pid = host.inner_pid(process.pid)  # as its first host calls it

    def wait_heard(self, host: Host, count: int = 3) -> None:
        """Wait until it has sent `count` more numbers, and those on `host`."""
        before = len(self._observer.heard(self.name).numbers)

        def is_heard() -> bool:
            return self._observer.heard(self.name).hosts[before:].count(host.name) >= count

        wait_until(
            is_heard,
            SECONDS,
            f"{self.name} is heard on {host.name}, not on "
            f"{self._observer.heard(self.name).hosts[-1:]}",
        )

    def living(self, *hosts: Host) -> list[str]:
        """The hosts that have a process of it, one that waits to be let go included."""
        return [host.name for host in hosts for _ in host.processes(f"{self.name} ")]

    def check(self) -> list[str]:
        """Check that every number came once and in order, and return the hosts that it has run on,
        in order.
        """
        heard = self._observer.heard(self.name)
        assert heard.numbers == list(range(1, len(heard.numbers) + 1)), self._odd(heard)
        return [name for name, _ in itertools.groupby(heard.hosts)]

    def _odd(self, heard: Heard) -> str:
        for index, number in enumerate(heard.numbers):
            if number != index + 1:
                near = list(zip(heard.numbers, heard.hosts, strict=True))[
                    max(0, index - 4) : index + 4
                ]
                return f"{self.name}: number {index + 1} should have come, but heard were {near}"
        return ""

    def end(self, *hosts: Host) -> None:
        """Kill what is left of it, and wait until it is gone."""
        for host in hosts:
            for pid in host.processes(f"{self.name} "):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.living(*hosts), SECONDS, f"{self.name} is gone")
