"""Check what the memory of a tree needs of a host beyond bytes: huge pages, and room for its
mappings.

CRIU asks for it late, after much else is restored, and fails with no more than ENOMEM.  Private
huge pages that processes have shared since a fork are no longer shared after a restore: CRIU maps
them in each process separately.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from ..criu.images import ImageSet, read
from ..proc.procfs import read_raw
from ..quoting import quoted
from ..report import Finding

_POOLS = "/sys/kernel/mm/hugepages"
# MAP_HUGETLB, MAP_HUGE_SHIFT; memfd_create(2) has the same shift
_HUGETLB, _SIZE_SHIFT, _SIZE_MASK = 0x40000, 26, 0x3F
_NORESERVE = 0x4000
_MFD_HUGETLB = 4
# CRIU: VMA_ANON_SHARED, VMA_AREA_MEMFD, VMA_AREA_SYSVIPC
_SHARED, _MEMFD, _SYSV = 1 << 8, 1 << 14, 1 << 10
_VSYSCALL = 0xFFFFFFFFFF600000  # the kernel does not count it as a mapping
_DEFAULT = 2 << 20


def lacking(images: ImageSet) -> Iterator[Finding]:
    """Report what this host has too little of."""
    limit = int(read_raw("/proc/sys/vm/max_map_count"))
    shared: dict[int, dict[int, int]] = {}  # size of a page -> the number of the memory -> bytes
    private: dict[int, int] = {}  # size of a page -> bytes
    for name in images.names():
        if not name.startswith("mm-"):
            continue
        pid = int(name[len("mm-") : -len(".img")])
        for memory in read(images.folder, name, "MM"):
            count = sum(area.start < _VSYSCALL for area in memory.vmas)
            if count > limit:
                yield Finding(
                    "error",
                    "mappings-used-up",
                    f"it has {count} memory mappings, and a process may have {limit} here "
                    "(vm.max_map_count)",
                    f"Raise the limit: `sysctl vm.max_map_count={quoted(2 * count)}`.",
                    pid=pid,
                )
            for area in memory.vmas:
                if area.flags & _HUGETLB and not area.status & (_MEMFD | _SYSV):
                    size = _size(area.flags)
                    if area.status & _SHARED:
                        known = shared.setdefault(size, {})
                        known[area.shmid] = max(
                            known.get(area.shmid, 0), area.pgoff + area.end - area.start
                        )
                    elif not area.flags & _NORESERVE:
                        private[size] = private.get(size, 0) + area.end - area.start
    for entry in (
        read(images.folder, "memfd.img", "MEMFD_INODE") if images.size("memfd.img") else ()
    ):
        if entry.hugetlb_flag & _MFD_HUGETLB:
            shared.setdefault(_size(entry.hugetlb_flag), {})[-entry.inode_id - 1] = entry.size
    for size in sorted(shared.keys() | private.keys()):
        pages = sum(
            -(-used // size) for used in (*shared.get(size, {}).values(), private.get(size, 0))
        )
        yield from _judge(size, pages)


def _size(flags: int) -> int:
    """Return the size of a huge page from the flags of mmap(2) or memfd_create(2)."""
    shift = flags >> _SIZE_SHIFT & _SIZE_MASK
    return 1 << shift if shift else _default()


def _default() -> int:
    for line in read_raw("/proc/meminfo").decode().splitlines():
        if line.startswith("Hugepagesize:"):
            return int(line.split()[1]) << 10
    return _DEFAULT


def _judge(size: int, pages: int) -> Iterator[Finding]:
    pool = f"{_POOLS}/hugepages-{size >> 10}kB"
    text = f"the tree needs {pages} huge pages of {size >> 10} KiB"
    if size <= resource.getpagesize() or not os.path.isdir(pool):
        yield Finding(
            "error",
            "huge-pages",
            f"{text}, a size that this kernel does not have",
            "Restore it on another host.",
        )
        return
    total, free, reserved, more, surplus = (
        int(read_raw(f"{pool}/{name}"))
        for name in (
            "nr_hugepages",
            "free_hugepages",
            "resv_hugepages",
            "nr_overcommit_hugepages",
            "surplus_hugepages",
        )
    )
    there = free - reserved + max(0, more - surplus)
    if there < pages:
        yield Finding(
            "error",
            "huge-pages",
            f"{text}, and {there} are free here",
            f"Add what is missing: `echo {quoted(total + pages - there)} > "
            f"{quoted(pool)}/nr_hugepages`.",
        )
