"""Make criuctl's own folders so that no other user may write there, whatever the umask is."""

from __future__ import annotations

from pathlib import Path

from .ownership import check_own, check_place


def make_private(folder: Path) -> None:
    """Make `folder` with mode 0700, and missing parents with 0755; existing folders stay unchanged.

    ``mkdir(parents=True)`` gives the parents the mode that the umask leaves, and a user who may
    write there may rename `folder`. `OSError`; `UntrustedPath` where that is possible, or another
    user has made it.
    """
    check_place(folder)
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
