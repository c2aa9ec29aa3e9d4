"""What a dump does when its tree goes to another host: where it is stored, and who must agree
before it is ended.
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
        """Where the checkpoint is stored; the dump closes it, and whoever made this closes its
        store.
        """

    def frozen(self) -> None:
        """The tree stands still from now on."""

    def hand_over(self, manifest: Manifest, tree: Sequence[ProcessIdentity]) -> None:
        """Inside post-dump, the checkpoint is durable: returns when the other host has the tree,
        whole and held.

        Until it returns the tree is frozen and in no danger; when it raises, the tree goes on here.
        """

    def ended(self, left: Sequence[ProcessIdentity]) -> None:
        """CRIU has killed the tree, of which `left` still run: if none does, it may run on the
        other host.  Never raises.
        """
