"""A test program under criuctl or by itself, seen through the record that it keeps
(`programs/steplog.py`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commands import Failed, Home

FOLDER = Path(__file__).with_name("programs")
PAUSE = 0.05
TWIN_LIMIT = 4000  # steps that a twin takes ahead; a case that takes more has only those compared


@dataclass(frozen=True)
class Program:
    """A program and its arguments after the folder; `children` are subfolders with a record
    each.
    """

    name: str
    arguments: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def argv(self, home: Home, folder: Path) -> list[str]:
        """What to start."""
        return [home.place.python, str(FOLDER / self.name), str(folder), *self.arguments]

    def records(self, folder: Path) -> list[Path]:
        """The folders with a record each."""
        return [folder / name for name in self.children] if self.children else [folder]


def lines(folder: Path) -> list[Any]:
    """The whole lines of a record."""
    try:
        text = (folder / "steps").read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def facts(folder: Path) -> dict[str, Any]:
    """What the program noted."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / "facts").read_text()))
    return {}


class Session:
    """The program as a session of criuctl."""

    def __init__(self, home: Home, program: Program, name: str, *, host_pids: bool) -> None:
        self.home, self.program, self.name = home, program, name
        self.folder = home.path / "program"
        self.folder.mkdir(parents=True, exist_ok=True)
        pids = ["--host-pids"] if host_pids else []
        argv = program.argv(home, self.folder)
        self.log = self.folder / "output"
        # A shell of its own keeps what the program prints: the terminal of the session is not read
        # by anything.
        script = ["sh", "-c", f'exec "$@" >{self.log} 2>&1', "sh", *argv]
        home.must("run", "-d", "--name", name, *pids, "--", *script, env=dict(program.environment))

    def steps(self) -> int:
        """Steps done, by the slowest."""
        return min(len(lines(folder)) for folder in self.program.records(self.folder))

    def go_on(self, more: int, timeout: float = 30) -> None:
        """Wait until every record has `more` new lines."""
        before = {folder: len(lines(folder)) for folder in self.program.records(self.folder)}
        wait = Wait(self, timeout, "the program does not go on")
        while any(len(lines(folder)) < count + more for folder, count in before.items()):
            wait.pause()

    def alive(self) -> bool:
        """Whether a process of the program runs, in whatever state."""
        wanted = str(FOLDER / self.program.name).encode()
        for pid in self.home.processes():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2]:
                    return True
        return False

    def said(self) -> str:
        """The end of what it printed."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-3000:]
        return ""

    def stop(self, timeout: float = 30) -> None:
        """Let it end by itself."""
        (self.folder / "stop").touch()
        wait = Wait(self, timeout, "the program does not end")
        while not all((folder / "end").exists() for folder in self.program.records(self.folder)):
            wait.pause()


class Wait:
    """Pauses while a session gets somewhere; fails when time is over, or when the program has
    gone.
    """

    def __init__(self, session: Session, timeout: float, failure: str) -> None:
        self.session, self.failure = session, failure
        self.end = time.monotonic() + timeout
        self._look = time.monotonic() + 1

    def pause(self) -> None:
        """A moment."""
        now = time.monotonic()
        if now > self._look:
            self._look = now + 1
            if not self.session.alive() and not (self.session.folder / "end").exists():
                raise Failed(f"{self.failure}: it has gone\n{self.session.said()}")
        if now > self.end:
            raise Failed(f"{self.failure}\n{self.session.said()}")
        time.sleep(PAUSE)


class Twin:
    """The same program undisturbed, as fast as it can."""

    def __init__(self, home: Home, program: Program) -> None:
        self.home, self.program = home, program
        self.folder = home.path / "twin"
        self.folder.mkdir(parents=True, exist_ok=True)
        fast = {"CRIUCTL_GPU_PACE": "0", "CRIUCTL_GPU_LIMIT": str(TWIN_LIMIT)}
        env = home.environment() | dict(program.environment) | fast
        with (self.folder / "output").open("wb") as out:
            self._process = subprocess.Popen(
                program.argv(home, self.folder),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()

    def reach(self, count: int, timeout: float = 60) -> None:
        """Wait until every record has `count` lines, or the limit."""
        wanted = min(count, TWIN_LIMIT)
        end = time.monotonic() + timeout
        while any(len(lines(folder)) < wanted for folder in self.program.records(self.folder)):
            if self._process.poll() not in {None, 0}:
                said = (self.folder / "output").read_text(errors="replace")[-3000:]
                raise Failed(f"the undisturbed twin ended with {self._process.returncode}\n{said}")
            if time.monotonic() > end:
                raise Failed("the undisturbed twin is too slow")
            time.sleep(PAUSE)

    def compare(self, session: Session) -> int:
        """Compare every line; return how many steps are equal."""
        self.reach(max(len(lines(folder)) for folder in self.program.records(session.folder)))
        compared = 0
        pairs = zip(
            self.program.records(session.folder), self.program.records(self.folder), strict=True
        )
        for ours, theirs in pairs:
            seen, wanted = lines(ours), lines(theirs)
            for number, (one, other) in enumerate(zip(seen, wanted, strict=False)):
                if one != other:
                    raise Failed(f"step {number}: {one}, but undisturbed {other}")
                compared += 1
        if not compared:
            raise Failed("no step was compared")
        return compared
