"""The tree that is dumped: building it, starting it, asking it, ending it.  target.c is its other
half.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.keeper import Keeper

from .errors import BenchFailed
from .interrupts import waiting

# The words of the control file, as in target.c.
(
    COMMAND,
    KIND,
    CHANGERS,
    CHANGE_BYTES,
    CHANGE_RUN,
    SEED,
    DEADLINE,
    TICKS,
    LARGEST_GAP,
    ARMED,
    RESUMED_AT,
) = range(11)
SLOTS = 16
VERIFY, CHANGE = 1, 2
PID, ANSWERED, GOOD, CHANGED, SLOT_WORDS = range(5)
CONTROL_WORDS = 8192
MAX_PROCESSES = (CONTROL_WORDS - SLOTS) // SLOT_WORDS

_LIFE = 900.0  # seconds that a tree lives when the bench does nothing with it


def build(folder: Path) -> Path:
    """Compile target.c into `folder`."""
    from .commands import run_tool

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchFailed(
            "a C compiler is missing; install gcc and libc6-dev (scripts/setup --dev does)"
        )
    binary = folder / "target"
    run_tool([compiler, "-O2", "-o", str(binary), str(Path(__file__).with_name("target.c"))])
    return binary


class Tree:
    """One running tree of the target program; `end` it."""

    def __init__(
        self, keeper: Keeper, binary: Path, folder: Path, size: int, processes: int
    ) -> None:
        """Start it; `folder` (on a tmpfs) is for its control file.  Returns when all memory is
        filled.
        """
        self.size, self.processes = size, processes
        self._binary = binary
        self._path = folder / f"control-{time.monotonic_ns()}"
        self._path.write_bytes(bytes(CONTROL_WORDS * 8))
        with self._path.open("r+b") as file:
            # Words are written whole: struct.pack_into writes zeros first, and a tree that reads
            # its deadline just then ends.
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._command = 1  # the tree answers this one when its memory is filled
        self._set(COMMAND, self._command)
        self._seed = 1
        self.live_on()
        try:
            self._launched = keeper.spawn(
                [str(binary), str(self._path), str(processes), str(size)], env={}
            )
            self._answers(1, 60 + size / 100e6)
        except BaseException:
            self.end()
            raise
        self.pid = self._launched.pid

    # -- words --

    def _get(self, word: int) -> int:
        return self._words[word]

    def _set(self, word: int, value: int) -> None:
        self._words[word] = value

    def _slot(self, number: int, word: int) -> int:
        return self._get(SLOTS + number * SLOT_WORDS + word)

    # -- what the bench asks of it --

    def live_on(self) -> None:
        """Put its deadline off."""
        self._set(DEADLINE, time.time_ns() + int(_LIFE * 1e9))

    def verify(self) -> None:
        """Every process checks its memory; `BenchFailed` when it is not what it was."""
        self._ask(VERIFY)

    def change(self, part: float, run: int) -> int:
        """Give `part` of the memory new contents in runs of `run` bytes; the number of bytes that
        were changed.

        In as few processes as there are such runs: most of a large tree sleeps.
        """
        total = int(self.size * part)
        changers = min(self.processes, -(-total // min(run, self.size // self.processes)))
        self._set(CHANGERS, changers)
        self._set(CHANGE_BYTES, total // changers)
        self._set(CHANGE_RUN, run)
        self._seed += 1
        self._set(SEED, self._seed)
        self._ask(CHANGE)
        return sum(self._slot(n, CHANGED) for n in range(self.processes))

    def watch_gaps(self) -> None:
        """Forget the largest gap between two ticks."""
        ticks = self._get(TICKS)
        _until(lambda: self._get(TICKS) > ticks + 1, 10, "the tree does not tick")
        self._set(LARGEST_GAP, 0)

    def largest_gap(self) -> float:
        """Seconds of the largest gap since `watch_gaps`: for so long it did not run."""
        ticks = self._get(TICKS)
        _until(lambda: self._get(TICKS) > ticks + 1, 60, "the tree does not tick")
        return self._get(LARGEST_GAP) / 1e9

    def arm(self) -> None:
        """Have the first tick from now on recorded; for use while the tree does not exist."""
        self._set(RESUMED_AT, 0)
        self._set(ARMED, 1)

    def resumed_at(self) -> float:
        """The moment (of time.time) of the first tick since `arm`; CRIU restores a tree with its
        old monotonic clock.
        """
        _until(lambda: self._get(RESUMED_AT) > 0, 60, "the tree does not run after its restore")
        return self._get(RESUMED_AT) / 1e9

    def pids(self) -> list[int]:
        """The processes of the tree that exist, by their executable: no other process runs this
        very file.
        """
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    if os.readlink(f"/proc/{entry}/exe").removesuffix(" (deleted)") == str(
                        self._binary
                    ):
                        found.append(int(entry))
                except OSError:
                    continue  # gone, or a kernel thread
        return found

    def gone(self) -> None:
        """Return when no process of it is left, zombies included."""
        inner = [self._slot(n, PID) for n in range(self.processes)]
        _until(
            lambda: not any(os.path.exists(f"/proc/{pid}") for pid in inner),
            60,
            "processes of a dumped tree remain",
        )

    def end(self) -> None:
        """End every process of it."""
        for pid in self.pids():
            # it has ended meanwhile: by what was interrupted, or without its root
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: not self.pids(), 60, "processes of the tree cannot be killed")
        self._path.unlink(missing_ok=True)

    def _ask(self, kind: int) -> None:
        self.live_on()
        self._set(KIND, kind)
        self._command += 1
        self._set(COMMAND, self._command)
        self._answers(self._command, 30 + self.size / 100e6)

    def _answers(self, command: int, seconds: float) -> None:
        numbers = range(self.processes)
        _until(
            lambda: all(self._slot(n, ANSWERED) == command for n in numbers),
            seconds,
            "the tree does not answer",
        )
        bad = [n for n in numbers if self._slot(n, GOOD) != 1]
        if bad:
            raise BenchFailed(
                f"the memory of {len(bad)} of {self.processes} processes is not what it was"
            )


def _until(condition: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BenchFailed(f"{complaint} (waited {seconds:.0f} s)")
        with waiting():
            time.sleep(0.002)  # words in shared memory, which cannot be waited for
