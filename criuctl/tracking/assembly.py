"""The memory of a checkpoint, put together of what was read in rounds and what CRIU has sent.

The result is what CRIU would have sent alone: the same runs of pages, in address order, with the
same flags. Pages that CRIU can load later (``PE_LAZY``) are those of private anonymous mappings
that are not locked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from ..checkpoint.buffers import PageBuffer
from ..checkpoint.writer import CheckpointWriter
from ..criu.images import read
from ..criu.pages import (
    PAGE,
    PE_LAZY,
    PE_PRESENT,
    ImageKey,
    PageImage,
    window_sizes,
)
from ..errors import DumpFailed
from .task import Task

_LOCKED = 0x2000  # MAP_LOCKED


class Sent(Struct, eq=False):
    """The sink of CRIU's pages: those of tracked processes become loose pages, all others go their
    usual way.
    """

    writer: CheckpointWriter
    keys: frozenset[ImageKey] = frozenset()
    numbers: dict[ImageKey, array[int]] = field(default_factory=dict)  # in the order they came

    def begin(self, keys: frozenset[ImageKey]) -> None:
        """Expect the pages of a frozen tree; `keys`: the images of tracked processes."""
        self.keys, self.numbers = keys, {}

    def acquire(self) -> PageBuffer:
        """Return a free buffer."""
        return self.writer.acquire()

    def release(self, buffer: PageBuffer) -> None:
        """Take the buffer back."""
        self.writer.release(buffer)

    def window(self, key: ImageKey, buffer: PageBuffer, start: int, end: int, at: int) -> None:
        """Take the next window of the image `key`."""
        if key not in self.keys:
            self.writer.window(key, buffer, start, end, at)
            return
        number = self.writer.loose(buffer, start, end)
        pages = (end - start) // PAGE
        self.numbers.setdefault(key, array("q")).extend(range(number, number + pages))


class _Piece(Struct):
    """A run of pages of the checkpoint, and the numbers of the loose pages."""

    start: int
    flags: int
    numbers: Sequence[int]


def assemble(
    task: Task, image: PageImage, sent: Sequence[int], folder: int, writer: CheckpointWriter
) -> PageImage:
    """Put the stream of a task's memory together; return its shape.

    `image` and `sent`: what CRIU has sent of it. `folder`: CRIU's images.
    """
    pieces = [*_of_criu(image, sent), *_of_rounds(task, _locked(folder, task.inside))]
    pieces.sort(key=lambda piece: piece.start)
    whole, numbers, last = PageImage(image.key), array("q"), 0
    for piece in pieces:
        if piece.start < last:
            raise DumpFailed(
                f"CRIU has dumped memory of PID {task.identity.pid} that was hidden from it"
            )
        whole.add(piece.start, len(piece.numbers), piece.flags)
        numbers.extend(piece.numbers)
        last = piece.start + len(piece.numbers) * PAGE
    windows, at = [], 0
    for size in window_sizes(whole.entries):
        windows.append(numbers[at : at + size // PAGE])
        at += size // PAGE
    writer.put_together(image.key, windows)
    return whole


def _of_criu(image: PageImage, sent: Sequence[int]) -> Iterator[_Piece]:
    at = 0
    for entry in image.entries:
        yield _Piece(entry.vaddr, entry.flags, sent[at : at + entry.pages])
        at += entry.pages


def _of_rounds(task: Task, locked: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    for start, end, number in task.last:
        for low, high, flags in _flagged(start, end, locked):
            if number >= 0:
                first = number + (low - start) // PAGE
                yield _Piece(low, flags, range(first, first + (high - low) // PAGE))
            else:
                yield _Piece(low, flags, task.numbers(low, high))


def _flagged(
    start: int, end: int, locked: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield a range cut at the borders of locked mappings, with CRIU's flags."""
    for low, high in locked:
        if high <= start or low >= end:
            continue
        if start < low:
            yield start, low, PE_PRESENT | PE_LAZY
            start = low
        yield start, min(high, end), PE_PRESENT
        start = min(high, end)
    if start < end:
        yield start, end, PE_PRESENT | PE_LAZY


def _locked(folder: int, number: int) -> list[tuple[int, int]]:
    """Return the ascending mappings of a task that are locked, from CRIU's images."""
    memory: Any = read(folder, f"mm-{number}.img", "MM")[0]
    return [(vma.start, vma.end) for vma in memory.vmas if vma.flags & _LOCKED]
