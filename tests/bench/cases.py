"""What is measured: each case runs its ways in turn, round by round, and yields sections of the
report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.keeper import Keeper

from .commands import Commands
from .errors import BenchFailed
from .places import Folder, Place
from .program import Tree
from .report import SUBJECT, Bound, Section
from .ways import PROJECT, ByHand, Criu, Criuctl, Dumped, Least, PlainCriu, Restored, Way

MIB = 1 << 20
GIB = 1 << 30
DISK, TMPFS, BY_HAND = "criu to disk", "criu to tmpfs", "by hand"

# The bounds that criuctl is held to.
COLD_DUMP = Bound(0.6, BY_HAND)
RESTORE = Bound(0.7, BY_HAND)
FROZEN = Bound(1.3, TMPFS)
NEW_BYTES = Bound(1.3)
PEAK_MIB = Bound(400)
SMALL_DUMP = Bound(0.6)
LIST = Bound(0.3)
HELP = Bound(0.15)

CHECKPOINTS = 200  # that `criuctl list` lists
UNCHANGED = 0.95


@dataclass
class Bench:
    """What all cases share."""

    keeper: Keeper
    commands: Commands
    criu: Criu
    binary: Path  # the target program
    disk: Path
    tmpfs: Path
    places: Sequence[Place]
    runs: int
    cold: bool  # caches forget what was stored before it is restored
    run_size: int  # bytes of one stretch of changed memory
    program: Sequence[str]  # how criuctl is started; () is from this checkout
    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def criuctl(self, place: Place, *options: str) -> Criuctl:
        return Criuctl(self.commands, self.disk / place.name, place, self.program, options)

    def peers(self, place: Place) -> list[Way]:
        """By hand; where the store is a folder also without the copies that a person might
        spare.
        """
        ways: list[Way] = [ByHand(self.criu, self.commands, self.disk, place)]
        if isinstance(place, Folder):
            ways.append(ByHand(self.criu, self.commands, self.disk, place, without_copy=True))
        return ways

    def all_ways(self, place: Place) -> list[Way]:
        """criuctl, its peers, and in a folder the least that can be done, too."""
        least: list[Way] = (
            [Least(self.criu, self.commands, self.tmpfs, place)]
            if isinstance(place, Folder)
            else []
        )
        return [self.criuctl(place), *self.peers(place), *least]

    def plain(self) -> list[Way]:
        return [PlainCriu(DISK, self.criu, self.disk), PlainCriu(TMPFS, self.criu, self.tmpfs)]

    def tree(self, size: int, processes: int) -> Tree:
        self.say(f"a tree of {size_name(size)} in {count(processes, 'process', 'processes')}")
        return Tree(self.keeper, self.binary, self.tmpfs, size, processes)


class Subject:
    """The tree that the ways take turns with; one that a way has lost is replaced by another of its
    kind.
    """

    def __init__(self, bench: Bench, size: int, processes: int) -> None:
        self.bench, self.size, self.processes = bench, size, processes
        self.tree = bench.tree(size, processes)
        self._out: set[int] = set()

    @contextmanager
    def turn(self, way: Way, section: Section) -> Iterator[Tree]:
        """One way's turn; when it fails, that is reported and the way is out, the others go on."""
        try:
            self.tree.live_on()
            yield self.tree
        except BenchFailed as error:
            self._out.add(id(way))
            section.failures.append(f"{way.name}: {error}")
            self.bench.failures.append(f"{section.title}: {way.name}: {error}")
            self.bench.say(f"FAILED {way.name}: {error}")
            self.tree.end()
            self.tree = self.bench.tree(self.size, self.processes)

    def plays(self, way: Way) -> bool:
        """Whether that way has not failed."""
        return id(way) not in self._out


def size_name(size: int) -> str:
    return f"{size / GIB:g} GiB" if size >= GIB else f"{size / MIB:g} MiB"


def count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


@contextmanager
def subject_of(bench: Bench, size: int, processes: int) -> Iterator[Subject]:
    subject = Subject(bench, size, processes)
    try:
        yield subject
    finally:
        subject.tree.end()


def _there_and_back(
    tree: Tree, way: Way, *, memory: bool = False, cold: bool = False
) -> tuple[Dumped, Restored]:
    way.clean()
    dumped = way.dump(tree, memory=memory)
    tree.gone()
    if cold:
        os.sync()
        way.cool()
    restored = way.restore(tree, memory=memory)
    tree.verify()
    return dumped, restored


def warm_up(bench: Bench) -> None:
    """Every way once, untimed: code, libraries and the kernel's memory are warm for all."""
    bench.say("warming up")
    section = Section("warm-up", {})
    with subject_of(bench, 50 * MIB, 1) as subject:
        for way in [*bench.plain(), *(w for p in bench.places for w in bench.all_ways(p))]:
            with subject.turn(way, section) as tree:
                _there_and_back(tree, way)
            way.clean()


def dump_restore(
    bench: Bench, sizes: Sequence[int], processes: Sequence[int], shown: Sequence[str]
) -> Iterator[Section]:
    """Cold dumps that end the tree, and restores, in turn."""
    for size in sizes:
        for number in processes:
            with subject_of(bench, size, number) as subject:
                yield from _dump_restore(bench, subject, shown)


def _dump_restore(bench: Bench, subject: Subject, shown: Sequence[str]) -> Iterator[Section]:
    plain = bench.plain()
    what = f"{size_name(subject.size)} in {count(subject.processes, 'process', 'processes')}"
    key = {"size": subject.size, "processes": subject.processes}
    sections = {
        (case, place.name): Section(
            f"{title}, {what}, {place.name}", {"case": case, **key, "store": place.name}
        )
        for case, title in (
            ("dump", "cold dump"),
            ("restore", "restore, cold cache" if bench.cold else "restore"),
        )
        for place in bench.places
    }
    turns: list[tuple[Way, list[Place]]] = []
    for place in bench.places:
        turns += [(way, [place]) for way in bench.all_ways(place)]
    turns[1:1] = [(way, list(bench.places)) for way in plain]
    try:
        for number in range(bench.runs):
            bench.say(f"dump and restore, round {number + 1} of {bench.runs}")
            for way, places in turns:
                if not subject.plays(way):
                    continue
                with subject.turn(way, sections["dump", places[0].name]) as tree:
                    dumped, restored = _there_and_back(tree, way, cold=bench.cold)
                    for place in places:
                        _note_dump(sections["dump", place.name], way, dumped)
                        _note_restore(sections["restore", place.name], way, restored)
                way.clean()
    finally:
        for way, _ in turns:
            way.clean()
    yield from (section for (case, _), section in sections.items() if case in shown)


def _note_dump(section: Section, way: Way, dumped: Dumped) -> None:
    section.row("total", bound=COLD_DUMP).add(way.name, dumped.seconds)
    section.row("frozen").add(way.name, dumped.frozen)
    section.row("stored", "MiB").add(way.name, dumped.stored / MIB)


def _note_restore(section: Section, way: Way, restored: Restored) -> None:
    section.row("until it runs", bound=RESTORE).add(way.name, restored.seconds)
    section.row("until the command ends").add(way.name, restored.ended)


def precopy(bench: Bench, sizes: Sequence[int], processes: Sequence[int]) -> Iterator[Section]:
    """Cold dumps that end the tree, with its memory stored ahead and without."""
    for place in bench.places:
        for size in sizes:
            for number in processes:
                title = (
                    f"pre-copy, {size_name(size)} in {count(number, 'process', 'processes')}, "
                    f"{place.name}"
                )
                section = Section(
                    title,
                    {"case": "precopy", "size": size, "processes": number, "store": place.name},
                )
                ways = [bench.criuctl(place), bench.criuctl(place, "--pre-copy")]
                with subject_of(bench, size, number) as subject:
                    for turn in range(bench.runs):
                        bench.say(f"pre-copy, round {turn + 1} of {bench.runs}")
                        for way in ways:
                            if not subject.plays(way):
                                continue
                            with subject.turn(way, section) as tree:
                                dumped, _ = _there_and_back(tree, way)
                                section.row("frozen").add(way.name, dumped.frozen)
                                section.row("total").add(way.name, dumped.seconds)
                                section.row("stored", "MiB").add(way.name, dumped.stored / MIB)
                            way.clean()
                yield section


def increment(bench: Bench, sizes: Sequence[int], processes: Sequence[int]) -> Iterator[Section]:
    """Dumps that leave the tree running, after a first one, of a tree that has changed a little."""
    for place in bench.places:
        for size in sizes:
            for number in processes:
                title = (
                    f"second dump, {size_name(size)} in {count(number, 'process', 'processes')}, "
                    f"5 % changed, {place.name}"
                )
                key = {"case": "increment", "size": size, "processes": number, "store": place.name}
                section = Section(title, {**key, "run_size": bench.run_size})
                with subject_of(bench, size, number) as subject:
                    _increment(bench, subject, place, section)
                yield section


def _increment(bench: Bench, subject: Subject, place: Place, section: Section) -> None:
    own = bench.criuctl(place)
    ways: list[Way] = [own, *reversed(bench.plain())]
    try:
        with subject.turn(own, section) as tree:
            own.dump(tree, leave_running=True)
        for number in range(bench.runs):
            bench.say(f"second dump, round {number + 1} of {bench.runs}")
            # once: the peers take all of it anyway
            changed = subject.tree.change(1 - UNCHANGED, bench.run_size)
            for way in ways:
                if not subject.plays(way):
                    continue
                with subject.turn(way, section) as tree:
                    tree.watch_gaps()
                    dumped = way.dump(tree, leave_running=True)
                    gap = tree.largest_gap()
                    if way is own:
                        _note_new(section, dumped, changed)
                    section.row("frozen", bound=FROZEN).add(way.name, dumped.frozen)
                    section.row("stood still, seen from inside").add(way.name, gap)
                    section.row("total").add(way.name, dumped.seconds)
                    tree.verify()
    finally:
        for way in ways:
            way.clean()


def _note_new(section: Section, dumped: Dumped, changed: int) -> None:
    section.row("new bytes by bytes changed", "ratio", NEW_BYTES).add(SUBJECT, dumped.new / changed)
    section.row("stored bytes by bytes changed", "ratio", NEW_BYTES).add(
        SUBJECT, dumped.stored / changed
    )


def fixed(bench: Bench) -> Iterator[Section]:
    """What a dump of next to nothing costs, and criuctl's start."""
    for place in bench.places:
        section = Section(
            f"fixed cost, 10 MiB in 1 process, {place.name}", {"case": "fixed", "store": place.name}
        )
        own = bench.criuctl(place)
        ways: list[Way] = [own, *bench.peers(place), *bench.plain()]
        with subject_of(bench, 10 * MIB, 1) as subject:
            try:
                for number in range(max(bench.runs, 5 if isinstance(place, Folder) else 0)):
                    bench.say(f"fixed cost, round {number + 1}")
                    for way in ways:
                        if not subject.plays(way):
                            continue
                        with subject.turn(way, section) as tree:
                            dumped, restored = _there_and_back(tree, way)
                            # The bound is said of the default store, a folder.
                            bound = SMALL_DUMP if isinstance(place, Folder) else None
                            section.row("dump", bound=bound).add(way.name, dumped.seconds)
                            section.row("restore, until it runs").add(way.name, restored.seconds)
            finally:
                for way in ways:
                    way.clean()
        yield section
    section = Section("start", {"case": "help"})
    own = bench.criuctl(bench.places[0])
    for arguments in (["--help"], ["version"]):
        for number in range(max(bench.runs, 5) + 1):
            seconds = own.command(*arguments, parse=False)[2]
            if number:  # the first one is for the caches
                section.row(
                    f"criuctl {arguments[0]}", bound=HELP if arguments == ["--help"] else None
                ).add(SUBJECT, seconds)
    own.clean()
    yield section


def listing(bench: Bench) -> Iterator[Section]:
    """`criuctl list` of many checkpoints: the first time on this host, and again."""
    for place in bench.places:
        section = Section(
            f"list of {CHECKPOINTS} checkpoints, {place.name}",
            {"case": "list", "store": place.name},
        )
        own = bench.criuctl(place)
        with subject_of(bench, 10 * MIB, 1) as subject, subject.turn(own, section) as tree:
            own.dump(tree, leave_running=True)
        try:
            if subject.plays(own):
                _list(bench, own, place, section)
        finally:
            own.clean()
        yield section


def _list(bench: Bench, own: Criuctl, place: Place, section: Section) -> None:
    environment = own.environment()
    environment["PYTHONPATH"] += f":{PROJECT / 'tests'}"
    bench.say(f"filling a store ({place.name})")
    bench.commands.run(
        [sys.executable, "-m", "bench.fill", "bench", str(CHECKPOINTS - 1)], env=environment
    )
    for _ in range(max(bench.runs, 3)):
        own.forget()
        for label in ("the first time", "again"):
            bound = LIST if isinstance(place, Folder) or label == "again" else None
            answer, _, seconds, _ = own.command("list")
            if len(answer) != CHECKPOINTS:
                raise BenchFailed(
                    f"criuctl lists {len(answer)} checkpoints, there are {CHECKPOINTS}"
                )
            section.row(f"criuctl list, {label}", bound=bound).add(SUBJECT, seconds)


def peak_memory(bench: Bench, sizes: Sequence[int]) -> Iterator[Section]:
    """The most memory (VmHWM) that criuctl and its children had, for one dump and one restore."""
    for place in bench.places:
        for size in sizes:
            section = Section(
                f"peak memory, {size_name(size)}, {place.name}",
                {"case": "rss", "size": size, "store": place.name},
            )
            own = bench.criuctl(place)
            with subject_of(bench, size, 1) as subject, subject.turn(own, section) as tree:
                bench.say("peak memory")
                try:
                    dumped, restored = _there_and_back(tree, own, memory=True)
                finally:
                    own.clean()
                for step, peaks in (("dump", dumped.peaks), ("restore", restored.peaks)):
                    for name, peak in sorted(peaks.items()):
                        if name == bench.binary.name:
                            continue  # the tree itself, on its way from CRIU's hands
                        bound = None if name else PEAK_MIB
                        # CRIU becomes the tree: at a restore, the peak of what bears CRIU's name is
                        # of the tree.
                        about = " (with the tree)" if name and step == "restore" else ""
                        section.row(f"{step}: {name or 'criuctl itself'}{about}", "MiB", bound).add(
                            SUBJECT, peak / MIB
                        )
            yield section
