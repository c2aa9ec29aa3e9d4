"""What the kernel does to memory by itself, switched on for a campaign and put back afterwards."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

KSM = Path("/sys/kernel/mm/ksm")
BALANCING = Path("/proc/sys/kernel/numa_balancing")
COMPACT = Path("/proc/sys/vm/compact_memory")
SWAP_MIB = 512


class Lacking(Exception):
    """This machine does not have it, and why."""


class Machine:
    """The kinds that are switched on, and those that this machine does not have."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.on: list[str] = []
        self.lacking: dict[str, str] = {
            "io_uring": "CRIU does not dump it",
            "userfaultfd of the program": "CRIU does not dump it; see the tests for its calls",
        }
        for name, kind in KINDS.items():
            try:
                stack.enter_context(kind(folder))
                self.on.append(name)
            except (Lacking, OSError, subprocess.SubprocessError) as error:
                self.lacking[name] = str(error)

    def limit(self, pid: int) -> str:
        """Put a process into a memory cgroup that is a little too small; return its folder, or ""
        where there is none.
        """
        if "swap" not in self.on or "memory cgroup at its limit" not in self.on:
            return ""
        group = CGROUPS / f"campaign-{os.getpid()}"
        (group / "memory.limit_in_bytes").write_text(str(48 << 20))
        with suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid))
        return str(group)


CGROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def _value(path: Path, value: str) -> Iterator[None]:
    before = path.read_text().split()[0]
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def huge_pages(_folder: Path) -> Iterator[None]:
    """Transparent huge pages, for memory that asks for them."""
    chosen = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in chosen:
        raise Lacking("transparent huge pages are off")
    yield


@contextmanager
def merging(_folder: Path) -> Iterator[None]:
    """KSM, fast."""
    if not KSM.exists():
        raise Lacking("the kernel has no KSM")
    with _value(KSM / "sleep_millisecs", "5"), _value(KSM / "run", "1"):
        yield


@contextmanager
def swapping(folder: Path) -> Iterator[None]:
    """A swap file of its own."""
    file = folder / "swap"
    with file.open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, SWAP_MIB << 20)
    file.chmod(0o600)
    for command in ("mkswap", "swapon"):
        subprocess.run([command, str(file)], check=True, timeout=120, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(file)], check=True, timeout=300)
        file.unlink()


@contextmanager
def limited(_folder: Path) -> Iterator[None]:
    """A memory cgroup (version 1)."""
    group = CGROUPS / f"campaign-{os.getpid()}"
    if not (CGROUPS / "tasks").exists():
        raise Lacking("there is no memory cgroup of version 1")
    group.mkdir()
    try:
        yield
    finally:
        with suppress(OSError):
            group.rmdir()


@contextmanager
def balancing(_folder: Path) -> Iterator[None]:
    """NUMA balancing."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        raise Lacking("one NUMA node")
    with _value(BALANCING, "1"):
        yield


@contextmanager
def compacting(_folder: Path) -> Iterator[None]:
    """Compaction, again and again."""
    if not COMPACT.exists():
        raise Lacking("the kernel has no compaction")
    COMPACT.write_text("1")
    end = threading.Event()

    def run() -> None:
        while not end.wait(1.0):
            COMPACT.write_text("1")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


KINDS = {
    "huge pages": huge_pages,
    "KSM": merging,
    "swap": swapping,
    "memory cgroup at its limit": limited,
    "NUMA balancing": balancing,
    "compaction": compacting,
}
