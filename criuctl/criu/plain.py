"""Read CRIU's images from a folder or from an archive of podman's, to show them.

Images of processes, files and mappings are read into memory: from a folder without following links,
from an archive in one pass and without writing anything. Pages, deleted files and everything else
are skipped. Both are untrusted, and a folder may be changed while it is read. So names, sizes and
their sum are bounded, only regular files are read, each is opened once, in a folder that was opened
once, and the opened file is the one that is judged.
"""

from __future__ import annotations

import errno
import io
import json
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from msgspec import Struct, field

from ..errors import Damaged, NoSuchCheckpoint, UnsupportedFormat
from .archives import Allowance, members

_NEEDED = re.compile(
    r"(?:pstree|files|inventory|(?:core|ids|fdinfo|mm|fs|pagemap|pagemap-shmem)-\d{1,20})\.img"
)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.img")
_MAX_IMAGE, _MAX_ALL, _MAX_FILES = 32 << 20, 256 << 20, 1 << 18
_MAX_CONFIG = 1 << 20
_PSTREE, _CONFIG = "pstree.img", "config.dump"
# does not block on a FIFO or a terminal
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_INSIDE = "checkpoint"  # where podman keeps the images, in an archive and outside


class PlainImages(Struct):
    """The images that were found."""

    where: str
    modified: float = 0.0  # Unix seconds
    images: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # of all images, also the skipped ones
    container: dict[str, Any] = field(default_factory=dict)  # podman's config.dump
    read: int = 0  # bytes of the images that were read

    def get(self, name: str) -> bytes | None:
        """Return an image by its name."""
        return self.images.get(name)

    @staticmethod
    def wants(name: str) -> bool:
        """Return whether the image is needed."""
        return _NEEDED.fullmatch(name) is not None

    def take(self, name: str, size: int, file: IO[bytes]) -> None:
        """Record one file, and read it if it is needed."""
        if _IMAGE.fullmatch(name) is None:
            return
        if len(self.sizes) >= _MAX_FILES:
            raise Damaged(f"{self.where} has more than {_MAX_FILES} images")
        if name in self.sizes:
            raise Damaged(f"{self.where} has two images {name}")
        self.sizes[name] = size
        if not self.wants(name):
            return
        self.read += size
        if size > _MAX_IMAGE or self.read > _MAX_ALL:
            raise Damaged(f"image {name} in {self.where} is too large ({size} bytes)")
        data = file.read(size)
        if len(data) != size:
            raise Damaged(f"image {name} in {self.where} is cut off")
        self.images[name] = data


def read(path: Path) -> PlainImages:
    """Return the images in a folder or an archive.

    `NoSuchCheckpoint`, `UnsupportedFormat`, `Damaged`.
    """
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError as error:
        raise NoSuchCheckpoint(f"there is no file or folder {path}") from error
    except OSError as error:
        raise NoSuchCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        found = PlainImages(str(path), status.st_mtime)
        if stat.S_ISDIR(status.st_mode):
            _read_folder(fd, found)
        elif stat.S_ISREG(status.st_mode):
            with open(fd, "rb", closefd=False) as raw:
                _read_archive(raw, found)
    except OSError as error:
        raise NoSuchCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if "pstree.img" not in found.images:
        raise UnsupportedFormat(
            f"{path} is not a checkpoint that criuctl can read",
            hint=(
                "`criuctl show` reads exported checkpoints, folders of CRIU's images, and "
                "podman's checkpoint archives."
            ),
        )
    return found


def _read_folder(outer: int, found: PlainImages) -> None:
    with ExitStack() as stack:
        folder = outer
        if not _has(outer, _PSTREE):
            with suppress(OSError):
                inside = os.open(_INSIDE, _READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
                stack.callback(os.close, inside)
                folder = inside if _has(inside, _PSTREE) else outer
        for name in sorted(os.listdir(folder)):
            if _IMAGE.fullmatch(name) is None:
                continue
            with suppress(_NotAFile), _opened(folder, name) as file:
                found.take(name, os.fstat(file.fileno()).st_size, file)
        if folder != outer:
            with suppress(FileNotFoundError, _NotAFile), _opened(outer, _CONFIG) as file:
                found.container = _container(file.read(_MAX_CONFIG))


class _NotAFile(Exception):
    """The name is not that of a regular file."""


@contextmanager
def _opened(folder: int, name: str) -> Iterator[IO[bytes]]:
    """Yield the regular file `name` of an open folder.

    `_NotAFile` for a link, a FIFO, a device and any other file.
    """
    try:
        fd = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        # a link, a socket, a device; or removed meanwhile
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOENT):
            raise _NotAFile from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _NotAFile
        with open(fd, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(fd)


def _has(folder: int, name: str) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _read_archive(raw: io.BufferedReader, found: PlainImages) -> None:
    import zstandard

    allowance = Allowance(found.where, os.fstat(raw.fileno()).st_size)
    try:
        for member in members(raw, allowance):
            folder, name = os.path.split(member.name.removeprefix("./"))
            if folder in ("", _INSIDE) and name.endswith(".img"):
                if found.wants(name):
                    allowance.take(member.size, f"image {name}")
                found.take(name, member.size, member.file)
            elif (folder, name) == ("", _CONFIG) and member.size <= _MAX_CONFIG:
                found.container = _container(member.file.read(member.size))
    except (
        tarfile.TarError,
        EOFError,
        OSError,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if found.sizes:
            raise Damaged(f"{found.where} is damaged or cut off: {error}") from error
        return  # it is something else


def _container(data: bytes) -> dict[str, Any]:
    """Return podman's description of the container; empty if it cannot be read."""
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
