"""A root that gets a signal when its parent ends (``PR_SET_PDEATHSIG``, often SIGKILL).

Its parent at the restore is CRIU, which ends: the root would get the signal at once.  The setting
is cleared in each thread of the root, with a warning.  In a session the holder is the parent, and
stays.
"""

from __future__ import annotations

import signal

from ..criu.images import read, write
from .base import Repair, RestoreImages

_REALTIME = 32  # signals from here on have no names


class ParentDeathSignal(Repair):
    """prctl(PR_SET_PDEATHSIG) of the root."""

    loses = (
        "CRIU 4.2 is the restored root's parent, whose end sends the signal of PR_SET_PDEATHSIG."
    )

    def amend_restore(self, restore: RestoreImages) -> None:
        """Clear it, unless the root has a parent that stays."""
        if restore.in_session:
            return
        images = restore.images
        root = read(images.folder, "pstree.img", "PSTREE")[0]
        for thread in root.threads:
            cores = read(images.folder, f"core-{thread}.img", "CORE")
            if number := cores[0].thread_core.pdeath_sig:
                cores[0].thread_core.ClearField("pdeath_sig")
                write(images.folder, f"core-{thread}.img", "CORE", cores)
                name = signal.Signals(number).name if number < _REALTIME else f"signal {number}"
                restore.reporter.warning(
                    f"PID {root.pid}: PR_SET_PDEATHSIG ({name}) was cleared: the original parent "
                    "no longer exists",
                    "Dump the parent with it, or run the program as a session (`criuctl run`).",
                )
