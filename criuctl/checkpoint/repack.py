"""Copying chunks into new packs, so that the packs they were in can go.

Chunks are read and verified, compressed and sealed anew and put; then index segments tell of the new packs.  Nothing is
removed here: a copy that is cut off anywhere leaves packs that nobody needs, and the next garbage collection finds them.
Memory is bounded: one pack's buffer and some MiB of plain content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import Damaged, ObjectMissing
from .codec import Compressor
from .packs import PackBuilder, PackIndex, object_name

if TYPE_CHECKING:
    from ..report import Reporter
    from .repository import Repository

_PACK = 16 << 20
_AHEAD = 16 << 20  # plain bytes read at once


def copy(repository: Repository, sizes: dict[bytes, int], reporter: Reporter) -> tuple[int, set[bytes]]:
    """Copy these chunks (id -> plain size) into new packs; returns the bytes stored, and the chunks that cannot be read."""
    made: list[PackIndex] = []
    failed: set[bytes] = set()
    reader = repository.reader(reporter)
    compress = Compressor(repository.config.compression)
    buffer = memoryview(bytearray(_PACK))
    builder: PackBuilder | None = None

    def finish(full: PackBuilder) -> None:
        index, data = full.finish()
        repository.store.put(object_name(index.pack), data)
        made.append(index)

    for batch in _batches(sizes):
        try:
            contents = reader.some(batch)
        except (Damaged, ObjectMissing) as error:
            contents = {}
            for chunk, size in batch.items():
                try:
                    contents.update(reader.some({chunk: size}))
                except (Damaged, ObjectMissing):
                    failed.add(chunk)
            reporter.warning(f"{len(failed)} chunks cannot be copied: {error.message}", error.hint)
        for chunk, content in contents.items():
            if builder is not None and not builder.fits(len(content)):
                finish(builder)
                builder = None
            builder = builder or PackBuilder(repository.sealer, buffer)
            codec, payload = compress(content)
            builder.add(chunk, len(content), codec, payload)
    if builder is not None:
        finish(builder)
    if made:
        repository.index.publish(made, [])
    return sum(pack.size for pack in made), failed


def _batches(sizes: dict[bytes, int]) -> list[dict[bytes, int]]:
    batches: list[dict[bytes, int]] = []
    fill = _AHEAD
    for chunk, size in sizes.items():
        if fill + size > _AHEAD:
            batches.append({})
            fill = 0
        batches[-1][chunk] = size
        fill += size
    return batches
