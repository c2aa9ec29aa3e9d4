"""Notify the service manager: systemd's datagram protocol (sd_notify), without its library.

Nothing is sent without ``NOTIFY_SOCKET``, and a message that cannot be sent is dropped.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping


class ServiceManager:
    """The service manager that started us, if it wants notifications.

    `watchdog` pings it while all is well.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._path = environ.get("NOTIFY_SOCKET", "")
        self._interval = 0.0
        if environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            text = environ.get("WATCHDOG_USEC", "")
            self._interval = int(text) / 1e6 / 3 if text.isdigit() else 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, *lines: str) -> None:
        """Send assignments: ``READY=1``, ``STATUS=...``."""
        if not self._path:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        text = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sock:
                sock.sendto(text.encode(errors="backslashreplace"), address)
        except OSError:
            return

    def watchdog(self, well: Callable[[], bool]) -> None:
        """Start pinging, three times as often as needed, while `well` returns true."""
        if not self._path or not self._interval or self._thread is not None:
            return

        def ping() -> None:
            while not self._over.wait(self._interval):
                if well():
                    self.tell("WATCHDOG=1")

        thread = threading.Thread(target=ping, name="watchdog", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Stop pinging."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
