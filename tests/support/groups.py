"""Control groups that tests make."""

from __future__ import annotations

import errno
from pathlib import Path

from .keeper import wait_until


def remove(group: Path) -> None:
    """Remove a group whose processes have ended; it may be busy for a moment longer than they can
    be seen.
    """

    def removed() -> bool:
        try:
            group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    wait_until(removed, 60, f"{group} is let go of")
