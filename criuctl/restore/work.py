"""The input of CRIU's part of a restore: the checkpoint, the plan, and the callbacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..config import Config
from ..criu.images import ImageSet
from ..hooks import Hooks
from ..host.holders import RestoredHolder
from ..host.registry import boot_id
from ..report import Reporter
from ..terminals.restored import RestoredTerminals
from .direct_memory import Filling
from .home import NewHome
from .lazy_memory import StoredMemory
from .partners import ALONE, Partners
from .plan import RestorePlan

if TYPE_CHECKING:
    from .devices import RestoredDevices


class RestoreWork(Struct, frozen=True, kw_only=True):
    """One restore, as it was planned."""

    config: Config
    reporter: Reporter
    manifest: Manifest
    plan: RestorePlan
    images: ImageSet
    folder: int  # descriptor of the images' folder
    reader: CheckpointReader
    terminals: RestoredTerminals
    holder: RestoredHolder
    hooks: Hooks
    home: NewHome
    partners: Partners = ALONE
    copy: bool = False  # the original may run
    rewind: bool = False  # files of the workspace are put back
    # folders, and where the tree finds each (`relocation.Moves`)
    shown: tuple[tuple[str, str], ...] = ()
    authentic: bool = False  # no other program than criuctl can have written the checkpoint
    lazy: StoredMemory | None = None  # pages that follow
    filling: Filling | None = None  # pages of an eager restore that CRIU does not bring
    devices: RestoredDevices | None = None  # GPUs, of a tree that uses some
    groups: Mapping[str, str] = field(default_factory=dict)  # see `RestoreRequest`
    streams: Mapping[str, int] = field(default_factory=dict)
    ends_with_root: bool = False  # private namespaces end with the root, also without a holder

    @property
    def pages_follow(self) -> bool:
        """Return whether the tree runs before all of its memory is there."""
        return self.lazy is not None or self.partners.template is not None

    @property
    def at_home(self) -> bool:
        """Return whether the tree comes back as itself, to the host that it left and that was not
        rebooted since.
        """
        return self.manifest.host.boot_id == boot_id() and not self.copy

    @property
    def age(self) -> float | None:
        """Return the seconds since the dump, if the processes around the tree may still be the
        same, under the same PIDs.
        """
        if not self.at_home or self.plan.pids != "same":
            return None
        return time.time() - datetime.fromisoformat(self.manifest.created).timestamp()
