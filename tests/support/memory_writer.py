"""The program that writes to its memory in every way (``tests/campaign/writer.c``), and what it
needs around it: a slow file system, a file for direct I/O, and a process that writes into it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .fuse import slow_file
from .keeper import wait_until
from .zoo import Animal, Zoo

CAMPAIGN = Path(__file__).parent.parent / "campaign"
DELAY = 0.15  # seconds of a read of the slow file


class Subject:
    """One tree of that program: the original, or what a restore made of it."""

    def __init__(self, folder: Path, animal: Animal) -> None:
        self.folder, self.animal = folder, animal

    def status(self) -> list[int]:
        """Its PID as it sees it, the rounds of its slowest way, the cells that it has checked, and
        those that were wrong.
        """
        space = os.stat(f"/proc/{self.animal.pid}/ns/pid").st_ino
        with suppress(FileNotFoundError):
            return list(map(int, (self.folder / f"status-{space}").read_text().split()))
        return [0, 0, 0, 0]

    def errors(self) -> list[str]:
        """What was not as it was written, of the original and of all restored ones."""
        with suppress(FileNotFoundError):
            return (self.folder / "errors").read_text().splitlines()
        return []

    def checks(self, rounds: int, timeout: float = 120) -> None:
        """Wait until each way has gone over so many eighths of its cells; all was right."""
        begin = self.status()[1]
        wait_until(
            lambda: self.errors() or self.status()[1] >= begin + rounds or not self.animal.alive(),
            timeout,
            f"each way goes on: {self.status()}",
        )
        assert self.errors() == [], self.errors()[:9]
        assert self.animal.alive(), "it has ended"

    def end(self) -> None:
        """End the tree, and take back what it has asked of another process: what is restored asks
        again.
        """
        self.animal.end()
        with (self.folder / "requests").open("r+b") as file:
            file.write(bytes(4096))


def build(folder: Path) -> Path:
    """Compile the program."""
    program = folder / "writer"
    flags = ["-O2", "-Wall", "-Werror", "-pthread"]
    source = str(CAMPAIGN / "writer.c")
    subprocess.run(["gcc", *flags, "-o", str(program), source], check=True, timeout=120)
    return program


@contextmanager
def written(zoo: Zoo, home: Path, ways: Sequence[str], delay: float = DELAY) -> Iterator[Subject]:
    """Such a tree, which writes in these ways, with what it needs."""
    folder = home / "memory"
    (folder / "slow").mkdir(parents=True)
    program = build(home)
    subprocess.run([str(program), "--file", str(folder / "disk")], check=True, timeout=60)
    (folder / "requests").write_bytes(bytes(4096))
    with ExitStack() as stack:
        if any(way.startswith("slow") for way in ways):
            content = (folder / "disk").read_bytes()
            stack.enter_context(slow_file(folder / "slow", content, delay))
        if "other" in ways:
            stack.enter_context(_poker(folder))
        animal = zoo.launch([str(program)], *ways, name="memory", quiet=False)
        subject = Subject(folder, animal)
        try:
            subject.checks(1)
            yield subject
        finally:
            for one in zoo.animals:
                one.end()


@contextmanager
def _poker(folder: Path) -> Iterator[None]:
    argv = [sys.executable, "-S", str(CAMPAIGN / "poker.py"), str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
