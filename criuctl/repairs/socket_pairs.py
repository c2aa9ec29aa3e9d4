"""Pairs of unix sockets whose ends several processes share.

CRIU begins with the end that comes later in files.img, in the lowest PID that has it, and needs the
other end made in the same process.  If that process has the other end as well, but one of a lower
PID has it first, the restore fails.  So each pair begins with the end that the lowest PID has.
"""

from __future__ import annotations

from .base import Repair, RestoreImages


class SocketPairs(Repair):
    """The order of both ends in files.img."""

    loses = "CRIU 4.2 cannot restore some socket pairs that several processes share."

    def amend_restore(self, restore: RestoreImages) -> None:
        """Put the end of the lowest PID last, where CRIU begins."""
        images = restore.images
        entries = images.files()
        at = {e.usk.ino: n for n, e in enumerate(entries) if e.HasField("usk") and e.usk.peer}
        peers = {n: at.get(entries[n].usk.peer, -1) for n in at.values()}
        pairs = [
            (one, other) for one, other in peers.items() if one < other and peers[other] == one
        ]
        if not pairs:
            return
        lowest = {number: min(held)[0] for number, held in images.holders().items()}
        for one, other in pairs:
            if 0 < lowest.get(entries[one].id, 0) < lowest.get(entries[other].id, 0):
                entries[one], entries[other] = entries[other], entries[one]
        images.write_files(entries)
