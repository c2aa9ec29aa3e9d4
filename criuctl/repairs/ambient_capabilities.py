"""Ambient capabilities of a thread that may raise none any more (SECBIT_NO_CAP_AMBIENT_RAISE).

CRIU sets a thread's secure bits before its ambient capabilities, so that the kernel refuses these.
Nothing can be done after CRIU: credentials are the last that a restored thread gets. Nor before:
without the bit the program would come back with more rights than it had. Only the process itself
can read its secure bits, so no check sees them; CRIU's images have them.

Sources: capabilities(7), restore_creds() in CRIU's criu/pie/restorer.c.
"""

from __future__ import annotations

from ..criu.images import ImageSet, read
from ..errors import DumpFailed
from .base import FrozenTree, Repair

_NO_AMBIENT_RAISE = 1 << 6  # SECBIT_NO_CAP_AMBIENT_RAISE


class AmbientCapabilities(Repair):
    """Refuses a dump that no restore could bring back."""

    loses = (
        "CRIU 4.2 cannot restore ambient capabilities under SECBIT_NO_CAP_AMBIENT_RAISE: the dump "
        "is refused."
    )

    def amend_dump(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Raise `DumpFailed` if a thread has both; the tree runs on."""
        for name in images.names():
            if not name.startswith("core-"):
                continue
            creds = read(images.folder, name, "CORE")[0].thread_core.creds
            if creds.secbits & _NO_AMBIENT_RAISE and any(creds.cap_amb):
                thread = name.removeprefix("core-").removesuffix(".img")
                raise DumpFailed(
                    f"thread {thread} of the tree has ambient capabilities and "
                    "SECBIT_NO_CAP_AMBIENT_RAISE, which CRIU cannot restore together; the tree "
                    "runs on",
                    hint=(
                        "Start the program without the secure bit no-cap-ambient-raise (capsh "
                        "--secbits, SecureBits= of systemd) or without ambient capabilities."
                    ),
                )
