"""What tracking of writes is worth, and what it costs: how long a tree is frozen that is left
running, the processor time of a snapshot of an idle tree, and how much a program that only writes
is slowed down.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .cases import MIB, TMPFS, Bench, size_name, subject_of
from .errors import BenchFailed
from .program import Tree
from .report import SUBJECT, Bound, Section
from .ways import Criuctl, Dumped, PlainCriu, Way

FROZEN = {0.0: Bound(0.10, TMPFS), 0.01: Bound(0.15, TMPFS), 0.05: Bound(0.25, TMPFS)}
FIRST = Bound(0.40, TMPFS)
UNTRACKED = "untracked"
PROCESSOR = Bound(0.15, UNTRACKED)
LOST = Bound(0.05 * 60)  # seconds of a minute
REWRITTEN = 0.05  # of the memory, each second, during a first snapshot
LOOP = 256 * MIB
_BEFORE = 4.0  # seconds of the loop that are measured

# Runs a command and writes the processor time of it and of its children to a file.
_TIMED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    file.write(str(used.ru_utime + used.ru_stime))
sys.exit(code)
"""

# Writes to all of its memory, all the time, and counts the passes in a file.
_WRITES = """
import ctypes, mmap, sys
with open(sys.argv[1], "r+b") as file:
    passes = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
memory = mmap.mmap(-1, int(sys.argv[2]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
while True:
    ctypes.memset(at, passes[0] & 0xFF, len(memory))
    passes[0] += 1
"""


class Snapshots(Criuctl):
    """``criuctl snapshot``, as a timer calls it, with or without tracking."""

    def __init__(self, bench: Bench, *, tracked: bool) -> None:
        self.name = SUBJECT if tracked else UNTRACKED
        self._used = bench.tmpfs / f"processor-{self.name}"
        program = [sys.executable, "-c", _TIMED, str(self._used)]
        program += bench.program or [sys.executable, "-m", "criuctl"]
        place = bench.places[0]
        super().__init__(
            bench.commands,
            bench.disk / f"{place.name}-{self.name}",
            place,
            program,
            configuration={"CRIUCTL_TRACK_WRITES_MIB": "32" if tracked else "0"},
        )
        self.name = SUBJECT if tracked else UNTRACKED
        self._store = f"criuctl-{self.name}"
        self.processor = 0.0  # seconds of the last snapshot

    def environment(self) -> dict[str, str]:
        return super().environment() | {"CRIUCTL_STORE": self._place.url(self._store)}

    def clean(self) -> None:
        super().clean()
        self._place.empty(self._store)

    def dump(self, tree: Tree, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        assert leave_running
        return self.snapshot(tree.pid)

    def snapshot(self, pid: int) -> Dumped:
        """Take one of a process."""
        self.prepare()
        (answer,), _, seconds, _ = self.command("snapshot", str(pid))
        self.processor = float(self._used.read_text())
        frozen, size = answer["frozen_ms"] / 1000, answer["bytes"]
        return Dumped(seconds, frozen, size["stored"], size["new"])


def tracked(bench: Bench, sizes: Sequence[int]) -> Iterator[Section]:
    """How long a tree is frozen that is left running, if its writes are tracked meanwhile."""
    for size in sizes:
        yield _frozen(bench, size)
    yield _slowed_down(bench)


def _frozen(bench: Bench, size: int) -> Section:
    place = bench.places[0]
    title = f"tracked snapshots, {size_name(size)} in 1 process, {place.name}"
    section = Section(title, {"case": "tracked", "size": size, "store": place.name})
    own = Snapshots(bench, tracked=True)
    plain = PlainCriu(TMPFS, bench.criu, bench.tmpfs)
    ways: list[Way] = [own, plain, Snapshots(bench, tracked=False)]
    for number in range(bench.runs):
        bench.say(f"tracked snapshots, round {number + 1} of {bench.runs}")
        with subject_of(bench, size, 1) as subject:
            try:
                for way in ways:  # nothing knows the tree yet
                    if subject.plays(way):
                        with subject.turn(way, section) as tree, _rewriting(tree, bench.run_size):
                            dumped = way.dump(tree, leave_running=True)
                            row = section.row("frozen, first snapshot, 5% a second", bound=FIRST)
                            row.add(way.name, dumped.frozen)
                for share, bound in FROZEN.items():
                    if share:
                        subject.tree.change(share, bench.run_size)
                    for way in ways:
                        if not subject.plays(way):
                            continue
                        with subject.turn(way, section) as tree:
                            dumped = way.dump(tree, leave_running=True)
                            row = section.row(f"frozen, {share:.0%} rewritten", bound=bound)
                            row.add(way.name, dumped.frozen)
                            if isinstance(way, Snapshots) and not share:
                                row = section.row("processor time, idle", bound=PROCESSOR)
                                row.add(way.name, way.processor)
                            tree.verify()
            finally:
                for way in ways:
                    way.clean()
    return section


@contextmanager
def _rewriting(tree: Tree, run: int) -> Iterator[None]:
    """Rewrite a part of the tree's memory each second."""
    over = threading.Event()

    def work() -> None:
        with suppress(BenchFailed):  # it is frozen for longer than it has to answer
            while not over.wait(0.2):
                tree.change(REWRITTEN * 0.2, run)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slowed_down(bench: Bench) -> Section:
    """A program that writes to all of its memory all the time: at one snapshot a minute."""
    section = Section(
        f"a program that only writes, {size_name(LOOP)}", {"case": "tracked", "size": LOOP}
    )
    counter = bench.tmpfs / "passes"
    for number in range(bench.runs):
        bench.say(f"a program that only writes, round {number + 1} of {bench.runs}")
        for tracked_ in (True, False):
            way = Snapshots(bench, tracked=tracked_)
            counter.write_bytes(bytes(8))
            argv = [sys.executable, "-c", _WRITES, str(counter), str(LOOP)]
            launched = bench.keeper.spawn(argv, env={})
            try:
                section.row("lost by one snapshot", bound=LOST).add(
                    way.name, _lost(counter, way, launched.pid)
                )
            finally:
                launched.kill()
                launched.wait(60)
                way.clean()
    return section


def _lost(counter: Path, way: Snapshots, pid: int) -> float:
    """Seconds that the program loses by a snapshot, the second one that is taken of it: in which it
    is frozen, and the processor time that it needs more for as many passes. What criuctl itself
    takes of the processors is not part of it.
    """
    with counter.open("r+b") as file:
        passes = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    while passes[0] < 3:
        time.sleep(0.01)
    first, before = passes[0], _processor_time(pid)
    time.sleep(_BEFORE)
    usual = (_processor_time(pid) - before) / (passes[0] - first)
    way.snapshot(pid)
    time.sleep(_BEFORE)
    first, before = passes[0], _processor_time(pid)
    frozen = way.snapshot(pid).frozen
    time.sleep(_BEFORE)
    return frozen + _processor_time(pid) - before - (passes[0] - first) * usual


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
