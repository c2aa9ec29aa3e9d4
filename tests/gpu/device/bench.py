"""criuctl next to the way by hand, with device memory, in the same run.

By hand: the driver's Lock and Checkpoint, `criu dump` to tmpfs, `tar | zstd -1 -T0` into a file;
and `zstd -d | tar`, `criu restore`, the driver's Restore and Unlock.  The program is the same, half
of its memory does not compress.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .commands import Failed, Home
from .driver import CallFailed, Driver
from .place import Place
from .records import Program, Session, lines
from .report import Report
from .running import WORK

CRIU_OPTIONS = ("--tcp-established", "--file-locks", "--ext-unix-sk", "--link-remap", "-v1")
DUMP_ONLY = ("--network-lock", "skip", "--ghost-limit", "256M")
START = 120.0
TARGET_BY_HAND, TARGET_SECOND = 0.8, 0.5
Times = dict[str, float]
Way = Callable[[Home, Program, Path, Driver | None], Times]


def bench(place: Place, report: Report, asked: argparse.Namespace) -> int:
    """Measure in turns; 1 if a target is missed."""
    end = time.monotonic() + asked.limit
    driver = None if asked.no_gpu else Driver()
    program = Program("tensor.py", (str(asked.gib), "half"))
    hand: list[Times] = []
    ours: list[Times] = []
    longest = 0.0
    for number in range(asked.rounds):
        if time.monotonic() + longest * 1.1 > end:
            break
        begun = time.monotonic()
        try:
            hand.append(_with_home(place, program, asked.on, driver, by_hand))
            print(f"round {number + 1}, by hand: {_rounded(hand[-1])}", flush=True)
            ours.append(_with_home(place, program, asked.on, driver, by_criuctl))
            print(f"round {number + 1}, criuctl: {_rounded(ours[-1])}", flush=True)
        except (Failed, CallFailed, subprocess.SubprocessError) as error:
            report.section(_title(asked), f"Round {number + 1} failed: {error}")
            print(f"error: {error}", flush=True)
            return 1
        longest = max(longest, time.monotonic() - begun)
        report.section(_title(asked), table(hand, ours, asked))
    text = table(hand, ours, asked)
    print(text)
    return 0 if "missed" not in text else 1


def _title(asked: argparse.Namespace) -> str:
    return f"Bench: {asked.gib:g} GiB of device memory"


def _rounded(times: Times) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.items())


def _with_home(place: Place, program: Program, on: Path, driver: Driver | None, way: Way) -> Times:
    token = secrets.token_hex(8)
    home = Home(WORK / f"criuctl-gpu-bench-{token}", place, token)
    storage = on / f"criuctl-gpu-storage-{token}"
    for path in (home.path, storage):
        path.mkdir(mode=0o700)
    for name in ("run", "state", "cache", "hooks", "keys"):
        (home.path / name).mkdir(mode=0o700)
    try:
        return way(home, program, storage, driver)
    except Failed as error:
        raise Failed(f"{error}\n{home.logs[-1] if home.logs else ''}") from error
    finally:
        with contextlib.suppress(Exception):
            home.criuctl("kill", "gpu", timeout=15)
        home.clear()
        shutil.rmtree(storage, ignore_errors=True)


def _await(folder: Path, count: int, pid: int = 0) -> None:
    end = time.monotonic() + START
    while len(lines(folder)) < count:
        if time.monotonic() > end or (pid and not os.path.exists(f"/proc/{pid}")):
            output = folder / "output"
            said = output.read_text(errors="replace")[-2000:] if output.exists() else ""
            raise Failed(f"the program does not go on\n{said}")
        time.sleep(0.05)


def by_hand(home: Home, program: Program, storage: Path, driver: Driver | None) -> Times:
    """One dump and one restore without criuctl."""
    zstd = home.place.zstd()
    if zstd is None or shutil.which("tar") is None:
        raise Failed("the way by hand needs tar and zstd")
    folder, images = home.path / "program", home.path / "images"
    folder.mkdir()
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            program.argv(home, folder),
            env=home.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    pid = process.pid
    _await(folder, 3, pid)
    archive = storage / "images.tar.zst"
    times: Times = {}

    def timed(name: str, begun: float) -> None:
        times[name] = time.monotonic() - begun

    begun = time.monotonic()
    if driver:
        times["lock"] = driver.lock(pid)
        times["checkpoint"] = driver.checkpoint(pid)
    images.mkdir()
    dump_begun = time.monotonic()
    _criu(home, "dump", "-t", str(pid), "-D", str(images), *CRIU_OPTIONS, *DUMP_ONLY)
    timed("criu dump", dump_begun)
    packing = time.monotonic()
    _pipe(
        ["tar", "-C", str(images), "-cf", "-", "."], [*zstd, "-q", "-1", "-T0", "-o", str(archive)]
    )
    with archive.open("rb") as file:
        os.fsync(file.fileno())
    timed("tar and zstd", packing)
    timed("dump", begun)
    process.wait()
    shutil.rmtree(images)
    times["stored MiB"] = archive.stat().st_size / (1 << 20)

    begun = time.monotonic()
    images.mkdir()
    _pipe([*zstd, "-q", "-d", "-c", str(archive)], ["tar", "-C", str(images), "-xf", "-"])
    timed("zstd and tar", begun)
    restoring = time.monotonic()
    _criu(home, "restore", "-d", "-D", str(images), *CRIU_OPTIONS)
    timed("criu restore", restoring)
    if driver:
        times["device restore"] = driver.restore(pid)
        times["unlock"] = driver.unlock(pid)
    timed("restore", begun)
    times["total"] = times["dump"] + times["restore"]
    _await(folder, len(lines(folder)) + 3, pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return times


def _criu(home: Home, *words: str) -> None:
    done = subprocess.run(
        [*home.place.criu, *words, "-o", "criu.log"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        log = Path(words[words.index("-D") + 1]) / "criu.log"
        said = log.read_text(errors="replace")[-1500:] if log.exists() else done.stderr[-1500:]
        raise Failed(f"criu {words[0]} ended with {done.returncode}\n{said}")


def _pipe(first: list[str], second: list[str]) -> None:
    with subprocess.Popen(first, stdout=subprocess.PIPE) as source:
        done = subprocess.run(second, check=False, stdin=source.stdout)
    if source.returncode or done.returncode:
        raise Failed(
            f"{first[0]} ended with {source.returncode}, {second[0]} with {done.returncode}"
        )


def by_criuctl(home: Home, program: Program, storage: Path, driver: Driver | None) -> Times:
    """A snapshot, a second one, then one dump into a fresh store and one restore."""
    session = Session(home, program, "gpu", host_pids=True)
    session.go_on(3, START)
    times: Times = {}
    stores = [f"--store={storage / name}" for name in ("snapshots", "dump")]
    for name in ("first snapshot", "second snapshot"):
        answer = home.must("snapshot", session.name, stores[0], timeout=200)
        times[name] = answer.seconds
        report = answer.json["list"][0] if "list" in answer.json else answer.json
        times[f"{name} frozen"] = report["frozen_ms"] / 1000
        session.go_on(3)
    shutil.rmtree(storage / "snapshots", ignore_errors=True)
    dumped = home.must("dump", session.name, stores[1], timeout=200)
    times["dump"] = dumped.seconds
    _phases(times, dumped.json, ("lock", "checkpoint"))
    times["stored MiB"] = dumped.json["bytes"]["stored"] / (1 << 20)
    restored = home.must("restore", session.name, "--detach", stores[1], timeout=200)
    times["restore"] = restored.seconds
    _phases(times, restored.json, ("restore", "unlock"))
    times["total"] = times["dump"] + times["restore"]
    session.go_on(3)
    return times


def _phases(times: Times, report: dict[str, object], names: tuple[str, ...]) -> None:
    gpu = report.get("gpu")
    for name in names:
        if isinstance(gpu, dict) and gpu.get(f"{name}_ms") is not None:
            shown = "device restore" if name == "restore" else name
            times[shown] = float(gpu[f"{name}_ms"]) / 1000


ROWS = (
    "dump",
    "lock",
    "checkpoint",
    "criu dump",
    "tar and zstd",
    "restore",
    "zstd and tar",
    "criu restore",
    "device restore",
    "unlock",
    "total",
    "stored MiB",
    "first snapshot",
    "first snapshot frozen",
    "second snapshot",
    "second snapshot frozen",
)


def table(hand: list[Times], ours: list[Times], asked: argparse.Namespace) -> str:
    """Medians, ratios and targets, in Markdown."""
    if not ours:
        return "No round was completed."

    def median(of: list[Times], row: str) -> float | None:
        values = [times[row] for times in of if row in times]
        return statistics.median(values) if values else None

    def target(ratio: float, most: float) -> str:
        return f"{ratio:.2f} of it; the target, {most:g}, is {'met' if ratio <= most else 'missed'}"

    out = [
        f"Half of the memory does not compress; images and stores on {asked.on}; medians of "
        f"{len(ours)} in turns; seconds.",
        "",
        "| | by hand | criuctl | ratio |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        one, other = median(hand, row), median(ours, row)
        if one is None and other is None:
            continue
        ratio = f"{other / one:.2f}" if one and other else ""
        cells = ["" if value is None else f"{value:.2f}" for value in (one, other)]
        out.append(f"| {row} | {cells[0]} | {cells[1]} | {ratio} |")
    totals = (median(ours, "total") or 0) / (median(hand, "total") or 1)
    snapshots = (median(ours, "second snapshot") or 0) / (median(ours, "first snapshot") or 1)
    out += [
        "",
        f"- Dump and restore compared with by hand: {target(totals, TARGET_BY_HAND)}.",
        f"- Second snapshot compared with the first: {target(snapshots, TARGET_SECOND)}.",
    ]
    return "\n".join(out)
