"""The least that a program in Python can do: ``python -I least.py dump|restore IMAGES FILE
CRIU...``, CRIU with its options.

CRIU dumps to a tmpfs; two threads hash and compress what it wrote, in pieces, into one durable
file.  Back: two threads read, check and unpack them, and CRIU restores.  No session, no look
before, no store, no encryption, no answer: where a bound asks for less time than this takes,
nothing that does those can keep it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import blake3
import zstandard

_PIECE = 4 << 20
_THREADS = 2
_KEY = bytes(32)
T = TypeVar("T")


def dump(images: str, path: str, criu: list[str]) -> None:
    """The file holds the packed pieces, ``FILE.index`` where each belongs."""
    subprocess.run(criu, check=True)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    index: list[tuple[str, int, int, int, int, str]] = []
    lock, end = threading.Lock(), 0

    def pack(piece: tuple[str, int, int]) -> None:
        nonlocal end
        name, offset, size = piece
        content = _read(f"{images}/{name}", offset, size)
        digest = blake3.blake3(content, key=_KEY).hexdigest()
        packed = zstandard.ZstdCompressor(level=1).compress(content)
        with lock:
            place, end = end, end + len(packed)
            index.append((name, offset, size, place, len(packed), digest))
        os.pwrite(out, packed, place)

    _side_by_side(pack, _pieces(images))
    with open(f"{path}.index", "w") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())
    os.fsync(out)


def restore(images: str, path: str, criu: list[str]) -> None:
    """All of it, checked, before CRIU begins."""
    with open(f"{path}.index") as file:
        index = json.load(file)

    def unpack(piece: tuple[str, int, int, int, int, str]) -> None:
        name, offset, size, place, length, digest = piece
        content = zstandard.ZstdDecompressor().decompress(_read(path, place, length), size)
        assert blake3.blake3(content, key=_KEY).hexdigest() == digest
        fd = os.open(f"{images}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(fd, content, offset)
        os.close(fd)

    _side_by_side(unpack, index)
    subprocess.run(criu, check=True)


def _pieces(images: str) -> Iterator[tuple[str, int, int]]:
    for name in os.listdir(images):
        size = os.path.getsize(f"{images}/{name}")
        yield from ((name, start, min(_PIECE, size - start)) for start in range(0, size, _PIECE))


def _read(path: str, offset: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def _side_by_side(work: Callable[[T], None], things: Iterable[T]) -> None:
    left, lock = iter(things), threading.Lock()
    failed: list[Exception] = []

    def run() -> None:
        try:
            while True:
                with lock:
                    thing = next(left)
                work(thing)
        except StopIteration:
            return
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


if __name__ == "__main__":
    {"dump": dump, "restore": restore}[sys.argv[1]](sys.argv[2], sys.argv[3], sys.argv[4:])
    os._exit(0)  # criuctl does so, too
