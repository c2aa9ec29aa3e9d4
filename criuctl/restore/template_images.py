"""Where each image's pages are in a template's memory file, and which of them cannot follow."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ..checkpoint.manifest import Manifest
from ..criu.images import parse
from ..criu.pages import PAGE, PE_LAZY, ImageKey, PagemapEntry
from ..proc.served_pages import Span


class TemplateImage(Struct, frozen=True):
    """One page map of the checkpoint, and where its pages are."""

    key: ImageKey
    entries: list[PagemapEntry]
    offset: int  # of its first page, in bytes

    def runs(self) -> Iterator[tuple[PagemapEntry, int]]:
        """Yield each run of pages with its offset."""
        offset = self.offset
        for entry in self.entries:
            yield entry, offset
            offset += entry.pages * PAGE

    def follows(self, entry: PagemapEntry) -> bool:
        """Return whether these pages are left to the keeper."""
        return self.key.kind == "task" and bool(entry.flags & PE_LAZY)

    def spans(self) -> list[Span]:
        """Return the pages that follow, by address."""
        return [
            Span(entry.vaddr, entry.vaddr + entry.pages * PAGE, offset)
            for entry, offset in self.runs()
            if self.follows(entry)
        ]


def kept(manifest: Manifest, data: bytes) -> dict[int, tuple[int, int]]:
    """Return, for each task of the images in `data`, the mapping with its arguments and
    environment: its stack.

    They are read from outside (``/proc/PID/environ``), and the kernel reports a page that is
    missing then as an error.
    """
    found: dict[int, tuple[int, int]] = {}
    position = 0
    for image in manifest.images:
        content = data[position : position + image.size]
        position += image.size
        if not image.name.startswith("mm-"):
            continue
        for memory in parse(content, image.name, "MM"):
            for area in memory.vmas:
                if area.start < memory.mm_env_end <= area.end:
                    pid = int(image.name.removeprefix("mm-").removesuffix(".img"))
                    found[pid] = (area.start, area.end)
    return found
