"""What a restore works together with; most restores work alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ..host.group_member import RestoredMember
from ..session.launch.daemon import WarmHolders
from .page_feeder import Feeder
from .template import Template


class Partners(Struct, frozen=True, kw_only=True):
    """A host that the tree comes from, other restores of a group, a template of many copies."""

    # called, with the outcomes of the connections, when everything is in place and nothing has run:
    # when it returns, the tree runs; when it raises, nothing is left
    held: Callable[[list[dict[str, Any]]], None] | None = None
    feeder: Feeder | None = None  # brings pages that follow, from another host
    template: Template | None = None  # has the pages of this checkpoint
    warm: WarmHolders | None = None  # starts the holder
    group: RestoredMember | None = None  # the tree runs when all of them are restored, or never


ALONE = Partners()
