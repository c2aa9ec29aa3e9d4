"""Where the pages of each image are in a template's memory file."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

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
