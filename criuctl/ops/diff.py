"""The differences between two checkpoints of one store: processes, descriptors, connections, files,
memory.

They are found from the two manifests, CRIU's small images (descriptors and mappings) and the names
of chunks; see `storing.diff_parts` and `storing.diff_memory`. The memory itself is read only if
pages are to be counted exactly, and then only where it differs. The checkpoints may be of different
sessions: `diff_parts.pair` decides what is compared with what.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from msgspec import Struct

from ..checkpoint.chunks import StreamRef
from ..checkpoint.file_records import FileRecord
from ..checkpoint.manifest import Manifest, MemoryImage
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.repository import Repository
from ..config import Config
from ..criu import image_records
from ..criu.image_records import Area
from ..errors import Damaged, PlatformError
from ..report import Reporter
from ..store import open_store
from .storing import diff_parts
from .storing.contents import Images, memory_windows
from .storing.diff_memory import Region, Windows, compare
from .storing.diff_parts import Pairing, Part

_IDENTITY = ("id", "number", "incarnation", "created", "labels")
_HOST = ("name", "kernel", "os", "cpu_model", "boot_id")


class Space(Struct, frozen=True):
    """The memory of one process, or of a shared object, in both checkpoints."""

    kind: str  # task, shmem
    # the PID in the tree's namespace, or the object's id; None if only the other checkpoint has it
    before: int | None
    after: int | None
    regions: list[Region]

    def total(self, name: str) -> int:
        """Return the bytes of all regions: before, after, changed, added or removed."""
        return sum(getattr(region, name) for region in self.regions)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON: regions that differ, and the sums of all."""
        differing = [r.to_dict() for r in self.regions if r.changed or r.added or r.removed]
        ids = {"kind": self.kind, "before_id": self.before, "after_id": self.after}
        return {**ids, **{name: self.total(name) for name in _AMOUNTS}, "regions": differing}


_AMOUNTS = ("before", "after", "changed", "added", "removed")


class Difference(Struct, frozen=True):
    """The result of `diff`."""

    store: str
    before: Manifest
    after: Manifest
    processes: Part
    descriptors: Part
    connections: Part
    files: Part
    spaces: list[Space]
    exact: bool
    warnings: list[str]

    @property
    def parts(self) -> dict[str, Part]:
        """Return the parts, by the names that people and programs see."""
        names = ("processes", "descriptors", "connections", "files")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        memory = {name: sum(space.total(name) for space in self.spaces) for name in _AMOUNTS}
        same = not any(part.differs for part in self.parts.values())
        same = same and not (memory["changed"] or memory["added"] or memory["removed"])
        return {
            "store": self.store,
            "before": _about(self.before),
            "after": _about(self.after),
            "same": same,
            "about": _changed_about(self.before, self.after),
            **{name: part.to_dict() for name, part in self.parts.items()},
            "memory": {**memory, "exact": self.exact, "spaces": [s.to_dict() for s in self.spaces]},
            "warnings": self.warnings,
        }


def _about(m: Manifest) -> dict[str, Any]:
    return {
        "session": m.session.name,
        "session_id": m.session.id,
        **{name: getattr(m, name) for name in _IDENTITY},
    }


def _changed_about(before: Manifest, after: Manifest) -> list[dict[str, Any]]:
    """Return the differences in where and how the checkpoints were taken."""
    rows = [(name, getattr(before.host, name), getattr(after.host, name)) for name in _HOST]
    rows += [
        ("criu", before.criu.get("version"), after.criu.get("version")),
        ("criuctl", before.criuctl, after.criuctl),
    ]
    rows += [
        (f"namespace {kind}", before.namespaces.get(kind), after.namespaces.get(kind))
        for kind in sorted(_kinds(before, after))
    ]
    return [
        {"what": "host" if what == "name" else what, "before": a, "after": b}
        for what, a, b in rows
        if a != b
    ]


def _kinds(*manifests: Manifest) -> set[str]:
    return {kind for manifest in manifests for kind in manifest.namespaces}


def diff(
    config: Config, before: str, after: str, *, exact: bool = False, reporter: Reporter
) -> Difference:
    """Compare two checkpoints; with `exact` pages are read and counted where memory differs."""
    store = open_store(config.store, config)
    try:
        with Repository.open(store, config) as repository:
            reporter.step("manifests", before=before, after=after)
            reader = repository.reader(reporter)
            old, new = (
                _Side(repository.manifest(ref), reader, reporter) for ref in (before, after)
            )
            found = diff_parts.pair(old.manifest, new.manifest)
            reporter.step("compare")
            return Difference(
                store=store.url,
                before=old.manifest,
                after=new.manifest,
                processes=diff_parts.processes(found),
                descriptors=diff_parts.descriptors(old.descriptors, new.descriptors, found),
                connections=diff_parts.connections(
                    old.manifest.connections, new.manifest.connections, found
                ),
                files=diff_parts.files(
                    old.manifest.files,
                    new.manifest.files,
                    lambda a, b: _changed_bytes(reader, a, b),
                ),
                spaces=list(_spaces(old, new, found, reader if exact else None)),
                exact=exact,
                warnings=list(reporter.warnings),
            )
    finally:
        store.close()


class _Side:
    """One of the two checkpoints; its parts are read when they are needed."""

    def __init__(self, manifest: Manifest, reader: CheckpointReader, reporter: Reporter) -> None:
        self.manifest = manifest
        self._reader = reader
        self._images = Images(manifest, reader)
        self._reporter = reporter

    @cached_property
    def descriptors(self) -> dict[int, dict[int, image_records.OpenFile]]:
        """Return PID -> descriptor -> its file; empty where the images cannot be understood."""
        try:
            return image_records.descriptors(self._images.get)
        except (PlatformError, Damaged) as error:
            self._warn_missing("descriptors are not compared", error)
            return {}

    @cached_property
    def areas(self) -> dict[int, list[Area]]:
        """Return PID -> mappings by address; empty where the images cannot be understood."""
        try:
            return image_records.areas(self._images.get)
        except (PlatformError, Damaged) as error:
            self._warn_missing("memory is shown by address only", error)
            return {}

    def windows(self, image: MemoryImage) -> Windows:
        """Return the windows of one memory image; raise `Damaged`."""
        return memory_windows(image, self._reader)

    def _warn_missing(self, what: str, error: PlatformError | Damaged) -> None:
        m = self.manifest
        self._reporter.warning(f"{m.session.name}@{m.number}: {what}: {error.message}", error.hint)


def _changed_bytes(reader: CheckpointReader, before: FileRecord, after: FileRecord) -> int:
    """Return the bytes of the second file's pieces that the first file does not have at the same
    place.
    """

    def pieces(ref: StreamRef | None) -> dict[tuple[int, bytes], int]:
        found, position = {}, 0
        for chunk, size in reader.entries(ref) if ref is not None else ():
            found[position, chunk] = size
            position += size
        return found

    old, new = pieces(before.data), pieces(after.data)
    return sum(size for piece, size in new.items() if piece not in old)


def _spaces(
    old: _Side, new: _Side, found: Pairing, exact: CheckpointReader | None
) -> Iterator[Space]:
    """Return the address spaces: those of paired processes, and shared objects of the same id, the
    others in order.
    """
    images: list[tuple[MemoryImage | None, MemoryImage | None]] = []
    for kind in ("task", "shmem"):
        left = [image for image in old.manifest.memory if image.kind == kind]
        right = {image.id: image for image in new.manifest.memory if image.kind == kind}
        partner = found.after() if kind == "task" else _shared(left, list(right.values()))
        images += [
            (image, right.pop(partner[image.id], None) if image.id in partner else None)
            for image in left
        ]
        images += [(None, image) for image in right.values()]
    for before, after in images:
        if (
            before is not None
            and after is not None
            and (before.data, before.entries) == (after.data, after.entries)
        ):
            yield _unchanged(before, after)
            continue
        areas = (_areas(old, before), _areas(new, after))
        regions = compare(
            old.windows(before) if before else {}, new.windows(after) if after else {}, areas, exact
        )
        one = before or after
        yield Space(
            one.kind if one else "",
            before.id if before else None,
            after.id if after else None,
            regions,
        )


def _unchanged(before: MemoryImage, after: MemoryImage) -> Space:
    """Return whether nothing needs to be read for this."""
    return Space(
        before.kind, before.id, after.id, [Region(0, 0, "", before.data.size, after.data.size)]
    )


def _areas(side: _Side, image: MemoryImage | None) -> list[Area]:
    return [] if image is None or image.kind != "task" else side.areas.get(image.id, [])


def _shared(before: list[MemoryImage], after: list[MemoryImage]) -> dict[int, int]:
    """Pair shared objects: by the same id, then by size; a restore gives them other ids."""
    same = {image.id for image in before} & {image.id for image in after}
    left = sorted((i for i in before if i.id not in same), key=lambda i: (i.pages, i.id))
    right = sorted((i for i in after if i.id not in same), key=lambda i: (i.pages, i.id))
    return {**{i: i for i in same}, **{a.id: b.id for a, b in zip(left, right, strict=False)}}


__all__ = ["Difference", "Space", "diff"]
