"""Folders of one run of the tests in place of those of the host.

A test must neither find nor change the host's sessions, stores, keys, hooks and configuration.
Before any test is collected, `Confinement` gives the test process an environment that names folders
of the run; what a test starts inherits it, and `support.program` passes it on.  Where a path is
fixed (the system's configuration file) or is the default of something made without that environment
(a `Config()`), an empty tmpfs covers the host's folder, in a mount namespace of this process.  Not
covered is /run/criuctl: its locks are agreed on by all programs of a machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hosts_lab import kernel

VARIABLES = ("STORE", "STATE_DIR", "CACHE_DIR", "RUN_DIR", "KEY_DIR", "HOOK_DIRS")
COVERED = ("/etc/criuctl", "/var/lib/criuctl", "/var/cache/criuctl")


class Confinement:
    """The folders of a run, removed by `close`; the mounts go with the process."""

    def __init__(self) -> None:
        self._umask = os.umask(0o022)
        _cover()
        self.root = Path(tempfile.mkdtemp(prefix="suite-", dir="/dev/shm"))
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


def _cover() -> None:
    """Only root may, and only what root starts can read the host's state or write there."""
    if os.geteuid():
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    for folder in COVERED:
        Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
        kernel.mount("confinement", folder, "tmpfs", options="mode=0755")


def uncovered() -> list[str]:
    """Return, and remove, what lies in the covered folders: a test has used them."""
    written = [] if os.geteuid() else [str(path) for top in COVERED for path in Path(top).glob("*")]
    for path in map(Path, written):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return written


def folders() -> dict[str, str]:
    """Return the variables that keep a command out of the host's folders."""
    names = ("XDG_CONFIG_HOME", *(f"CRIUCTL_{name}" for name in VARIABLES))
    return {name: os.environ[name] for name in names if name in os.environ}
