"""Write CRIU's images from a checkpoint into a folder: metadata, page maps and pages.

Every chunk is verified before a byte of it is written, and the manifest is checked against what the
streams hold, so CRIU never sees an image that was not written by a dump of criuctl.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import count

from ..checkpoint.chunk_targets import Targets
from ..checkpoint.chunks import Extent, cut
from ..checkpoint.manifest import Manifest, MemoryImage
from ..checkpoint.opened_chunks import Gathered
from ..checkpoint.reader import CheckpointReader
from ..criu import direct, unshared
from ..criu.images import valid_name
from ..criu.pages import (
    PAGE,
    PE_LAZY,
    ImageKey,
    PagemapEntry,
    unpack_entries,
    window_sizes,
    write_pagemap,
)
from ..errors import Damaged
from ..proc.limits import room_for_descriptors
from . import template_images
from .direct_memory import Filling
from .lazy_memory import StoredMemory
from .template_images import TemplateImage

_SHARED_AT_ONCE = 256  # images of shared memory that are written together
# bytes of CRIU's images, however well they are compressed: those of many thousand equal processes
MAX_IMAGES = 256 << 20
_SMALL = 1024  # pages of a run that is small
_AT_ONCE = 4096  # pages of a task that are in such runs, at most


def write_images(manifest: Manifest, reader: CheckpointReader, folder: int) -> None:
    """Write CRIU's metadata images, out of the one stream that holds them."""
    data = reader.read(manifest.image_data, MAX_IMAGES)
    position = 0
    for image in manifest.images:
        if not valid_name(image.name) or position + image.size > len(data):
            raise Damaged(f"the checkpoint's list of images is wrong at {image.name!r}")
        fd = os.open(
            image.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        with os.fdopen(fd, "wb") as file:
            file.write(memoryview(data)[position : position + image.size])
        position += image.size


def _page_maps(
    manifest: Manifest, reader: CheckpointReader
) -> Iterator[tuple[MemoryImage, list[PagemapEntry]]]:
    """Return each memory image with its page map, checked to fit its pages; those of all processes
    are fetched together.
    """
    reader.check_size([image.entries for image in manifest.memory])
    extents = [reader.extents(image.entries) for image in manifest.memory]
    held = reader.some({part.chunk: part.size for parts in extents for part in parts})
    for image, parts in zip(manifest.memory, extents, strict=True):
        try:
            entries = unpack_entries(
                b"".join(held[chunk][skip : skip + length] for chunk, _size, skip, length in parts)
            )
        except ValueError as error:
            raise Damaged(f"page entries of image {image.id}: {error}") from error
        if sum(window_sizes(entries)) != image.data.size:
            raise Damaged(f"page entries of image {image.id} do not match its pages")
        yield image, entries


def _pages_file(folder: int, number: int) -> int:
    return os.open(
        f"pages-{number}.img",
        os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC,
        0o600,
        dir_fd=folder,
    )


def read_template(manifest: Manifest, reader: CheckpointReader, memory: int) -> list[TemplateImage]:
    """Read the pages of all images into the empty file `memory`; return where they are."""
    images, placements, size = [], [], 0
    kept = template_images.kept(manifest, reader.read(manifest.image_data, MAX_IMAGES))
    for image, entries in _page_maps(manifest, reader):
        if image.kind == "task" and image.id in kept:
            start, end = kept[image.id]
            for entry in entries:
                if entry.vaddr < end and entry.vaddr + entry.pages * PAGE > start:
                    entry.flags &= ~PE_LAZY
        images.append(TemplateImage(ImageKey(image.kind, image.id), entries, size))
        placements.append((image.data, memory, size))
        size += image.data.size
    os.ftruncate(memory, size)
    reader.write_to(placements)
    return images


def write_template(images: Iterable[TemplateImage], memory: int, folder: int) -> None:
    """Write, for a restore with this template, CRIU's page maps and only what cannot wait."""
    for number, image in enumerate(images, start=1):
        write_pagemap(folder, image.key, number, image.entries, lazy=image.key.kind == "task")
        pages = _pages_file(folder, number)
        try:
            for entry, offset in image.runs():
                if not image.follows(entry):
                    _copy(memory, offset, entry.pages * PAGE, pages)
        finally:
            os.close(pages)


def _copy(source: int, offset: int, size: int, target: int) -> None:
    while size:
        count = os.sendfile(target, source, offset, size)
        if not count:
            raise Damaged("a template ends before its last page")
        offset, size = offset + count, size - count


def write_pages(manifest: Manifest, reader: CheckpointReader, folder: int) -> Filling:
    """Write the memory: for each image CRIU's pagemap, and its pages, decoded and verified in
    parallel.

    What can be put straight into the processes is left out: the returned `Filling` does that.
    CRIU's images are in the folder already; those of processes that share no memory with their
    parents are adapted.
    """
    filling = Filling(reader)
    files: dict[int, unshared.TaskPages] = {}
    images = list(_page_maps(manifest, reader))
    tree = direct.tasks(folder)
    tasks = [(image, entries) for image, entries in images if image.kind == "task"]
    shared = [(image, entries) for image, entries in images if image.kind != "task"]
    own = {image.id: image.own for image, _entries in tasks}
    divided = direct.divide(folder, tree, {image.id: entries for image, entries in tasks}, own)
    numbers = count(1)
    with ExitStack() as stack:
        stack.enter_context(room_for_descriptors(len(tasks) + _SHARED_AT_ONCE))
        # There may be more of them than descriptors; those of tasks stay open, to be compared.
        for first in range(0, len(shared) or 1, _SHARED_AT_ONCE):
            with ExitStack() as portion:
                targets = Targets()
                for image, entries in (tasks if not first else []) + shared[
                    first : first + _SHARED_AT_ONCE
                ]:
                    runs = divided.get(image.id) if image.kind == "task" else None
                    if runs is None:
                        runs = [(entry, False) for entry in entries]
                    number = next(numbers)
                    fd = _pages_file(folder, number)
                    (stack if image.kind == "task" else portion).callback(os.close, fd)
                    kept, offset = [], 0
                    parts = cut(
                        reader.extents(image.data), (run.pages * PAGE for run, _directly in runs)
                    )
                    for (run, directly), extents in zip(runs, parts, strict=True):
                        if directly:
                            filling.add(image.id, run.vaddr, extents)
                        else:
                            kept.append(run)
                            targets.add(fd, offset, extents)
                            offset += run.pages * PAGE
                    write_pagemap(folder, ImageKey(image.kind, image.id), number, kept)
                    if image.kind == "task":
                        files[image.id] = unshared.TaskPages(fd, kept)
                reader.write(targets)
        if len(files) > 1:
            unshared.part(folder, tree, files)
    return filling


def lazy_pages(manifest: Manifest, reader: CheckpointReader, folder: int) -> StoredMemory:
    """Write, for a lazy restore, only what cannot wait; return the rest."""
    targets = Targets()
    with ExitStack() as stack:
        maps = list(_page_maps(manifest, reader))
        stack.enter_context(room_for_descriptors(len(maps)))
        memory = StoredMemory(reader)
        for number, (image, entries) in enumerate(maps, start=1):
            fd = _pages_file(folder, number)
            stack.callback(os.close, fd)
            offset = 0
            for entry, extents, follows in _divided(image, entries, reader):
                if follows:
                    memory.add(image.id, entry.vaddr, extents)
                else:
                    targets.add(fd, offset, extents)
                    offset += entry.pages * PAGE
            write_pagemap(
                folder,
                ImageKey(image.kind, image.id),
                number,
                entries,
                lazy=image.kind == "task",
            )
        reader.write(targets)
    return memory


def _divided(
    image: MemoryImage, entries: list[PagemapEntry], reader: CheckpointReader
) -> Iterator[tuple[PagemapEntry, list[Extent], bool]]:
    """Yield each run of pages, where it is stored, and whether it follows."""
    if image.kind == "task":
        _keep_small(entries)
    parts = cut(reader.extents(image.data), (entry.pages * PAGE for entry in entries))
    for entry, extents in zip(entries, parts, strict=True):
        yield entry, extents, image.kind == "task" and bool(entry.flags & PE_LAZY)


def _keep_small(entries: list[PagemapEntry]) -> None:
    """Write small runs of pages at once: they are a program's own variables, which it touches
    early, one by one.
    """
    room = _AT_ONCE
    for entry in sorted((e for e in entries if e.flags & PE_LAZY), key=lambda e: e.pages):
        room -= entry.pages
        if room < 0 or entry.pages > _SMALL:
            return
        entry.flags &= ~PE_LAZY


def lazy_memory(manifest: Manifest, reader: CheckpointReader, gathered: Gathered) -> StoredMemory:
    """Return what `lazy_pages` returns, for another process, which has some of it already."""
    memory = StoredMemory(reader, gathered)
    for image, entries in _page_maps(manifest, reader):
        for entry, extents, follows in _divided(image, entries, reader):
            if follows:
                memory.add(image.id, entry.vaddr, extents)
    return memory
