"""Two sessions of a group that exchange numbered messages all the time (programs/exchange.py)."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from .keeper import wait_until
from .operating import Operators
from .zoo import PROGRAMS

ROLES = ("serve", "connect")
CONNECTIONS = 4


class Exchange:
    """The sessions ``serve`` and ``connect`` of the group ``work``."""

    def __init__(self, operators: Operators) -> None:
        self.criuctl = operators
        self.folder = operators.home.path / "exchange"
        self.folder.mkdir()

    def start(self) -> None:
        """Start both, and wait until they exchange messages."""
        for role in ROLES:
            words = ("python3", str(PROGRAMS / "exchange.py"), role, str(self.folder))
            self.criuctl("run", "-d", "--name", role, "--group", "work", "--", *words)
        self.goes_on()

    def counts(self) -> list[int]:
        """How many messages each end of each connection has received."""
        found = []
        for role in ROLES:
            path = self.folder / f"counts-{role}"
            data = path.read_bytes() if path.exists() else b""
            data = data.ljust(16 * CONNECTIONS, b"\0")
            found += [struct.unpack_from("=QQ", data, 16 * n)[1] for n in range(CONNECTIONS)]
        return found

    def failed(self) -> str:
        """What a program has found wrong, "" for nothing."""
        path = self.folder / "failed"
        return path.read_text() if path.exists() else ""

    def goes_on(self) -> None:
        """Wait until each end of each connection has received more than a window full of messages;
        none was lost, doubled or damaged.
        """
        before = self.counts()

        def more() -> bool:
            assert not self.failed(), self.failed()
            return all(now >= was + 50 for now, was in zip(self.counts(), before, strict=True))

        wait_until(more, 60, "messages are exchanged over every connection")
        assert not self.failed(), self.failed()

    def kill(self) -> None:
        """End both; what the first one's end did to the second is no failure."""
        self.criuctl("kill", "--group", "work", "--timeout", "0")
        (self.folder / "failed").unlink(missing_ok=True)

    def end(self) -> None:
        """Clean up, whatever runs."""
        self.criuctl("kill", "--group", "work", "--timeout", "0", check=False)
        shutil.rmtree(self.folder)

    def states(self) -> dict[str, str]:
        """The state of each session."""
        return {body["session"]: body["state"] for body in self.criuctl("ls")}

    def listed(self) -> list[int]:
        """The numbers of the group's checkpoints."""
        answer = self.criuctl("list", "--group", "work", check=False)
        return [one["number"] for one in answer.get("list", [])]

    @property
    def path(self) -> Path:
        """The folder of both programs."""
        return self.folder
