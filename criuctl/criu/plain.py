"""CRIU's images as they lie on somebody's disk: a folder of them, or an archive as podman makes them.  To be looked at only.

What tells of processes, files and mappings is read into memory, from a folder without following links, from an archive
in one pass and without writing anything anywhere.  Pages, deleted files and everything else are passed over.  Both may
come from anybody: names, sizes and their sum are bounded.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import IO, Any

from msgspec import Struct, field

from ..errors import Damaged, NoSuchCheckpoint, UnsupportedFormat

_TELLING = re.compile(r"(?:pstree|files|inventory|(?:core|ids|fdinfo|mm|fs|pagemap|pagemap-shmem)-\d{1,20})\.img")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.img")
_MAX_IMAGE, _MAX_ALL, _MAX_FILES = 32 << 20, 256 << 20, 1 << 18
_MAX_CONFIG = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_INSIDE = "checkpoint"  # where podman keeps the images: in an archive, and beside it


class PlainImages(Struct):
    """What was found."""

    where: str
    modified: float = 0.0  # Unix seconds
    images: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # of all images, the passed over ones too
    container: dict[str, Any] = field(default_factory=dict)  # podman's config.dump

    def get(self, name: str) -> bytes | None:
        """An image by its name."""
        return self.images.get(name)

    def take(self, name: str, size: int, file: IO[bytes]) -> None:
        """Note one file, and read it if it tells anything."""
        if _IMAGE.fullmatch(name) is None or len(self.sizes) >= _MAX_FILES:
            return
        self.sizes[name] = size
        if _TELLING.fullmatch(name) is None:
            return
        if size > _MAX_IMAGE or size + sum(map(len, self.images.values())) > _MAX_ALL:
            raise Damaged(f"image {name} in {self.where} is too large ({size} bytes)")
        data = file.read(size)
        if len(data) != size:
            raise Damaged(f"image {name} in {self.where} is cut off")
        self.images[name] = data


def read(path: Path) -> PlainImages:
    """The images in a folder or an archive; `NoSuchCheckpoint`, `UnsupportedFormat`, `Damaged`."""
    try:
        status = path.stat()
        found = PlainImages(str(path), status.st_mtime)
        if stat.S_ISDIR(status.st_mode):
            _read_folder(path, found)
        elif stat.S_ISREG(status.st_mode):
            _read_archive(path, found)
    except FileNotFoundError as error:
        raise NoSuchCheckpoint(f"there is no file or folder {path}") from error
    except OSError as error:
        raise NoSuchCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    if "pstree.img" not in found.images:
        raise UnsupportedFormat(
            f"{path} is no checkpoint that criuctl knows",
            hint="`criuctl show` knows exported checkpoints, folders of CRIU's images, and podman's checkpoint archives.",
        )
    return found


def _read_folder(path: Path, found: PlainImages) -> None:
    inside = path / _INSIDE
    folder = inside if not (path / "pstree.img").exists() and (inside / "pstree.img").exists() else path
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_file(follow_symlinks=False):
            continue
        with open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found.take(entry.name, os.fstat(file.fileno()).st_size, file)
    config = path / "config.dump"
    if folder == inside and config.is_file():
        with config.open("rb") as file:
            found.container = _container(file.read(_MAX_CONFIG))


def _read_archive(path: Path, found: PlainImages) -> None:
    import zstandard

    try:
        with closing(_members(path)) as members:
            for member, file in members:
                folder, name = os.path.split(member.name.removeprefix("./"))
                if folder in ("", _INSIDE) and name.endswith(".img"):
                    found.take(name, member.size, file)
                elif (folder, name) == ("", "config.dump") and member.size <= _MAX_CONFIG:
                    found.container = _container(file.read())
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if found.images:
            raise Damaged(f"{path} is damaged or cut off: {error}") from error
        return  # it is something else


def _members(path: Path) -> Generator[tuple[tarfile.TarInfo, IO[bytes]], None, None]:
    """The regular files of an archive, whatever compresses it, one after the other."""
    with path.open("rb") as raw, _unpacked(raw) as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield member, file


def _unpacked(raw: Any) -> AbstractContextManager[Any]:
    """What zstd has compressed; tarfile knows the other ones."""
    import zstandard

    if not raw.peek(len(_ZSTD)).startswith(_ZSTD):
        return nullcontext(raw)
    stream: AbstractContextManager[Any] = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return stream


def _container(data: bytes) -> dict[str, Any]:
    """What podman says of the container; nothing if that cannot be read."""
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
