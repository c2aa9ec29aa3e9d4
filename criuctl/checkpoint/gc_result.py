"""The result of a garbage collection, and the removal of objects, with those that the store refuses
to delete.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import asdict

from ..errors import StoreDenied

if TYPE_CHECKING:
    from ..report import Reporter
    from ..store import Store

_DELETERS = 8


class Collected(Struct):
    """The counts of a run, or of what it would do."""

    dry_run: bool = False
    checkpoints: int = 0
    chunks: int = 0  # that they need
    packs: int = 0
    bytes: int = 0  # of all packs, before
    unneeded: int = 0  # packs that no checkpoint needs
    unneeded_bytes: int = 0
    marked: int = 0  # packs newly marked
    waiting: int = 0  # packs not needed whose grace time is not over
    # packs that came within the grace time and that no checkpoint needs, perhaps yet
    young: int = 0
    young_bytes: int = 0
    writers: int = 0  # dumps that are being committed at the moment
    repacked: int = 0  # packs whose needed part was copied
    copied_bytes: int = 0
    deleted: int = 0  # packs
    freed_bytes: int = 0
    spared: int = 0  # doomed packs that are left to the next run
    refused: int = 0  # doomed packs that the store would not delete
    refused_others: int = 0  # other objects that the store would not delete
    segments: int = 0  # index segments replaced or removed
    lost: int = 0  # chunks that checkpoints need and no pack holds
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object with all keys."""
        return asdict(self)


class Removal:
    """Deletes objects; those that the store refuses to delete are reported, and stay."""

    def __init__(self, store: Store, reporter: Reporter, done: Collected) -> None:
        self._store, self._reporter, self._done = store, reporter, done

    def delete(self, names: Iterable[str]) -> set[str]:
        """Delete objects; return those that the store refuses to delete."""
        names = list(names)
        with ThreadPoolExecutor(_DELETERS, "criuctl-gc") as pool:
            fine = list(pool.map(self._delete_or_report, names))
        return {name for name, gone in zip(names, fine, strict=True) if not gone}

    def delete_others(self, names: Iterable[str]) -> int:
        """Delete objects that are not packs; return how many the store refuses to delete."""
        refused = len(self.delete(names))
        self._done.refused_others += refused
        return refused

    def _delete_or_report(self, name: str) -> bool:
        try:
            self._store.delete(name)
        except StoreDenied as error:
            if not any("refuses to delete" in text for text in self._reporter.warnings):
                self._reporter.warning(
                    f"the store refuses to delete {name}: {error.message}",
                    "it is tried again next time",
                )
            return False
        return True
