"""What this machine hears of the tellers on the two others: the proof that a program never ran
twice and was never lost.
"""

from __future__ import annotations

import itertools
import socket
import threading
from dataclasses import dataclass, field

from .machine import VmError, wait_for

GUESTS_CALL_US = "10.0.2.2"  # QEMU's user network leads it to our own loopback
HEARD = 90.0  # seconds


@dataclass
class Heard:
    """All that was heard of one teller."""

    numbers: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)  # for each number, the host that sent it


class Observer:
    """Listens while inside."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.5)
        self.port = self._socket.getsockname()[1]
        self._heard: dict[str, Heard] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def heard(self, name: str) -> Heard:
        """What was heard until now."""
        with self._lock:
            heard = self._heard.get(name, Heard())
            return Heard(list(heard.numbers), list(heard.hosts))

    def forget(self, name: str) -> None:
        """Drop what it has sent until now."""
        with self._lock:
            self._heard.pop(name, None)

    def wait_heard(self, name: str, host: str, count: int = 5) -> None:
        """Wait until it has sent `count` more numbers, and those on `host`."""
        before = len(self.heard(name).numbers)
        wait_for(
            lambda: self.heard(name).hosts[before:].count(host) >= count,
            HEARD,
            f"{name} is heard on {host}",
        )

    def journey(self, name: str) -> list[str]:
        """Return the hosts that it has run on, in order; raise `VmError` unless every number came
        once, in order.
        """
        heard = self.heard(name)
        for index, number in enumerate(heard.numbers):
            if number != index + 1:
                near = list(zip(heard.numbers, heard.hosts, strict=True))[
                    max(0, index - 3) : index + 4
                ]
                raise VmError(f"{name}: number {index + 1} should have come, but heard were {near}")
        return [host for host, _ in itertools.groupby(heard.hosts)]

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                name, number, host = self._socket.recv(200).decode().split()
            except TimeoutError:
                continue
            with self._lock:
                heard = self._heard.setdefault(name, Heard())
                heard.numbers.append(int(number))
                heard.hosts.append(host)
