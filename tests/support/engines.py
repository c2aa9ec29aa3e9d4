"""Workers of workflow engines, which are killed, and the command that they run as a session."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from criuctl import Session
from criuctl.sdk import SessionInfo

from .command import PROJECT, Command
from .keeper import wait_until
from .operating import TIMEOUT, Operators

EXAMPLES = PROJECT / "hooks" / "examples" / "adapters"
PROGRAM = """#!/bin/sh
trap 'echo term >> ended' TERM
echo begun >> begun
echo working
while [ ! -e go ]; do
    [ ! -e ended ] || [ -e hold ] || exit 9
    sleep 0.05
done
exit 3
"""


class Job:
    """A command that ends with exit code 3 when `finish` is called, and soon after SIGTERM unless
    there is the file "hold".
    """

    def __init__(self, operators: Operators) -> None:
        self.operators, self.folder = operators, operators.home.path
        self.program = self.folder / "job"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)
        self._workers: list[Command] = []

    def worker(
        self,
        *arguments: str | Path,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> Command:
        """Start a worker: a Python program in a process group of its own."""
        number = len(self._workers)
        out, err = (self.folder / f"worker-{number}.{kind}" for kind in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = self.operators.keeper.spawn(
                [python, *map(str, arguments)],
                env=self.operators.environment() | dict(env or {}),
                cwd=self.folder,
                stdout=stdout,
                stderr=stderr,
            )
        self._workers.append(Command(process, out, err))
        return self._workers[-1]

    def kill(self, worker: Command, number: int = signal.SIGKILL) -> None:
        """Kill a worker with all of its processes, and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, number)
        worker.process.wait(TIMEOUT)

    def running(self) -> SessionInfo:
        """The session, when its program runs."""
        wait_until((self.folder / "begun").exists, TIMEOUT, "the command has begun")
        found = wait_until(
            lambda: [one for one in Session.list() if one.state == "running"],
            TIMEOUT,
            "the session runs",
        )
        assert len(found) == 1
        return SessionInfo.of(found[0].facts)

    def attached(self, session: SessionInfo) -> None:
        """Wait until a worker is attached to the session."""

        def one() -> bool:
            with Session.connect(session.name, kind="human", role="observe") as connected:
                operators = connected.status().facts["operators"]
            return any(operator["kind"] == "service" for operator in operators)

        wait_until(one, TIMEOUT, "a worker is attached")

    def finish(self) -> None:
        """Let the command end."""
        (self.folder / "go").touch()

    def check_same(self, session: SessionInfo) -> None:
        """The session runs as it did: the same process, which was started once."""
        [found] = [one for one in Session.list() if one.id == session.id]
        assert (found.id, found.pid, found.incarnation) == (session.id, session.pid, 1)
        assert self.times("begun") == 1

    def times(self, event: str) -> int:
        """How often the program has begun, or got SIGTERM ("ended")."""
        file = self.folder / event
        return len(file.read_text().splitlines()) if file.exists() else 0

    def check_ended(self, session: SessionInfo) -> None:
        """Wait until the session was ended: its program got one SIGTERM, and nothing is left."""
        wait_until(
            lambda: session.id not in [one.id for one in Session.list()],
            TIMEOUT,
            "the session is ended and forgotten",
        )
        assert not Path(f"/proc/{session.pid}").exists()
        assert (self.times("begun"), self.times("ended")) == (1, 1)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            self.kill(worker)
