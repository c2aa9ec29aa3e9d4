"""Folders of one run of the tests in place of those of the host.

A test that names no folders of its own must not find the host's sessions, stores, keys and hooks.
`confine` sets the environment of the test process once, before any test is collected; what a test
starts inherits it, and `support.program` passes it on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

VARIABLES = ("STORE", "STATE_DIR", "CACHE_DIR", "RUN_DIR", "KEY_DIR", "HOOK_DIRS")


class Confinement:
    """The folders of a run, removed by `close`."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="suite-", dir="/dev/shm"))
        self._umask = os.umask(0o022)
        names = {name: str(self.root / name.lower()) for name in VARIABLES}
        self._environment = {f"CRIUCTL_{name}": path for name, path in names.items()}
        self._environment["XDG_CONFIG_HOME"] = str(self.root / "settings")
        os.environ.update(self._environment)

    def close(self) -> None:
        """Remove the folders and leave the environment without them."""
        for name, path in self._environment.items():
            if os.environ.get(name) == path:
                del os.environ[name]
        os.umask(self._umask)
        shutil.rmtree(self.root, ignore_errors=True)


def folders() -> dict[str, str]:
    """Return the variables that keep a command out of the host's folders."""
    names = ("XDG_CONFIG_HOME", *(f"CRIUCTL_{name}" for name in VARIABLES))
    return {name: os.environ[name] for name in names if name in os.environ}
