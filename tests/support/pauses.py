"""Stopping criuctl at a named step, to do harm to it there (see criuctl/pausepoints.py)."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import oracle
from .command import Command, Criuctl
from .keeper import start_time, wait_until
from .zoo import Animal


def steps_of(criuctl: Criuctl, *arguments: str | int | Path) -> list[str]:
    """The steps that a command goes through when nothing is done to it (the second ``store`` is
    ``store#2``).
    """
    with _fifo(criuctl) as (path, end):
        command = criuctl.start(
            *arguments, env={"CRIUCTL_PAUSE_AT": "*", "CRIUCTL_PAUSE_FIFO": str(path)}
        )
        code = command.process.wait(120)
        assert code == 0, command.output()
        lines = os.read(end.fd, 1 << 16).decode().splitlines()
    return [line.removeprefix("reached ") for line in lines]


class Paused:
    """A criuctl that waits at a step; `descendants` are the processes it has started and not yet
    ended.
    """

    def __init__(self, command: Command, step: str, end: _ReadingEnd) -> None:
        self.command = command
        self.step = step
        self._end = end
        found = [(pid, start_time(pid)) for pid in oracle.tree(command.process.pid)[1:]]
        # else it has ended meanwhile
        self.descendants = [(pid, started) for pid, started in found if started is not None]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send criuctl a signal."""
        self.command.process.kill(number)

    def kill_criu(self, number: int = signal.SIGKILL) -> None:
        """Send every CRIU process that criuctl has started a signal."""
        for pid, started in self.descendants:
            line = oracle.read(f"/proc/{pid}/cmdline")
            # not criuctl's own helpers
            if start_time(pid) == started and "criu" in line and ".py" not in line:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, number)

    def go_on(self) -> None:
        """Let go of the pause point."""
        self._end.close()

    def wait_settled(self, *animals: Animal, restoring: Animal | None = None) -> None:
        """Wait until criuctl has ended, and all that it had started, except for the processes of
        these trees.

        With `restoring` the processes that a restore of it makes may stay: whether they may is for
        the test to say.
        """
        self.command.process.wait(120)
        folder = str(restoring.folder) if restoring else "\0no folder"
        mine = {identity for animal in animals for identity in animal.identities()}

        def made_by_restore(pid: int) -> bool:
            return folder in oracle.read(f"/proc/{pid}/cmdline")

        def left() -> list[int]:
            return [
                pid
                for pid, started in self.descendants
                if start_time(pid) == started
                and (pid, started) not in mine
                and not made_by_restore(pid)
            ]

        wait_until(
            lambda: not left(), 60, f"nothing of criuctl is left after {self.step}: {left()}"
        )


@contextmanager
def paused(criuctl: Criuctl, step: str, *arguments: str | int | Path) -> Iterator[Paused]:
    """Start criuctl and hold it at `step`; let it go at the end at the latest."""
    with paused_program(criuctl, step, lambda env: criuctl.start(*arguments, env=env)) as held:
        yield held


@contextmanager
def paused_program(
    criuctl: Criuctl, step: str, start: Callable[[dict[str, str]], Command]
) -> Iterator[Paused]:
    """Do the same with what `start` starts, with these variables."""
    with _fifo(criuctl) as (path, end):
        command = start({"CRIUCTL_PAUSE_AT": step, "CRIUCTL_PAUSE_FIFO": str(path)})

        def line() -> bytes:
            if select.select([end.fd], [], [], 0.05)[0] and (data := os.read(end.fd, 256)):
                return data
            assert command.process.poll() is None, f"ended before {step}: {command.output()}"
            return b""

        said = wait_until(line, 120, f"criuctl at {step}")
        assert said == f"paused {step}\n".encode()
        held = Paused(command, step, end)
        try:
            yield held
        finally:
            held.go_on()


class _ReadingEnd:
    """Our end of the FIFO; criuctl waits for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@contextmanager
def _fifo(criuctl: Criuctl) -> Iterator[tuple[Path, _ReadingEnd]]:
    path = criuctl.home.path / f"pause-{len(criuctl.running)}"
    os.mkfifo(path)
    end = _ReadingEnd(path)
    try:
        yield path, end
    finally:
        end.close()
        path.unlink()
