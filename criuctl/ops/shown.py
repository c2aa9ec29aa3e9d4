"""The result of ``show``: a manifest, and the page maps and environments that were asked for."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ..checkpoint.file_records import FileRecord
from ..checkpoint.manifest import Manifest
from ..errors import Damaged

if TYPE_CHECKING:
    from ..checkpoint.reader import CheckpointReader
    from ..files.predicates import Verdict
    from .storing.contents import Variables

# One entry of a memory image's list: address, pages, flags, as CRIU's page server sends them.
_ENTRY = struct.Struct("<QII")
_FLAGS = ((1, "parent"), (2, "lazy"), (4, "present"))


class Shown(Struct, frozen=True):
    """The result of `show`: a manifest without its lists of chunks, and the memory map if
    requested.
    """

    manifest: Manifest
    store: str
    # by index into manifest.memory
    maps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    environments: dict[int, Variables] | None = None  # by PID in the tree's PID namespace
    # of the workspace and what was carried along, if they were read
    workspace: tuple[FileRecord, ...] | None = None
    values: bool = False  # whether values of variables are shown
    # the write-only host that stored it: fingerprint, label
    writer: dict[str, str] | None = None
    # whether its requirements hold now; commands are not run for that
    predicates: tuple[Verdict, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of ``list``, and everything else in the manifest."""
        m = self.manifest
        body = m.to_dict()
        machine = body["host"]
        memory = []
        for i, image in enumerate(m.memory):
            one: dict[str, Any] = {
                "kind": image.kind,
                "id": image.id,
                "pages": image.pages,
                "bytes": image.data.size,
            }
            if i in self.maps:
                one["maps"] = self.maps[i]
            memory.append(one)
        files = []
        for record in body["files"]:
            data = record.pop("data", None)
            files.append({**record, "carried": data is not None})
        shown = {
            "id": m.id,
            "session": m.session.name,
            "session_id": m.session.id,
            "number": m.number,
            "incarnation": m.incarnation,
            "parent": m.parent,
            "origin": m.extra.get("origin"),
            "created": m.created,
            "store": self.store,
            "host": machine["name"],
            "writer": self.writer,
            "machine": {k: v for k, v in machine.items() if k != "name"},
            "labels": body["labels"],
            "pinned": m.pinned,
            "bytes": body["bytes"],
            "timings": body["timings"],
            "criuctl": body["criuctl"],
            "criu": body["criu"],
            "version": body["version"],
            "features": body["features"],
            "root": body["root"],
            "processes": body["processes"],
            "namespaces": body["namespaces"],
            "memory": memory,
            "images": body["images"]["files"],
            "terminals": body["terminals"],
            "connections": body["connections"],
            "files": files,
            "workspace": self._workspace(),
            "gpu": body["gpu"],
            "predicates": [verdict.to_dict() for verdict in self.predicates],
            "hooks": body["hooks"],
            "warnings": body["warnings"],
        }
        return (
            shown
            if self.environments is None
            else {**shown, "environments": self._environments(self.environments)}
        )

    def _workspace(self) -> dict[str, Any] | None:
        """Return the workspace, with ``entries`` if its files were read."""
        workspace = self.manifest.workspace
        if workspace is None:
            return None
        body: dict[str, Any] = {
            "path": workspace.path,
            "files": workspace.files,
            "bytes": workspace.data.size,
            "left_out": workspace.left_out,
        }
        names = ("path", "size", "mode", "uid", "gid", "mtime_ns", "target", "digest")
        if self.workspace is not None:
            body["entries"] = [
                {name: getattr(record, name) for name in names} for record in self.workspace
            ]
        return body

    def _environments(self, found: Mapping[int, Variables]) -> list[dict[str, Any]]:
        return [
            {
                "pid": p.pid,
                "variables": [
                    {"name": name, "value": value if self.values else None}
                    for name, value in found[p.ns_pid]
                ],
            }
            for p in self.manifest.processes
            if p.ns_pid in found
        ]


def page_maps(manifest: Manifest, reader: CheckpointReader) -> dict[int, list[dict[str, Any]]]:
    """Return the list of pages of each memory image, by its index; raise `Damaged`."""
    reader.check_size([image.entries for image in manifest.memory])
    size = manifest.host.page_size
    return {
        i: page_entries(reader.read(image.entries), size) for i, image in enumerate(manifest.memory)
    }


def page_entries(packed: bytes, page_size: int) -> list[dict[str, Any]]:
    """Return a memory image's list of pages as `show` displays it; raise `Damaged`."""
    if len(packed) % _ENTRY.size:
        raise Damaged("the list of a memory image's pages is cut off")
    return [
        {
            "address": address,
            "pages": pages,
            "bytes": pages * page_size,
            "flags": [name for bit, name in _FLAGS if flags & bit],
        }
        for address, pages, flags in _ENTRY.iter_unpack(packed)
    ]
