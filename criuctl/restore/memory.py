"""The memory of a restore: all of it before the tree runs, or lazily, when it is touched."""

from __future__ import annotations

from contextlib import ExitStack

from msgspec import Struct

from ..errors import RestoreFailed
from ..report import Reporter
from . import materialise
from .direct_memory import Filling
from .lazy_memory import StoredMemory, worthwhile
from .partners import Partners
from .request import RestoreRequest
from .source import Source, Unpacked


class Memory(Struct):
    """Where the pages of the tree come from."""

    lazy: StoredMemory | None = None  # pages that follow
    filling: Filling | None = None  # pages that are put straight into the processes


def bring(
    request: RestoreRequest,
    found: Source,
    unpacked: Unpacked,
    partners: Partners,
    reporter: Reporter,
    stack: ExitStack,
) -> Memory:
    """Begin to bring the memory; `RestoreFailed` if the host has no room for the images.

    `stack` stops what was begun.
    """
    reporter.step("pages")
    manifest, reader, folder = found.manifest, unpacked.reader, unpacked.folder
    feeder = partners.feeder
    if partners.template is not None:
        partners.template.write_images(folder)
        return Memory()
    lazy = request.lazy
    if lazy is None:
        lazy = feeder is not None and worthwhile(manifest.memory, reader)
    memory = Memory()
    if lazy:
        memory.lazy = materialise.lazy_pages(manifest, reader, folder)
        if feeder is not None:
            feeder.load(manifest, folder)
    else:
        memory.filling = materialise.write_pages(manifest, reader, folder)
        stack.callback(memory.filling.stop)
        memory.filling.begin()
    if unpacked.scratch.free_bytes() == 0:
        raise RestoreFailed(
            "memory for the images ran out",
            hint="The host has too little free memory for this checkpoint.",
        )
    return memory
