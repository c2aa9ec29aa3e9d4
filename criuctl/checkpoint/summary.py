"""The summary of a checkpoint: what a list shows of it.

It is stored in front of the manifest in the same object (its *head*), so that a list reads no whole
manifest (`catalog`).
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from .manifest import Manifest
from .records import ID, SESSION_NAME, Record, check_pattern


class CheckpointSummary(Record, frozen=True):
    """What a list shows of a checkpoint; `object` is the name of its manifest in the store."""

    id: str
    session: str
    session_id: str
    number: int
    incarnation: int
    created: str
    host: str
    bytes: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    processes: int = 0
    object: str = ""

    def check(self, where: str) -> None:
        check_pattern(ID, self.id, f"{where}.id")
        check_pattern(SESSION_NAME, self.session, f"{where}.session")

    @classmethod
    def of(cls, manifest: Manifest, object: str) -> CheckpointSummary:
        """Return the summary of `manifest`, stored as `object`."""
        return cls(
            id=manifest.id,
            session=manifest.session.name,
            session_id=manifest.session.id,
            number=manifest.number,
            incarnation=manifest.incarnation,
            created=manifest.created,
            host=manifest.host.name,
            bytes=dict(manifest.bytes),
            labels=dict(manifest.labels),
            pinned=manifest.pinned,
            processes=len(manifest.processes),
            object=object,
        )

    def to_stored(self) -> dict[str, Any]:
        """Return all fields, as kept in the store."""
        return Record.to_dict(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the command line's contract."""
        kept = (
            "id",
            "session",
            "number",
            "incarnation",
            "created",
            "host",
            "bytes",
            "labels",
            "pinned",
        )
        return {key: getattr(self, key) for key in kept}
