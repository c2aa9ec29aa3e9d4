"""What limits the driver's copy of device memory to host memory: rates, page faults, CPU time, page
sizes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .commands import Failed, Home
from .driver import CallFailed, Driver
from .place import Place
from .records import FOLDER, facts, lines
from .report import Report
from .running import WORK

THP = Path("/sys/kernel/mm/transparent_hugepage")
MIB = 1 << 20


@dataclass(frozen=True)
class Variant:
    """How the memory is held while it is copied."""

    name: str
    processes: int = 1
    block_mib: int = 1024
    options: tuple[str, ...] = ()
    rounds: int = 1


VARIANTS = (
    Variant("one process", rounds=2),
    Variant("one process, blocks of 64 MiB", block_mib=64),
    Variant("one process, no huge pages (prctl)", options=("nothp",)),
    Variant("two processes at once", processes=2),
    Variant("four processes at once", processes=4),
)


def probe(place: Place, report: Report, gib: float, huge_pages: str | None) -> int:
    """Measure all variants, with this setting of the host if one is given; 1 if one failed."""
    with _huge_pages(huge_pages):
        return _probe(place, report, gib)


@contextlib.contextmanager
def _huge_pages(wanted: str | None) -> Iterator[None]:
    setting = THP / "enabled"
    before = _text(setting).partition("[")[2].partition("]")[0]
    if wanted:
        setting.write_text(wanted)
    try:
        yield
    finally:
        if wanted:
            setting.write_text(before)


def _probe(place: Place, report: Report, gib: float) -> int:
    driver = Driver()
    title = f"What limits the driver's copy (huge pages: {_text(THP / 'enabled')})"
    settings = {name: _text(THP / name) for name in ("enabled", "defrag", "shmem_enabled")}
    out = [
        f"{gib:g} GiB in all; huge pages: {settings}.",
        "",
        "| how | checkpoint GB/s | restore GB/s | user s | system s | faults per MiB | huge MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = 0
    for variant in VARIANTS:
        try:
            out += _measure(place, driver, variant, gib)
        except (CallFailed, Failed, OSError) as error:
            failed = 1
            out.append(f"| {variant.name} | {error} | | | | | |")
        print(out[-1], flush=True)
        report.section(title, "\n".join(out))
    try:
        copies = _copies(place)
        out += ["", "Plain copies from the device (cuMemcpyDtoH, 1 GiB), GB/s:", ""]
        out += [f"- {name}: {rate}" for name, rate in copies.items()]
    except Failed as error:
        failed = 1
        out.append(f"\nPlain copies: {error}")
    print("\n".join(out), flush=True)
    report.section(title, "\n".join(out))
    return failed


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return "unknown"


class _Holders:
    """Programs that hold device memory."""

    def __init__(self, place: Place, count: int, arguments: tuple[str, ...]) -> None:
        token = secrets.token_hex(8)
        self.home = Home(WORK / f"criuctl-gpu-probe-{token}", place, token)
        self.home.path.mkdir(mode=0o700)
        self.folders = [self.home.path / str(number) for number in range(count)]
        self.processes = []
        for folder in self.folders:
            folder.mkdir()
            argv = [place.python, str(FOLDER / "hold.py"), str(folder), *arguments]
            with (folder / "output").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(argv, env=self.home.environment(), stdout=log, stderr=log)
                )
        self.pids = [process.pid for process in self.processes]

    def await_steps(self, more: int = 3) -> None:
        """Wait until each has done `more` further steps."""
        end = time.monotonic() + 60
        for folder, process in zip(self.folders, self.processes, strict=True):
            wanted = len(lines(folder)) + more
            while len(lines(folder)) < wanted:
                if process.poll() is not None or time.monotonic() > end:
                    raise Failed(
                        (folder / "output").read_text(errors="replace")[-500:] or "no steps"
                    )
                time.sleep(0.05)

    def end(self) -> None:
        """End them."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.home.clear()


def _measure(place: Place, driver: Driver, variant: Variant, gib: float) -> list[str]:
    share = gib / variant.processes
    block = min(variant.block_mib, int(share * 1024))
    holders = _Holders(place, variant.processes, (str(share), str(block), *variant.options))
    rows = []
    try:
        for number in range(variant.rounds):
            holders.await_steps()
            with ThreadPoolExecutor(variant.processes) as pool:
                list(pool.map(driver.lock, holders.pids))
                before = [_usage(pid) for pid in holders.pids]
                begun = time.monotonic()
                list(pool.map(driver.checkpoint, holders.pids))
                down = time.monotonic() - begun
                after = [_usage(pid) for pid in holders.pids]
                huge = sum(_huge(pid) for pid in holders.pids)
                begun = time.monotonic()
                list(pool.map(driver.restore, holders.pids))
                back = time.monotonic() - begun
                list(pool.map(driver.unlock, holders.pids))
            user, system, faults = (
                sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in range(3)
            )
            size = gib * (1 << 30)
            name = variant.name + (", again" if number else "")
            rates = f"{size / down / 1e9:.2f} | {size / back / 1e9:.2f}"
            times = f"{user:.2f} | {system:.2f} | {faults / (gib * 1024):.1f}"
            rows.append(f"| {name} | {rates} | {times} | {huge / MIB:.0f} |")
        holders.await_steps()
    finally:
        holders.end()
    return rows


def _usage(pid: int) -> tuple[float, float, float]:
    """User seconds, system seconds, and minor faults of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(words[11]) / tick, int(words[12]) / tick, float(words[7])


def _huge(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def _copies(place: Place) -> dict[str, float]:
    holders = _Holders(place, 1, ("1", "1024", "copy"))
    try:
        holders.await_steps()
        return dict(facts(holders.folders[0])["copies"])
    finally:
        holders.end()
