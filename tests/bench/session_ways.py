"""The ways to run a program in a terminal and to be attached to it: criuctl and its peers, and a
bare PTY.

Every way that draws on a terminal gets one of the same size, which the bench reads flat out; inside
each runs `payload`.  tmux runs without a configuration, so that no user's is measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import struct
import sys
import termios
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.keeper import Keeper, Launched

from criuctl.config import Config
from criuctl.errors import CriuctlError
from criuctl.ops import new_session
from criuctl.session.client.session import Output, Session
from criuctl.session.sessions import state_of

from . import payload
from .errors import BenchFailed
from .interrupts import waiting

PROJECT = Path(__file__).parents[2]
BARE, CLIENT = "bare PTY", "criuctl client"
PATIENCE = 120.0
_SILENCE = 5.0  # seconds in which something has to be drawn
_ROWS, _COLUMNS = 24, 80
_READ = 256 << 10
_CONTROLLING = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], "
    "sys.argv[1:])"
)


def payload_argv(flood: int) -> list[str]:
    """The program that runs in the terminals."""
    return [sys.executable, "-I", "-S", str(Path(payload.__file__)), str(flood)]


class Attached(contextlib.AbstractContextManager["Attached"]):
    """One end of a terminal's way: what is typed goes in, what is shown comes out."""

    name: str

    @abstractmethod
    def type(self, data: bytes) -> None:
        """Send keys."""

    @abstractmethod
    def read(self) -> bytes:
        """What has come, at least a byte."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Whether something comes in that time."""

    @abstractmethod
    def close(self) -> None:
        """Leave."""

    def ready(self) -> None:
        """Be sure that keys get through: what is typed before the programs on the way have set up
        their terminals may be lost.
        """
        deadline = time.monotonic() + PATIENCE
        seen = b""
        while b"#" not in seen:
            self.type(b"#")
            while self.wait(0.2) and b"#" not in seen:
                seen = self.read()
            if time.monotonic() > deadline:
                raise BenchFailed(f"{self.name}: what is typed does not come back")
        self.echo(b"&")

    def __exit__(self, *error: object) -> None:
        self.close()

    def until(self, wanted: bytes) -> int:
        """Read flat out until `wanted` has come; the bytes that came."""
        tail, count = b"", 0
        while True:
            data = self.read()
            count += len(data)
            joined = tail + data[-256:] if len(data) > 256 else tail + data
            if wanted in joined:
                return count
            tail = joined[-len(wanted) :]

    def echo(self, key: bytes) -> float:
        """Seconds until a key is shown."""
        began = time.perf_counter()
        self.type(key)
        self.until(key)
        return time.perf_counter() - began

    def flood(self) -> tuple[float, int]:
        """Seconds until the end of a flood is shown, and the bytes that came."""
        began = time.perf_counter()
        self.type(payload.FLOOD)
        count = self.until(payload.END)
        return time.perf_counter() - began, count


class Window(Attached):
    """A program on a terminal of ours: a session's client, or the payload itself."""

    def __init__(
        self, keeper: Keeper, name: str, argv: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.master, slave = os.openpty()
        try:
            tty.setraw(slave)
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
            argv = [sys.executable, "-I", "-S", "-c", _CONTROLLING, *argv]
            self.process: Launched = keeper.spawn(
                argv, env=env, stdin=slave, stdout=slave, stderr=slave
            )
        finally:
            os.close(slave)
        self._buffer = bytearray(_READ)
        self._view = memoryview(self._buffer)

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def read(self) -> bytes:
        try:
            count = os.readv(self.master, [self._buffer])
        except OSError as error:
            raise BenchFailed(f"{self.name}: the terminal is gone: {error.strerror}") from error
        return bytes(self._view[:count])

    def wait(self, seconds: float) -> bool:
        with waiting():
            return bool(select.select([self.master], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self.master)
        try:
            self.process.wait(10)
        except TimeoutError:
            self.process.kill()


class Redrawn(Window):
    """A client that draws what a terminal shows, and has been seen to miss the end of it: it is
    asked to draw all, as by a person who changes the window's size."""

    def read(self) -> bytes:
        for more in (1, 0) * int(PATIENCE / _SILENCE / 2):
            if self.wait(_SILENCE):
                return super().read()
            fcntl.ioctl(
                self.master, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS + more, _COLUMNS, 0, 0)
            )
        raise BenchFailed(f"{self.name}: nothing is drawn")


class Client(Attached):
    """A client of the holder's protocol, in the bench itself."""

    name = CLIENT

    def __init__(self, session: Session) -> None:
        self._session = session
        session.attach("start", write=True)

    def type(self, data: bytes) -> None:
        self._session.submit_input(data)

    def read(self) -> bytes:
        while (message := self._session.receive(PATIENCE)) is not None:
            if isinstance(message, Output):
                return message.data
        raise BenchFailed("criuctl: no output came")

    def wait(self, seconds: float) -> bool:
        with waiting():
            return self._session.pending or bool(select.select([self._session], [], [], seconds)[0])

    def close(self) -> None:
        self._session.leave()


def environment() -> dict[str, str]:
    """Of every program in a terminal."""
    return {
        "PATH": os.environ["PATH"],
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "HOME": "/",
        "SHELL": "/bin/sh",
    }


def find(program: str) -> str:
    """A peer's program."""
    found = shutil.which(program)
    if found is None:
        raise BenchFailed(f"{program} is missing; install the package {program}")
    return found


def bare(keeper: Keeper, argv: Sequence[str]) -> Window:
    """The payload on the terminal, nothing between."""
    return Window(keeper, BARE, argv, environment())


class Host(ABC):
    """What holds sessions."""

    name: str

    @abstractmethod
    def start(self, name: str, argv: Sequence[str]) -> Sequence[int]:
        """Start a detached session; the PIDs of what holds it, first the one that has the
        terminal.
        """

    @abstractmethod
    def attach(self, name: str) -> Window:
        """Its own client, on a terminal."""

    @abstractmethod
    def close(self) -> None:
        """End every session."""


class Dtach(Host):
    """dtach: one process per session, as criuctl has."""

    name = "dtach"

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper, self._folder, self._program = keeper, folder, find("dtach")
        self._servers: list[int] = []

    def start(self, name: str, argv: Sequence[str]) -> list[int]:
        command = [self._program, "-n", str(self._folder / name), "-z", "-E", *argv]
        self._keeper.spawn(command, env=environment()).wait(PATIENCE)
        servers = [pid for pid in _pids(str(self._folder / name)) if pid not in self._servers]
        self._servers += servers
        return servers

    def attach(self, name: str) -> Window:
        command = [self._program, "-a", str(self._folder / name), "-z", "-E", "-r", "none"]
        return Window(self._keeper, self.name, command, environment())

    def close(self) -> None:
        _end(self._servers)


class Tmux(Host):
    """tmux: one server for all sessions."""

    name = "tmux"

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper, self._program, self._socket = keeper, find("tmux"), str(folder / "tmux")
        self._servers: list[int] = []

    def _argv(self, *arguments: str) -> list[str]:
        return [self._program, "-f", "/dev/null", "-S", self._socket, *arguments]

    def start(self, name: str, argv: Sequence[str]) -> list[int]:
        command = self._argv(
            "new-session", "-d", "-s", name, "-x", str(_COLUMNS), "-y", str(_ROWS), *argv
        )
        code = self._keeper.spawn(command, env=environment()).wait(PATIENCE)
        if code:
            raise BenchFailed(f"tmux new-session: exit {code}")
        self._servers = self._servers or _pids(self._socket)
        return self._servers

    def attach(self, name: str) -> Window:
        return Redrawn(self._keeper, self.name, self._argv("attach", "-t", name), environment())

    def close(self) -> None:
        if self._servers:
            self._keeper.spawn(self._argv("kill-server"), env=environment()).wait(PATIENCE)
            _end(self._servers)


class Sessions(Host):
    """criuctl's own."""

    name = "criuctl"

    def __init__(self, keeper: Keeper, run: Path, state: Path, program: Sequence[str] = ()) -> None:
        self._keeper, self._folder = keeper, state
        self._program = list(program) or [sys.executable, "-m", "criuctl"]
        self.config = Config(
            run_dir=str(run / "run"), state_dir=str(state / "state"), cache_dir=str(state / "cache")
        )
        self._names: list[str] = []

    def start(self, name: str, argv: Sequence[str]) -> list[int]:
        self._names.append(name)
        started = new_session.run(self.config, argv, name=name, workspace="/", env=environment())
        above = _parent(started.pid)
        return [started.holder_pid, *([above] if above != started.holder_pid else [])]

    def attach(self, name: str) -> Window:
        env = environment() | {
            "PYTHONPATH": str(PROJECT),
            "CRIUCTL_RUN_DIR": self.config.run_dir,
            "CRIUCTL_STATE_DIR": self.config.state_dir,
            "XDG_CONFIG_HOME": str(self._folder / "config"),
        }
        return Window(self._keeper, self.name, [*self._program, "attach", name], env)

    def client(self, name: str) -> Client:
        """A client of the protocol; not at the same time as one who types."""
        return Client(Session.connect(name, config=self.config, kind="human", operator="bench"))

    def close(self) -> None:
        for name in self._names:
            with (
                contextlib.suppress(CriuctlError),
                Session.connect(name, config=self.config, kind="human", role="admin") as session,
            ):
                session.kill(grace=0.0)
                session.request("shutdown", force=True)
        for name in self._names:
            state = state_of(self.config, name)
            if state is not None and state["holder"]:
                _end([state["holder"]["pid"]])
        self._names.clear()


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _pids(word: str) -> list[int]:
    """Processes with `word` among their arguments: the daemons that go by a socket of ours."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            if word.encode() in arguments and int(entry) != os.getpid():
                found.append(int(entry))
    return found


def _end(pids: Sequence[int]) -> None:
    """End daemons, and see them gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                for number, patience in ((15, 5.0), (9, 10.0)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                    if select.select([descriptor], [], [], patience)[0]:
                        break
            finally:
                os.close(descriptor)
