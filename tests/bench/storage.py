"""A store after months: how fast it is listed, pruned and collected, and how it grows while nothing
happens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from .cases import GIB, MIB, Bench, count, size_name
from .errors import BenchFailed
from .places import Folder, Place
from .report import SUBJECT, Bound, Section
from .ways import PROJECT, Criuctl

# The bounds that criuctl is held to.
LIST_SESSION = Bound(0.5)
PRUNE_PLAN = Bound(5)
PEAK_MIB = Bound(500)
HUNDRED_DAYS = Bound(3.0)

_DAYS, _HOURS = 100, 24
_WARM = 3  # snapshots before growth is measured


def old_store(bench: Bench, checkpoints: int, chunks: int) -> Iterator[Section]:
    """A simulated store in each place: list, prune, garbage collection; plans for the first time on
    this host, and again.
    """
    for place in bench.places:
        yield _old_store(bench, place, checkpoints, chunks)


def _old_store(bench: Bench, place: Place, checkpoints: int, chunks: int) -> Section:
    title = f"store of {checkpoints} checkpoints and {chunks} chunks (simulated), {place.name}"
    section = Section(
        title,
        {"case": "store", "checkpoints": checkpoints, "chunks": chunks, "store": place.name},
    )
    own = bench.criuctl(place)
    try:
        bench.say(f"simulating a store of {count(checkpoints, 'checkpoint', 'checkpoints')}")
        environment = own.environment()
        environment["PYTHONPATH"] += f":{PROJECT / 'tests'}"
        place.empty("criuctl")
        bench.commands.run(
            [sys.executable, "-m", "bench.simulated", str(checkpoints), str(chunks)],
            env=environment,
        )
        for label, *command in (
            ("list of a session", "list", "simulated-0"),
            ("list of everything", "list"),
            ("plan of a prune", "prune", "--keep-last", "25", "--dry-run"),
            ("plan of a gc", "gc", "--grace", "0", "--dry-run"),
        ):
            own.forget()
            for when in ("the first time", "again"):
                _measure(bench, own, section, f"{label}, {when}", *command)
        _measure(bench, own, section, "prune of a half", "prune", "--keep-last", "25")
        left = _measure(
            bench, own, section, "gc of it, and of what is small", "gc", "--grace", "0"
        )["checkpoints"]
        _measure(bench, own, section, "gc of nothing", "gc", "--grace", "0")
        if left != len(own.command("list")[0]):
            raise BenchFailed("a collection has seen other checkpoints than are listed")
        own.command("verify", "simulated-0")
    except BenchFailed as error:
        section.failures.append(str(error))
        bench.failures.append(f"{title}: {error}")
    finally:
        own.clean()
    return section


def _measure(
    bench: Bench, own: Criuctl, section: Section, label: str, *command: str
) -> dict[str, int]:
    bench.say(label)
    answer, _, seconds, peaks = own.command(*command, memory=True)
    bound = {"list of a session": LIST_SESSION, "plan of a prune": PRUNE_PLAN}.get(
        label.partition(",")[0]
    )
    section.row(label, bound=bound).add(SUBJECT, seconds)
    section.row(f"{label}: peak", "MiB", PEAK_MIB).add(SUBJECT, peaks.get("", 0) / MIB)
    return answer if isinstance(answer, dict) else {}


def idle_growth(bench: Bench, size: int, snapshots: int) -> Iterator[Section]:
    """What snapshots of a tree that does nothing add to a store, and what hourly ones come to after
    a hundred days.
    """
    place = Folder(bench.disk / "growing")
    own = bench.criuctl(place)
    tree = bench.tree(size, 1)
    section = Section(
        f"snapshots of an idle tree of {size_name(size)}, local", {"case": "idle", "size": size}
    )
    try:
        for number in range(_WARM):
            own.dump(tree, leave_running=True)
            if not number:
                first = place.size("criuctl")
        before = place.size("criuctl")
        for number in range(snapshots):
            bench.say(f"snapshot {number + 1} of {snapshots}")
            own.dump(tree, leave_running=True)
        each = (place.size("criuctl") - before) / snapshots
        section.row("the first one", "MiB").add(SUBJECT, first / MIB)
        section.row("each further one", "KiB").add(SUBJECT, each / 1024)
        whole = (first + each * (_DAYS * _HOURS - 1)) / GIB
        section.row(f"{_DAYS} days of hourly ones, none removed", "GiB", HUNDRED_DAYS).add(
            SUBJECT, whole
        )
    except BenchFailed as error:
        section.failures.append(str(error))
        bench.failures.append(f"{section.title}: {error}")
    finally:
        tree.end()
        own.clean()
    yield section
