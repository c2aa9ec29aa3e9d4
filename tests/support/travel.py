"""Sessions that are dumped and restored while a user works in them: what is typed, what is seen,
and the way there and back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
import time
from pathlib import Path
from typing import Any

from criuctl.errors import TimedOut
from criuctl.session.client.session import Session

from .command import Criuctl
from .holding import TIMEOUT, Holders, printed
from .keeper import Keeper, Launched, wait_until

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "TERM": "xterm",
    "PS1": "$ ",
    "LANG": "C.UTF-8",
    "HISTFILE": "",
    "LESS": "",
    "VIMINIT": ":",
}


class Window:
    """A terminal that criuctl knows nothing of, as sshd or a terminal emulator would have it, and a
    program on it.
    """

    def __init__(
        self, keeper: Keeper, token: str, *argv: str, rows: int = 31, columns: int = 99
    ) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = ENVIRONMENT | {"CZOO_TOKEN": token, "HOME": "/"}
        words = ["setsid", "--ctty", *argv]
        self.process: Launched = keeper.spawn(
            words, env=env, new_session=False, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.seen = ""

    @property
    def pid(self) -> int:
        """The program's."""
        return self.process.pid

    @property
    def cooked(self) -> bool:
        """Whether the terminal reads lines and echoes."""
        flags: int = termios.tcgetattr(self.master)[3]
        return flags & (termios.ICANON | termios.ECHO) == termios.ICANON | termios.ECHO

    def type(self, text: str) -> None:
        """As on a keyboard; what was seen before does not count any more."""
        self.seen = ""
        os.write(self.master, text.encode())

    def expect(self, pattern: str, timeout: float = TIMEOUT) -> re.Match[str]:
        """Wait until the program has printed this."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select(
                [self.master], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"{pattern!r} did not come; seen: {self.seen!r}"
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def close(self) -> None:
        """Hang up."""
        os.close(self.master)


class Desk:
    """A user who works in a session under a holder."""

    def __init__(self, client: Session) -> None:
        self.client = client
        self.mark: int = client.status()["base"]

    def type(self, text: str) -> None:
        """As on a keyboard; what was seen before does not count any more."""
        self.mark = self.client.send(text)["offset"]

    def expect(self, pattern: str, timeout: float = TIMEOUT) -> re.Match[str]:
        """Wait until the session has printed this since the last that was expected or typed."""
        try:
            found = printed(self.client, pattern, since=self.mark, timeout=timeout)
        except TimedOut as error:
            raise AssertionError(
                f"{pattern!r} did not come; seen: {self.client.read(self.mark).data!r}"
            ) from error
        piece = self.client.read(self.mark)
        text = piece.data.decode(errors="replace")
        again = re.search(pattern, text)
        assert again is not None
        self.mark += len(text[: again.end()].encode())
        return found

    def cooked(self) -> None:
        """Wait until the terminal reads lines and echoes: a shell that has taken a command is still
        to give it back.
        """
        init = self.client.status()["pid"]
        first = Path(f"/proc/{init}/task/{init}/children").read_text().split()[0]
        terminal = os.open(f"/proc/{first}/fd/0", os.O_RDONLY | os.O_NOCTTY)
        wanted = termios.ICANON | termios.ECHO
        try:
            wait_until(
                lambda: termios.tcgetattr(terminal)[3] & wanted == wanted,
                TIMEOUT,
                "the terminal reads lines",
            )
        finally:
            os.close(terminal)

    def log(self) -> str:
        """All that was ever printed."""
        return self.client.read("start").data.decode(errors="replace")


class Travel:
    """Starts sessions, sends them to the store and brings them back."""

    def __init__(self, criuctl: Criuctl, holders: Holders) -> None:
        self.criuctl, self.holders = criuctl, holders
        self.names: set[str] = set()

    def start(self, *argv: str, name: str = "s", host_pids: bool = False) -> Desk:
        """A session as ``criuctl run`` starts it."""
        options = {"host_pids": host_pids, "run_dir": self.holders.config.run_dir, "umask": 0o022}
        env = ENVIRONMENT | {"CZOO_TOKEN": self.holders.token, "HOME": "/"}
        self.holders.start(
            *argv,
            name=name,
            env=env,
            spawner="criuctl.session.launch.spawn:spawn_session",
            options=options,
            rows=31,
            cols=99,
        )
        return Desk(self.holders.connect(name))

    def away(self, name: str = "s", *options: str) -> dict[str, Any]:
        """Dump it and end it here."""
        report: dict[str, Any] = self.criuctl("dump", name, *options)
        return report

    def back(self, ref: str = "s", *options: str) -> dict[str, Any]:
        """Restore it; the session is closed with the test."""
        report: dict[str, Any] = self.criuctl("restore", ref, *options)
        self.names.add(report["session"])
        # The tests take the numbers of terminals themselves, and copies share generators.
        usual = ("terminals inside the tree could not have their numbers", "random generators")
        others = [text for text in report["warnings"] if not any(part in text for part in usual)]
        assert others == []
        return report

    def desk(self, name: str) -> Desk:
        """Work in a session that a restore has brought."""
        return Desk(self.holders.connect(name))

    def close(self) -> None:
        """End what restores have brought."""
        for name in self.names:
            with contextlib.suppress(Exception):
                client = Session.connect(
                    name, config=self.holders.config, kind="human", role="admin"
                )
                client.kill(grace=0)
                client.request("shutdown", force=True)
                client.close()
