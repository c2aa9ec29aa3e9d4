"""What a dump does when its tree moves to another host: its store, and the agreement that it needs
before the tree is ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..host.registry import SessionRecord
from ..proc.tree import ProcessIdentity


class Delivery(Protocol):
    """The other host, as `criuctl.dump.story` sees it."""

    def open(self, session: SessionRecord) -> Repository:
        """Open the place of the checkpoint.

        The dump closes what is returned; the caller that made this object closes its store.
        """

    def frozen(self) -> None:
        """Note that the tree is frozen from now on."""

    def hand_over(self, manifest: Manifest, tree: Sequence[ProcessIdentity]) -> None:
        """Wait until the other host has restored the tree and holds it back.

        Called in post-dump, when the checkpoint is durable.  Until it returns the tree is frozen
        and in no danger; when it raises, the tree runs on here.
        """

    def ended(self, left: Sequence[ProcessIdentity]) -> None:
        """Report that CRIU has killed the tree; the processes `left` still run.

        If none is left, the session may run on the other host. Never raises.
        """
