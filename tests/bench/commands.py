"""Programs that are measured: run to their end, by the keeper, so that what they leave behind has a
parent that reaps it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.keeper import Keeper, Launched

from .errors import BenchFailed
from .interrupts import waiting

_SAMPLE = 0.01  # seconds between two looks at the memory of a program and its children
_GRACE = 30.0  # seconds for a program to end after SIGTERM


@dataclass(frozen=True)
class Done:
    """A program that ended well."""

    began: float  # time.time
    seconds: float
    out: str
    # peak RSS in bytes of the program ("") and of its children, by command name
    peaks: Mapping[str, int]


@dataclass
class _Peaks(threading.Thread):
    """Watches the high-water marks of a process and of all its descendants."""

    root: int
    found: dict[str, int] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while not self.over.wait(_SAMPLE):
            self._look()

    def _look(self) -> None:
        parents: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError), open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
        for pid in parents:
            above = pid
            while above not in (0, self.root):
                above = parents.get(above, 0)
            if above == self.root:
                self._note(pid)

    def _note(self, pid: int) -> None:
        with suppress(OSError), open(f"/proc/{pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
            if "VmHWM" in lines:
                name = "" if pid == self.root else lines["Name"].strip()
                self.found[name] = max(
                    self.found.get(name, 0), int(lines["VmHWM"].split()[0]) << 10
                )


class Commands:
    """Runs programs through a keeper; their output goes to a folder."""

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper = keeper
        self._folder = folder

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        memory: bool = False,
        then: Sequence[str] | None = None,
        into: Path | None = None,
    ) -> Done:
        """Run `argv` (with `then`: a pipeline of both), stdout to the file `into`; `BenchFailed`
        unless it ends well.

        With `memory` the peak RSS of it and its descendants is watched, which costs time.
        """
        err_path = self._folder / "stderr"
        out_path = into if into is not None else self._folder / "stdout"
        environment = dict(os.environ if env is None else env)
        with out_path.open("wb") as out, err_path.open("wb") as err:
            began, clock = time.time(), time.monotonic()
            running = []
            try:
                if then is None:
                    running.append(
                        self._keeper.spawn(argv, env=environment, stdout=out, stderr=err)
                    )
                else:
                    reading, writing = os.pipe()
                    try:
                        running.append(
                            self._keeper.spawn(argv, env=environment, stdout=writing, stderr=err)
                        )
                        os.close(writing)
                        writing = -1
                        running.append(
                            self._keeper.spawn(
                                then, env=environment, stdin=reading, stdout=out, stderr=err
                            )
                        )
                    finally:
                        os.close(reading)
                        if writing >= 0:
                            os.close(writing)
                watch = _Peaks(running[0].pid) if memory else None
                if watch is not None:
                    watch.start()
                with waiting():
                    codes = [process.wait(timeout) for process in running]
                seconds = time.monotonic() - clock
                if watch is not None:
                    watch.over.set()
                    watch.join()
            except BaseException as error:
                for process in running:
                    _stop(process)
                if isinstance(error, TimeoutError):
                    raise BenchFailed(str(error)) from error
                raise
        if any(codes):
            output = (out_path.read_bytes() if into is None else b"")[
                -2000:
            ] + err_path.read_bytes()[-2000:]
            raise BenchFailed(
                f"{' '.join(argv)} ended with {codes}: {output.decode(errors='replace')}"
            )
        return Done(
            began,
            seconds,
            out_path.read_text() if into is None else "",
            watch.found if watch else {},
        )


def _stop(process: Launched) -> None:
    """End a program that is not waited for any more; criu and criuctl get the time to undo what
    they began.
    """
    if process.poll() is None:
        process.kill(15)
        with suppress(TimeoutError):
            process.wait(_GRACE)
            return
        process.kill(9)


def run_tool(argv: Sequence[str]) -> str:
    """Run something that is not measured; its output, or `BenchFailed` with what it said."""
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise BenchFailed(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
