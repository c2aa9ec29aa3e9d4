"""Sessions under a holder, for tests: real holders, real terminals, plain programs in them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from criuctl.config import Config
from criuctl.errors import CriuctlError
from criuctl.proc.tree import ProcessIdentity, wait_ended
from criuctl.session.client.session import Session
from criuctl.session.launch.daemon import HolderSpec, Started, start_holder
from criuctl.session.sessions import state_of

from .command import Home
from .keeper import wait_until

TIMEOUT = 60.0  # for whatever takes milliseconds when nothing else runs


class Holders:
    """Starts holders in the folders of one test, and ends what is left of them."""

    def __init__(self, home: Home) -> None:
        self.config = Config(run_dir=str(home.run), state_dir=str(home.path / "state"))
        self.token = home.token
        self.started: list[Started] = []
        self.clients: list[Session] = []

    def start(self, *argv: str, name: str = "s", **options: Any) -> Started:
        """A session that runs `argv` on a plain terminal."""
        environment = {
            "PATH": os.environ["PATH"],
            "TERM": "xterm",
            "PS1": "$ ",
            "HOME": "/",
            "TOKEN": self.token,
        }
        spec = replace(HolderSpec(name=name, argv=argv, env=environment), **options)
        started = start_holder(self.config, spec, timeout=TIMEOUT)
        self.started.append(started)
        return started

    def connect(self, name: str = "s", **options: Any) -> Session:
        """A client, closed with the test; an admin unless `role` says otherwise."""
        client = Session.connect(
            name,
            config=self.config,
            **{
                "kind": "human",
                "role": "admin",
                "operator": "tester",
                "timeout": TIMEOUT,
                **options,
            },
        )
        self.clients.append(client)
        return client

    def state(self, name: str = "s") -> dict[str, Any]:
        """The state file."""
        state = state_of(self.config, name)
        assert state is not None
        return state

    def gone(self, started: Started) -> None:
        """Wait until the holder has ended."""
        wait_until(
            lambda: not self.state(started.name)["holder_alive"],
            TIMEOUT,
            f"the holder of {started.name} ended",
        )

    def close(self) -> None:
        """End every session and holder."""
        for client in self.clients:
            client.close()
        for started in self.started:
            with contextlib.suppress(CriuctlError):
                client = Session.connect(
                    started.name, config=self.config, kind="human", role="admin"
                )
                client.kill(grace=0)
                client.request("shutdown", force=True)
                client.close()
            state = state_of(self.config, started.name)
            if (
                state is not None
                and state["holder"]
                and wait_ended([ProcessIdentity(**state["holder"])], TIMEOUT)
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state["holder"]["pid"], signal.SIGKILL)


def numbers(count: int) -> tuple[str, ...]:
    """A command that prints so many numbered lines of eight bytes, raw, and then waits for a
    line.
    """
    program = f"""
import os, sys, tty
tty.setraw(0)
block = [b"%07d\\n" % n for n in range({count})]
data = b"".join(block)
while data: data = data[os.write(1, data):]
os.read(0, 1)
"""
    return ("python3", "-I", "-S", "-c", program)


def expected(count: int) -> bytes:
    """What `numbers` prints."""
    return b"".join(b"%07d\n" % n for n in range(count))


def printed(
    client: Session, pattern: str, *, since: int | str = "start", timeout: float = TIMEOUT
) -> re.Match[str]:
    """Wait until this is in the very bytes of the output, echoes and control sequences included."""
    deadline = time.monotonic() + timeout
    while True:
        piece = client.read(since)
        if match := re.search(pattern, piece.data.decode(errors="replace")):
            return match
        client.wait_output(piece.end, max(0.0, deadline - time.monotonic()))


def until(client: Session, condition: Callable[[bytes], bool]) -> tuple[int, bytes]:
    """Attached output until `condition` holds for it: the first offset, and the bytes without a
    hole.
    """
    collected, start = b"", -1
    while not condition(collected):
        message = client.receive(TIMEOUT)
        assert message is not None, f"no more output after {collected[-200:]!r}"
        if hasattr(message, "data") and hasattr(message, "offset"):
            start = message.offset if start < 0 else start
            assert message.offset == start + len(collected)
            collected += message.data
    return start, collected
