"""The users whose processes a set of images restores."""

from __future__ import annotations

from .images import ImageSet, read


def user_ids(images: ImageSet) -> frozenset[int]:
    """Return the real, effective, saved and file system user ids of every thread.

    From the images, which CRIU restores, and not from the manifest, which repeats them.
    """
    found: set[int] = set()
    for name in images.names():
        if name.startswith("core-"):
            core = read(images.folder, name, "CORE")[0]
            if core.HasField("thread_core") and core.thread_core.HasField("creds"):
                creds = core.thread_core.creds
                found.update((creds.uid, creds.euid, creds.suid, creds.fsuid))
    return frozenset(found)
