"""Copying chunks into new packs, so that their old packs can be deleted.

Chunks are read and verified, compressed, sealed and put again; then index segments list the new
packs. Nothing is removed here: an interrupted copy leaves packs that are not needed, and the next
garbage collection finds them. What was sealed in a domain (`domains`) is sealed in it again, so
that the host that stored it still recognises it. Memory is bounded: one pack's buffer and some MiB
of plain content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import Damaged, ObjectMissing
from .codec import Compressor
from .packs import PackBuilder, PackIndex, Place, object_name

if TYPE_CHECKING:
    from ..report import Reporter
    from ..store import Buffer
    from .repository import Repository

_PACK = 16 << 20
_AHEAD = 16 << 20  # plain bytes read at once


def copy(
    repository: Repository, sizes: dict[bytes, int], reporter: Reporter
) -> tuple[int, set[bytes]]:
    """Copy these chunks (id -> plain size) into new packs; return the bytes stored, and the
    unreadable chunks.
    """
    made: list[PackIndex] = []
    failed: set[bytes] = set()
    reader = repository.reader(reporter)
    compress = Compressor(repository.config.compression)
    buffer = memoryview(bytearray(_PACK))
    builder: PackBuilder | None = None
    domain = b""
    contents: dict[bytes, tuple[bytes, bytes]] = {}  # chunk -> the pack that it was in, content

    def keep(place: Place, content: Buffer) -> None:
        contents[place.chunk] = place.pack, bytes(content)

    def finish(full: PackBuilder) -> None:
        index, data = full.finish()
        repository.store.put(object_name(index.pack), data)
        made.append(index)

    for batch in _batches(_by_domain(repository, sizes)):
        contents.clear()
        try:
            reader.fetch(batch, keep)
        except (Damaged, ObjectMissing) as error:
            contents.clear()
            for chunk, size in batch.items():
                try:
                    reader.fetch({chunk: size}, keep)
                except (Damaged, ObjectMissing):
                    failed.add(chunk)
            reporter.warning(f"{len(failed)} chunks cannot be copied: {error.message}", error.hint)
        for chunk in filter(contents.__contains__, batch):
            pack, content = contents[chunk]
            sealer = repository.sealer.of_pack(pack)
            if builder is not None and (sealer.domain != domain or not builder.fits(len(content))):
                finish(builder)
                builder = None
            builder, domain = builder or PackBuilder(sealer, buffer), sealer.domain
            codec, payload = compress(content)
            builder.add(chunk, len(content), codec, payload)
    if builder is not None:
        finish(builder)
    if made:
        repository.index.publish(made, [])
    return sum(pack.size for pack in made), failed


def _by_domain(repository: Repository, sizes: dict[bytes, int]) -> dict[bytes, int]:
    """Group the chunks by domain."""
    if not repository.sealer.divided:
        return sizes
    places = repository.index.find(list(sizes), distrusted=True)
    domains = {
        chunk: repository.sealer.of_pack(place.pack).domain for chunk, place in places.items()
    }
    return {
        chunk: sizes[chunk] for chunk in sorted(sizes, key=lambda chunk: domains.get(chunk, b""))
    }


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
