"""Folders of criuctl's own, made so that no other user may write there, whatever the umask is."""

from __future__ import annotations

from pathlib import Path

from .ownership import check_own, check_place


def make_private(folder: Path) -> None:
    """Make `folder` with mode 0700, and what is missing above it with 0755; what is there already
    stays as it is.  `OSError`.

    ``mkdir(parents=True)`` gives the folders above whatever the umask lets through, and who may
    write there may rename `folder`.  `UntrustedPath` where that is possible, or somebody else has
    made it.
    """
    check_place(folder)
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
