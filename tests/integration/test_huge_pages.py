"""Huge pages and mappings that a host has too few of: a restore says so in its plan, not when CRIU
fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Criuctl
from support.obstacles import HUGE, USED_UP, running

pytestmark = pytest.mark.integration

POOL = Path(HUGE) / "nr_hugepages"
MAPPED = """
m = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000); m[:4] = b"abcd"
s = mmap.mmap(-1, 2 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000); s[:4] = b"efgh"
f = os.memfd_create("h", os.MFD_HUGETLB); os.ftruncate(f, 2 << 20)
a = mmap.mmap(f, 2 << 20); a[:4] = b"ijkl"
child(lambda: None)
"""
NEEDED = 6  # the private ones in both processes


@pytest.fixture
def pool() -> Iterator[int]:
    """How many pages there are without the test's own; the test may have as many of them as it
    needs.
    """
    if not POOL.exists():
        pytest.skip(f"this machine has no {POOL}")
    before = int(POOL.read_text())
    yield before
    POOL.write_text(str(before))


def test_missing_huge_pages_are_reported_before_anything(
    pool: int, criuctl: Criuctl, tmp_path: Path
) -> None:
    POOL.write_text(str(pool + NEEDED + 1))  # CRIU takes one to look at a memfd
    with running(MAPPED, tmp_path) as program:
        criuctl("dump", program.pid, "--name", "huge")
    POOL.write_text(str(pool))
    free = int((POOL.parent / "free_hugepages").read_text()) - int(
        (POOL.parent / "resv_hugepages").read_text()
    )
    planned = criuctl("restore", "huge", "--dry-run", check=False)
    (finding,) = [f for f in planned["findings"] if f["level"] == "error"]
    assert finding["code"] == "huge-pages"
    assert f"needs {NEEDED} huge pages of 2048 KiB, and {free} are free" in finding["text"]
    assert f"`echo {pool + NEEDED - free} > {POOL}`" in finding["hint"]
    refused = criuctl("restore", "huge", check=False)
    assert refused["exit_code"] == 4 and refused["error"]["findings"] == [finding]
    POOL.write_text(finding["hint"].partition("echo ")[2].split()[0])
    restored = criuctl("restore", "huge")
    with (
        open(f"/proc/{restored['pid']}/maps") as maps,
        open(f"/proc/{restored['pid']}/mem", "rb") as memory,
    ):
        starts = [
            int(line.partition("-")[0], 16) for line in maps if "huge" in line or "memfd:h" in line
        ]
        found = set()
        for start in starts:
            memory.seek(start)
            found.add(memory.read(4))
    assert found == {b"abcd", b"efgh", b"ijkl"}
    criuctl("kill", "huge")


def test_a_host_that_allows_fewer_mappings(criuctl: Criuctl, tmp_path: Path) -> None:
    limit = Path("/proc/sys/vm/max_map_count")
    before = int(limit.read_text())
    with running(USED_UP.format(left=9), tmp_path) as program:
        criuctl("dump", program.pid, "--name", "many")
    try:
        limit.write_text(str(before - 1000))
        planned = criuctl("restore", "many", "--dry-run", check=False)
    finally:
        limit.write_text(str(before))
    (finding,) = [f for f in planned["findings"] if f["level"] == "error"]
    assert finding["code"] == "mappings-used-up" and "`sysctl vm.max_map_count=" in finding["hint"]
    criuctl("restore", "many")
    criuctl("kill", "many")
