"""Places to store to: a folder on disk and a bucket of Ceph's S3 gateway."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servers import S3Server

BUCKET = "bench"


def drop_cache(folder: Path) -> None:
    """Let the kernel forget what lies in the files of a folder, which is durable: the next reader
    waits for the disk.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Place(ABC):
    """Where checkpoints go; each name in it is a separate corner."""

    name: str

    @abstractmethod
    def url(self, corner: str) -> str:
        """What criuctl's --store gets."""

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables that say how to get in."""
        return {}

    @abstractmethod
    def upload(self, file: Path, corner: str) -> None:
        """Copy a file to the place, as a person would by hand."""

    @abstractmethod
    def download(self, corner: str, file: Path) -> None:
        """Copy it back."""

    @abstractmethod
    def size(self, corner: str) -> int:
        """Bytes that lie there."""

    def cool(self, corner: str) -> None:
        """Let no cache of this machine hold what lies there, as after a reboot; a server's own
        caches stay.
        """

    @abstractmethod
    def empty(self, corner: str) -> None:
        """Remove all that lies there."""


class Folder(Place):
    """A folder on disk."""

    name = "local"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, corner: str) -> Path:
        return self._folder / corner

    def url(self, corner: str) -> str:
        return str(self.path(corner))

    def upload(self, file: Path, corner: str) -> None:
        self.path(corner).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self.path(corner) / file.name)

    def download(self, corner: str, file: Path) -> None:
        shutil.copyfile(self.path(corner) / file.name, file)

    def size(self, corner: str) -> int:
        # which may be deleted
        stored = (path for path in self.path(corner).rglob("*") if ".cache" not in path.parts)
        return sum(path.stat().st_size for path in stored if path.is_file())

    def cool(self, corner: str) -> None:
        drop_cache(self.path(corner))

    def empty(self, corner: str) -> None:
        shutil.rmtree(self.path(corner), ignore_errors=True)


class Bucket(Place):
    """A bucket of an S3 server.

    By hand, a command copies, as a person would start one (`bench.copy`: ``aws s3 cp`` without what
    that loads besides).
    """

    name = "s3"

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._client: Any = server.client()
        server.make_bucket(BUCKET)

    def url(self, corner: str) -> str:
        return f"s3://{BUCKET}/{corner}"

    @property
    def env(self) -> Mapping[str, str]:
        return self._server.env

    def upload(self, file: Path, corner: str) -> None:
        self._copy("put", file, corner)

    def download(self, corner: str, file: Path) -> None:
        self._copy("get", file, corner)

    def _copy(self, verb: str, file: Path, corner: str) -> None:
        argv = [
            sys.executable,
            "-m",
            "bench.copy",
            verb,
            str(file),
            BUCKET,
            f"{corner}/{file.name}",
        ]
        subprocess.run(argv, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, check=True)

    def size(self, corner: str) -> int:
        return sum(item["Size"] for item in self._objects(corner))

    def empty(self, corner: str) -> None:
        for item in self._objects(corner):
            self._client.delete_object(Bucket=BUCKET, Key=item["Key"])

    def _objects(self, corner: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=f"{corner}/"
        )
        return [item for page in pages for item in page.get("Contents", [])]
