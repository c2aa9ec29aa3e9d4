"""The command line of `scripts/gpu-test`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import bench, pack, place, probe, running
from .report import Report, merge

CHECKOUT = Path(__file__).resolve().parents[3]
OUT = Path("/var/tmp/criuctl-gpu-test")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu-test", description=__doc__)
    parser.set_defaults(no_gpu=False)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="gather what a machine without a network needs")
    packing.add_argument("folder", nargs="?", type=Path, default=CHECKOUT / ".gpu")
    packing.add_argument("--for-python", default="3.12", help="that machine's Python  [3.12]")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--pack", type=Path, default=CHECKOUT / ".gpu", help="the folder of `pack`")
    common.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or OUT))
    common.add_argument("--python", default=sys.executable, help="the Python of the programs")
    cases = commands.add_parser("run", parents=[common], help="run cases, by default all")
    cases.add_argument("case", nargs="*")
    cases.add_argument("--cycles", type=int, help="for every case  [20 for the first two, else 3]")
    cases.add_argument("--jobs", type=int, default=3, help="cases side by side  [3]")
    cases.add_argument("--limit", type=float, default=480, help="seconds for all  [480]")
    cases.add_argument("--no-gpu", action="store_true", help="try the test itself, on the CPU")
    cases.add_argument("--list", action="store_true", help="name the cases")
    measuring = commands.add_parser(
        "bench", parents=[common], help="compare with plain CRIU, by hand"
    )
    measuring.add_argument("--gib", type=float, default=16)
    measuring.add_argument("--rounds", type=int, default=3)
    measuring.add_argument("--limit", type=float, default=540, help="begin no round later")
    measuring.add_argument("--on", type=Path, default=Path("/dev/shm"), help="images and store")
    measuring.add_argument("--no-gpu", action="store_true", help="try the bench, on the CPU")
    merging = commands.add_parser("report", help="write tests/gpu/RESULT.md from several runs")
    merging.add_argument(
        "results", nargs="+", type=Path, help="their results.json, the oldest first"
    )
    probing = commands.add_parser("probe", parents=[common], help="what limits the driver's copy")
    probing.add_argument("--gib", type=float, default=4)
    probing.add_argument(
        "--huge-pages",
        choices=["always", "madvise", "never"],
        help="the host's setting meanwhile; it is put back  [as it is]",
    )
    return parser


def main() -> int:
    """Do what is asked; 1 if a case failed."""
    os.environ.pop("PYTHONPATH", None)
    asked = _arguments().parse_args()
    if asked.command == "pack":
        size = pack.pack(CHECKOUT, asked.folder, asked.for_python)
        print(f"{asked.folder}: {size / (1 << 20):.1f} MiB")
        return 0
    if asked.command == "report":
        merge(asked.results, CHECKOUT / "tests/gpu/RESULT.md")
        return 0
    if asked.command == "run" and asked.list:
        print(*[f"{case.name:20}{case.about}" for case in running.chosen([], gpu=True)], sep="\n")
        return 0
    if asked.no_gpu:
        os.environ["CRIUCTL_GPU_DEVICE"] = "cpu"
    begun = time.monotonic()
    where = place.set_up(CHECKOUT, asked.pack, asked.python)
    print(f"set up in {time.monotonic() - begun:.1f} s; CRIU {where.criu_version}", flush=True)
    result = CHECKOUT / "tests/gpu/RESULT.md"
    with place.machine(where):
        if asked.command == "run":
            some = running.chosen(asked.case, gpu=not asked.no_gpu)
            running.free_memory()
            report = Report([asked.out], where, result)
            failed = running.run_cases(
                where, report, some, jobs=asked.jobs, cycles=asked.cycles, limit=asked.limit
            )
            print(f"{len(some)} cases, {failed} failed; {asked.out}/RESULT.md")
            return 1 if failed else 0
        if asked.command == "bench":
            report = Report([asked.out], where, result)
            return bench.bench(where, report, asked)
        report = Report([asked.out], where, result)
        return probe.probe(where, report, asked.gib, asked.huge_pages)


if __name__ == "__main__":
    sys.exit(main())
