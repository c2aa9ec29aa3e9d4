"""Load modules that a dump or a restore will need, while it waits for something else.

Modules are loaded at their first use (`criuctl.startup`), which would be while the tree is frozen,
or while the user waits for it to run again.  Two waits come before that: for the process that loads
an S3 client, and for CRIU, which starts.  This saves only time: a module that is missing here is
loaded when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from ..criu import schema

_READING = ("cryptography.hazmat.primitives.ciphers.aead", "blake3", "secrets")

DUMP = (
    *_READING,
    "zstandard",
    "pb:FILES",
    "criuctl.criu.direct",
    "criuctl.proc.memory",
    "criuctl.dump.private_memory",
    "criuctl.repairs.registry",
    "criuctl.cgroups.membership",
    "criuctl.files.link_remaps",
    "criuctl.files.fifos",
    "criuctl.host.inside_report",
)
"""The modules of a dump, in the order of their use; ``pb:KIND`` is the message class of images of
that kind.
"""

RESTORE = (
    *_READING,
    "zstandard",
    "criuctl.host.moves",
    "criuctl.host.hook_facts",
    "criuctl.restore.materialise",
    "criuctl.criu.ttyimages",
    "pb:FILES",
    "pb:CORE",
    "pb:MM",
    "criuctl.files.deleted_names",
    "criuctl.files.predicates",
    "criuctl.criu.direct",
    "criuctl.criu.unshared",
    "criuctl.restore.hand_back",
    "criuctl.files.link_remaps",
    "criuctl.cgroups.membership",
    "criuctl.files.fifos",
    "criuctl.repairs.registry",
    "subprocess",
    "criuctl.criu.hang_detection",
)
"""The modules of a restore."""


def preload(names: Sequence[str], enough: Callable[[], bool] = lambda: False) -> None:
    """Load what `names` lists, one after the other, until it is `enough`."""
    for name in names:
        if enough():
            return
        if name.startswith("pb:"):
            schema.message(name[3:])
        else:
            _ = importlib.import_module(name).__doc__  # reading the attribute loads it
