"""The command line of the bench."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from servers import radosgw
from servers.common import ServerFailed
from support.keeper import Keeper

from criuctl import __version__

from . import cases, interrupts, migrations, screens, sessions, steps, storage, tracking
from .commands import Commands, run_tool
from .errors import BenchFailed
from .places import Bucket, Folder, Place
from .program import MAX_PROCESSES, build
from .report import Section, summary
from .ways import PROJECT, Criu

CASES = (
    "dump",
    "restore",
    "precopy",
    "increment",
    "tracked",
    "fixed",
    "list",
    "rss",
    "store",
    "idle",
    "sessions",
    "steps",
    "screens",
    "migrate",
)
NOTHING_STORED = {
    "sessions",
    "steps",
    "screens",
    "migrate",
    "store",
    "idle",
}  # cases that need no place
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes: ``50M``, ``1.5G``."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 50M or 1G") from None


def _sizes(text: str) -> list[int]:
    sizes = [parse_size(part) for part in text.split(",")]
    if min(sizes) < 1 << 20:
        raise argparse.ArgumentTypeError("a tree has at least 1M")
    return sizes


def _processes(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if not all(0 < number <= MAX_PROCESSES for number in numbers):
        raise argparse.ArgumentTypeError(f"a tree has 1 to {MAX_PROCESSES} processes")
    return numbers


def _simulated(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.isdigit()]
    if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of checkpoints, a comma, and no smaller number of chunks"
        )
    return numbers


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, parsed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Compare criuctl with plain criu and with criu, tar, zstd and a copy: in the "
        "same run, in turn, on the same tree; its sessions with tmux, dtach and a bare PTY; its "
        "migration with criu, rsync and criu. Prints medians, ratios, and whether the bounds are "
        "met. Needs root.",
        epilog=(
            "With no option it takes about fourteen minutes. Results go to stdout, progress to "
            "stderr."
        ),
    )
    parser.add_argument(
        "case", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} or all (the default)"
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help="of the trees [50M,1G; rss: 4G; increment, tracked: the largest]",
    )
    parser.add_argument(
        "--processes",
        type=_processes,
        metavar="LIST",
        default=[1, 100],
        help="of the trees [1,100]",
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", default=3, help="rounds; medians of them are taken [3]"
    )
    parser.add_argument(
        "--store", choices=("local", "s3", "both"), default="both", help="where to store to [both]"
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="restore from the disk, not from its cache, as after a reboot",
    )
    parser.add_argument(
        "--changed-run",
        type=parse_size,
        metavar="SIZE",
        default=4 << 20,
        help="one stretch of changed memory [4M]",
    )
    parser.add_argument(
        "--scattered",
        action="store_true",
        help="of case migrate: the pages that change are all over [in a row]",
    )
    parser.add_argument(
        "--sessions",
        type=int,
        metavar="N",
        default=200,
        help="how many idle, of case sessions [200]",
    )
    parser.add_argument(
        "--flood",
        type=parse_size,
        metavar="SIZE",
        default=256 << 20,
        help="output that is printed there [256M]",
    )
    parser.add_argument(
        "--watch",
        type=float,
        metavar="S",
        default=5.0,
        help="seconds in which the idle ones are watched [5]",
    )
    parser.add_argument(
        "--simulated",
        type=_simulated,
        metavar="N,N",
        default=[10_000, 1_000_000],
        help="checkpoints and chunks of case store",
    )
    parser.add_argument(
        "--snapshots",
        type=int,
        metavar="N",
        default=20,
        help="how many real ones, of case idle [20]",
    )
    parser.add_argument(
        "--disk",
        metavar="DIR",
        default="/var/tmp",
        help="folder on a disk, for stores and images [/var/tmp]",
    )
    parser.add_argument(
        "--tmpfs", metavar="DIR", default="/dev/shm", help="folder on a tmpfs [/dev/shm]"
    )
    parser.add_argument(
        "--criuctl",
        type=shlex.split,
        metavar="COMMAND",
        default=[],
        help="the criuctl to measure [this checkout's]",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parsed = parser.parse_args(argv)
    wanted = parsed.case or ["all"]
    for case in wanted:
        if case not in (*CASES, "all"):
            parser.error(f"there is no case {case!r}")
    parsed.case = list(CASES) if "all" in wanted else wanted
    if parsed.runs < 1:
        parser.error("--runs must be 1 or more")
    return parsed


def machine(criu: Criu) -> dict[str, Any]:
    """What the numbers were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    version = run_tool([*criu.argv, "--version"]).split("\n")[0].removeprefix("Version: ")
    return {
        "criuctl": __version__,
        "criu": version,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "load": os.getloadavg()[0],
    }


def _headline(about: dict[str, Any], runs: int) -> str:
    return (
        f"criuctl {about['criuctl']}, CRIU {about['criu']}, Linux {about['kernel']}, "
        f"{about['cores']} cores, "
        f"{about['memory'] / (1 << 30):.0f} GiB, load {about['load']:.1f}; medians of {runs}"
    )


def _places(options: argparse.Namespace, disk: Path, largest: int, stack: ExitStack) -> list[Place]:
    places: list[Place] = []
    if not {*options.case} - NOTHING_STORED:
        return places
    if options.store in ("local", "both"):
        places.append(Folder(disk / "store"))
    if options.store in ("s3", "both"):
        _say("starting Ceph's S3 gateway")
        try:
            places.append(Bucket(stack.enter_context(radosgw(block=max(8 << 30, 8 * largest)))))
        except ServerFailed as error:
            if options.store == "s3":
                raise BenchFailed(str(error)) from error
            print(f"note: nothing is measured on S3: {error}", file=sys.stderr)
    return places


def _run(options: argparse.Namespace, bench: cases.Bench) -> Iterator[Section]:
    sizes = options.sizes or [50 << 20, 1 << 30]
    if "sessions" in options.case:
        yield from sessions.sessions(bench, options.sessions, options.flood, options.watch)
    if "migrate" in options.case:
        yield from migrations.migrations(bench, sizes[-1], scattered=options.scattered)
    if "store" in options.case:
        yield from storage.old_store(bench, *options.simulated)
    if "steps" in options.case:
        yield from steps.steps(bench)
    if "screens" in options.case:
        yield from screens.screens(bench)
    if "idle" in options.case:
        yield from storage.idle_growth(bench, sizes[-1], options.snapshots)
    if not {*options.case} - NOTHING_STORED:
        return
    cases.warm_up(bench)
    both = [case for case in ("dump", "restore") if case in options.case]
    if both:
        yield from cases.dump_restore(bench, sizes, options.processes, both)
    if "precopy" in options.case:
        yield from cases.precopy(bench, options.sizes or sizes[-1:], options.processes[:1])
    if "increment" in options.case:
        yield from cases.increment(bench, options.sizes or sizes[-1:], options.processes)
    if "tracked" in options.case:
        yield from tracking.tracked(bench, options.sizes or sizes[-1:])
    if "fixed" in options.case:
        yield from cases.fixed(bench)
    if "list" in options.case:
        yield from cases.listing(bench)
    if "rss" in options.case:
        yield from cases.peak_memory(bench, options.sizes or [4 << 30])


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the bench; 0 whatever the numbers are, 1 when something failed."""
    options = arguments(argv)
    if os.geteuid() != 0:
        print("error: the bench needs root, as CRIU does", file=sys.stderr)
        return 1
    interrupts.install()
    # as it is where pip has installed it, whatever Python's options are here
    compileall.compile_dir(PROJECT / "criuctl", quiet=2)
    try:
        with ExitStack() as stack:
            disk = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="criuctl-bench-", dir=options.disk)
                )
            )
            tmpfs = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="criuctl-bench-", dir=options.tmpfs)
                )
            )
            keeper = Keeper()
            stack.callback(keeper.close)
            commands = Commands(keeper, tmpfs)
            criu = Criu(commands)
            about = machine(criu)
            places = _places(options, disk, max(options.sizes or [4 << 30]), stack)
            bench = cases.Bench(
                keeper=keeper,
                commands=commands,
                criu=criu,
                binary=build(disk),
                disk=disk,
                tmpfs=tmpfs,
                places=places,
                runs=options.runs,
                cold=options.cold,
                run_size=options.changed_run,
                program=options.criuctl,
                say=_say,
            )
            if not options.json:
                print(_headline(about, options.runs), flush=True)
            sections = []
            for section in _run(options, bench):
                sections.append(section)
                if not options.json:
                    section.print(sys.stdout)
            if options.json:
                answer = {
                    "machine": about,
                    "runs": options.runs,
                    "sections": [s.to_dict() for s in sections],
                }
                print(json.dumps({**answer, "failures": bench.failures}))
            else:
                print("\n" + "\n".join(summary(sections)))
            return 1 if bench.failures else 0
    except BenchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
