"""Steps of random trees, by what they are about.

A step is a generator.  It makes something, with the chance that its `Place` gives it, and yields;
tree and step may be dumped and restored then.  Each time it goes on it uses what it has made and
yields what it finds: JSON, and the same in any two trees of one seed.  A child of its process may
have inherited the step: it goes on there as well.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
from collections.abc import Callable, Generator
from typing import Any, TypeVar

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

T = TypeVar("T")
Step = Generator[Any, None, None]
KINDS: dict[str, Callable[[Place], Step]] = {}


class Place:
    """Where a step is taken: names of its own, and its own chance."""

    def __init__(self, folder: str, label: str, chance: random.Random) -> None:
        self.folder = folder
        self.label = label
        self.random = chance

    def path(self, name: str) -> str:
        """A file of this step's."""
        return os.path.join(self.folder, f"{self.label.replace('/', '-').replace(' ', '-')}-{name}")

    def fleeting(self, name: str) -> str:
        """A file of this step's where a reboot leaves nothing: its test removes what has its token
        in its name.
        """
        folder = self.random.choice(["/dev/shm", "/tmp", "/run"])
        where = os.path.basename(self.folder)  # two trees of a test have one each
        return os.path.join(
            folder, os.path.basename(self.path(f"{name}-{where}-{os.environ['CZOO_TOKEN']}"))
        )

    def bytes(self, most: int) -> bytes:
        """Between one and so many bytes."""
        return self.random.randbytes(self.random.randint(1, most))

    def some(self, flags: dict[str, int] | list[int]) -> int:
        """Some of these flags, or none."""
        values = list(flags.values()) if isinstance(flags, dict) else flags
        chosen = 0
        for flag in values:
            if self.random.random() < 0.4:
                chosen |= flag
        return chosen

    def one(self, values: list[T]) -> T:
        """One of these."""
        return self.random.choice(values)


def kind(step: Callable[[Place], Step]) -> Callable[[Place], Step]:
    """Make a step known under its name."""
    KINDS[step.__name__] = step
    return step


def call(number: int, *arguments: object) -> int:
    """A system call; raises OSError."""
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def readable(fd: int, seconds: float = 10) -> bool:
    """Whether there is something to read, before so many seconds are over."""
    return bool(select.select([fd], [], [], seconds)[0])
