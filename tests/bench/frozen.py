"""How long trees with many processes, threads or descriptors stand still in a snapshot, and a tree
with much memory of which little changes.

A snapshot must have CRIU look at each process, thread and descriptor of the frozen tree: that is
the limit, which the way `FLOOR` shows.  It is plain criu to a tmpfs of a like tree without memory,
whose pages cost nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .cases import GIB, MIB, TMPFS, Bench, size_name, subject_of
from .errors import BenchFailed
from .interrupts import waiting
from .report import SUBJECT, Bound, Section
from .tracking import Snapshots
from .ways import PlainCriu, Root

FLOOR = "least"
MANY = Bound(0.5, TMPFS)
LIMIT = Bound(1.3, FLOOR)
SMALL = Bound(1.0, TMPFS)
SCALE = Bound(1.5, "of 1 GiB")
_PROCESSES, _THREADS, _DESCRIPTORS = 200, 2000, 5000
_MEMORY = 5 * MIB  # of each process
_REWRITTEN = GIB // 20  # of the trees with much memory
_LEAST = 5  # rounds

# Waits with so many threads and open files.
_WAITS = """
import resource, signal, sys, threading
threads, files = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 100, files + 100))
threading.stack_size(65536)
for _ in range(threads):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
held = [open(sys.argv[3]) for _ in range(files)]
open(sys.argv[4], "w").close()
signal.pause()
"""


def frozen(bench: Bench, largest: int) -> Iterator[Section]:
    """Measure second and later snapshots, of all trees; the largest has `largest` bytes."""
    yield _processes(bench)
    yield from (_waiting(bench, *counts) for counts in ((_THREADS, 0), (0, _DESCRIPTORS)))
    yield _small(bench)
    yield _large(bench, largest)


def _section(bench: Bench, what: str) -> Section:
    place = bench.places[0]
    return Section(f"frozen, {what}, {place.name}", {"case": "frozen", "store": place.name})


def _add(section: Section, own: float, plain: float, least: float) -> None:
    for label, bound in (("by plain criu", MANY), ("by the least that CRIU needs", LIMIT)):
        row = section.row(label, bound=bound)
        for way, seconds in ((SUBJECT, own), (TMPFS, plain), (FLOOR, least)):
            row.add(way, seconds)


def _processes(bench: Bench) -> Section:
    section = _section(bench, f"{_PROCESSES} processes of {size_name(_MEMORY)}")
    own, plain = Snapshots(bench, tracked=True), PlainCriu(TMPFS, bench.criu, bench.tmpfs)
    with (
        subject_of(bench, _PROCESSES * _MEMORY, _PROCESSES) as subject,
        subject_of(bench, _PROCESSES * 8192, _PROCESSES) as bare,
        _turns(bench, own, plain, subject.tree),
    ):
        for _ in _rounds(bench, section):
            subject.tree.change(0.01, bench.run_size)
            bare.tree.live_on()
            seconds = own.snapshot(subject.tree.pid).frozen
            whole = plain.dump(subject.tree, leave_running=True).frozen
            least = plain.dump(bare.tree, leave_running=True).frozen
            _add(section, seconds, whole, least)
            subject.tree.verify()
    return section


def _waiting(bench: Bench, threads: int, files: int) -> Section:
    """A process without much memory: the least is what plain criu needs."""
    what = f"{threads:,} threads" if threads else f"{files:,} descriptors"
    section = _section(bench, what)
    own, plain = Snapshots(bench, tracked=True), PlainCriu(TMPFS, bench.criu, bench.tmpfs)
    ready = bench.tmpfs / "ready"
    ready.unlink(missing_ok=True)
    argv = [sys.executable, "-c", _WAITS, str(threads), str(files), "/etc/hostname", str(ready)]
    launched = bench.keeper.spawn(argv, env={})
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            if time.monotonic() > deadline:
                raise BenchFailed(f"no process with {what} comes up")
            with waiting():
                time.sleep(0.01)
        with _turns(bench, own, plain, launched):
            for _ in _rounds(bench, section):
                seconds = own.snapshot(launched.pid).frozen
                least = plain.dump(launched, leave_running=True).frozen
                _add(section, seconds, least, least)
    finally:
        launched.kill()
        launched.wait(60)
    return section


def _small(bench: Bench) -> Section:
    section = _section(bench, "50 MiB")
    own, plain = Snapshots(bench, tracked=True), PlainCriu(TMPFS, bench.criu, bench.tmpfs)
    with subject_of(bench, 50 * MIB, 1) as subject, _turns(bench, own, plain, subject.tree):
        for _ in _rounds(bench, section):
            subject.tree.change(0.05, bench.run_size)
            for way in (own, plain):
                row = section.row("second snapshot", bound=SMALL)
                row.add(way.name, way.dump(subject.tree, leave_running=True).frozen)
    return section


def _large(bench: Bench, largest: int) -> Section:
    """As much is rewritten in each tree."""
    section = _section(bench, f"{size_name(_REWRITTEN)} rewritten of {size_name(largest)}")
    names = {GIB: SCALE.peer, largest: SUBJECT}
    for size, name in names.items():
        own = Snapshots(bench, tracked=True)
        with subject_of(bench, size, 1) as subject:
            try:
                own.snapshot(subject.tree.pid)
                for _ in _rounds(bench, section):
                    subject.tree.change(_REWRITTEN / size, bench.run_size)
                    row = section.row("frozen", bound=SCALE)
                    row.add(name, own.snapshot(subject.tree.pid).frozen)
                subject.tree.verify()
            finally:
                own.clean()
    return section


def _rounds(bench: Bench, section: Section) -> Iterator[int]:
    for number in range(max(bench.runs, _LEAST)):
        bench.say(f"{section.title}, round {number + 1}")
        yield number


@contextmanager
def _turns(bench: Bench, own: Snapshots, plain: PlainCriu, tree: Root) -> Iterator[None]:
    """Take the first snapshot; leave nothing of any."""
    try:
        own.snapshot(tree.pid)
        yield
    finally:
        own.clean()
        plain.clean()
