"""Huge pages for the memory into which the driver moves a device's contents.

The driver maps new memory in the process and fills it; each of its pages is a page fault, and that
is what limits a checkpoint: on an H200 (driver 580, kernel 6.18) 16 GiB took 7.1 s with small pages
and 4.7 s with huge ones. Where the host gives huge pages on advice only (``madvise``, the default
of most distributions), the process is made to give that advice for the mappings that appear
meanwhile. It is an optimisation, never a condition: failures are ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..errors import CriuctlError
from ..proc import inject
from ..proc.mappings import Mapping, each_mapping

_ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"
_LEAST = 64 << 20  # bytes of a mapping that is worth a call
_PAUSE = 0.01  # seconds between looks
_MOST = 64  # calls for one process
_MADVISE, _MADV_HUGEPAGE = 28, 14


class HugePages:
    """Inside the block, advise huge pages for new large mappings of these processes."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._known = {pid: {m.start for m in _large(pid)} for pid in pids} if _on_advice() else {}
        self._left = dict.fromkeys(self._known, _MOST)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(pid,), daemon=True) for pid in self._known
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, pid: int) -> None:
        with suppress(OSError, CriuctlError):  # it has ended, or cannot be traced
            while not self._stop.wait(_PAUSE) and self._left[pid] > 0:
                new = [m for m in _large(pid) if m.start not in self._known[pid]]
                if new:
                    _advise(pid, new)
                    self._known[pid] |= {m.start for m in new}
                    self._left[pid] -= len(new)


def _on_advice() -> bool:
    try:
        with open(_ENABLED, encoding="ascii") as file:
            return "[madvise]" in file.read()
    except OSError:
        return False


def _large(pid: int) -> list[Mapping]:
    """Return its private anonymous mappings that are large enough."""
    with suppress(CriuctlError):
        return [
            m for m in each_mapping(pid) if m.perms == "rw-p" and not m.inode and m.size >= _LEAST
        ]
    return []


def _advise(pid: int, areas: Sequence[Mapping]) -> None:
    with inject.stopped(pid), inject.calling(pid) as run:
        for area in areas:
            run(_MADVISE, area.start, area.size, _MADV_HUGEPAGE)
