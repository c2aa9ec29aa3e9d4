"""What a store is: bytes under names, and nothing else.

A `Store` keeps whole objects under flat names. It knows nothing about checkpoints, encryption or
CRIU. Every backend gives the same promises, and `tests/contract` holds each of them to it:

- `put` is atomic: a reader sees the old object, the new object or none, never a part; once `put`
  has returned, the object is durable.  After an error that says *unreachable* it may still have
  happened, whole; otherwise nothing did.
- `put(if_absent=True)` never overwrites.  Where `Capabilities.conditional_create` holds, exactly
  one of any number of racing callers succeeds and the others get `ObjectExists`; elsewhere it only
  checks first.  Callers put a random id into such objects: after a lost answer the store decides by
  content whether the object that it finds is the caller's.
- "Absent" (`ObjectMissing`) is only reported when the store answered that the object is absent.
  Every other failure has a separate error class: unreachable, denied, no such bucket, full,
  damaged.
- All methods may be called from any thread at once.

Names are lower-case paths such as ``packs/3f/3f9a`` (`check_name`). No name may be the folder of
another one (``a`` next to ``a/b``). A place may hold foreign objects whose names criuctl would
never write; `list` skips them.
"""

from __future__ import annotations

import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType

from msgspec import Struct

from ..errors import Damaged, InvalidName

Buffer = bytes | bytearray | memoryview
Data = Buffer | Sequence[Buffer]

MAX_NAME = 512  # characters; S3 allows 1024 bytes including the store's prefix
PROBE_PREFIX = "probe-"  # objects that a store makes and removes itself; never a caller's

_PART = r"[a-z0-9][a-z0-9._-]{0,199}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")


class ObjectInfo(Struct, frozen=True):
    """One object as `Store.stat` and `Store.list` see it."""

    name: str
    size: int  # bytes
    modified: float  # Unix seconds; whole ones where the server has no fractions


class Capabilities(Struct, frozen=True):
    """What a store was found to promise; `Store.probe` finds out."""

    conditional_create: bool  # of racing `put(if_absent=True)` exactly one succeeds
    kind: str  # local, memory, or the S3 server: aws, radosgw, rclone, ...; unknown


class Keeping(Struct, frozen=True):
    """Deleted or replaced objects that a place keeps, until its own rules remove them."""

    versions: bool = False  # older versions stay
    # protection from removal before its time: mode and default span, such as ``governance 30 days``
    lock: str = ""
    objects: int | None = None  # number of older versions, where it is known
    bytes: int | None = None


def valid_name(name: str) -> bool:
    """Return whether `name` is one that criuctl writes."""
    return len(name) <= MAX_NAME and ".." not in name and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return `name`, or raise `InvalidName`: every name is checked on its way in and on its way
    out.
    """
    if not valid_name(name):
        raise InvalidName(
            f"{name[:80]!r} is not an object name",
            hint="Lower-case letters, digits and . _ - in parts joined by single slashes; no '..'.",
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some name may begin with it, or raise `InvalidName`."""
    if prefix and not valid_name(prefix.removesuffix("/")):
        raise InvalidName(f"{prefix[:80]!r} is not the beginning of an object name")
    return prefix


def probe_name() -> str:
    """Return a new name for an object that tests the store."""
    return PROBE_PREFIX + os.urandom(8).hex()


def is_probe(name: str) -> bool:
    """Return whether it is the name of an object that tests a store."""
    return name.startswith(PROBE_PREFIX)


def as_views(data: Data) -> list[memoryview]:
    """Return `data` as flat byte views, empty ones left out; nothing is copied."""
    pieces: Sequence[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = (memoryview(piece) for piece in pieces)
    return [view.cast("B") for view in views if view.nbytes]


def allocate(size: int) -> memoryview:
    """Return `size` bytes of zeros, allocated lazily.

    Huge pages make the first touch, the slowest part of a copy, cheaper.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def short_object(name: str, url: str, offset: int, length: int, got: int) -> Damaged:
    """Return the error for an object that is shorter than the bytes it must contain."""
    return Damaged(
        f"{name} in {url} is too short: {got} bytes at offset {offset} where {length} are needed",
        hint=(
            "The object was cut or replaced; `criuctl verify --all` names the "
            "checkpoints that need it."
        ),
        object=name,
    )


def check_limit(name: str, url: str, size: int, limit: int | None) -> None:
    """Raise `Damaged` for an object that has more bytes than any object with its name can have."""
    if limit is not None and size > limit:
        raise Damaged(
            f"{name} in {url} has {size} bytes, where {limit} are the most that are possible",
            hint="criuctl has not written it so: bring the object back, or remove it.",
            object=name,
        )


class Store(ABC):
    """Whole objects under names; see the module's docstring for the promises.

    Every method may raise `StoreUnreachable`, `StoreDenied`, `NoSuchBucket` and `StoreError`, and
    `InvalidName` for a bad name.
    """

    url: str  # as the user gives it, without credentials

    @abstractmethod
    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store `data` (one buffer, or several one after the other) under `name`, atomically and
        durably.

        The buffers must not change until the call returns. Raises `StoreFull` with nothing left
        behind, and with `if_absent` `ObjectExists` when the name is taken.
        """

    @abstractmethod
    def get(self, name: str, limit: int | None = None) -> bytes:
        """Return the whole object; `ObjectMissing`, `Damaged` when it is not delivered in full.

        One of more than `limit` bytes is `Damaged`, and is not read: a user who can put objects
        must not be able to use up our memory.
        """

    @abstractmethod
    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`.

        `ObjectMissing`, `Damaged` when the object is shorter.
        """

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill the writable `buffer` with the object's bytes from `offset`; errors as `get_range`.

        Reusing a buffer avoids the first touch of new memory, the slowest part of a fast read.
        """
        buffer[:] = self.get_range(name, offset, buffer.nbytes)

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Return size and time of one object; `ObjectMissing`."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with `prefix`, in the order of their names."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object, durably; one that is absent is fine."""

    @abstractmethod
    def create(self) -> None:
        """Make the place if the store has to, else verify that it exists."""

    @abstractmethod
    def probe(self) -> Capabilities:
        """Test what the store can do; leaves nothing behind."""

    def check_writable(self) -> None:
        """Write and delete one small object, so that a refusal shows before anything depends on
        it.
        """
        name = probe_name()
        self.put(name, b"criuctl probe")
        self.delete(name)

    def place(self) -> str:
        """Return the location of the store, as a host pins it: the URL, for S3 with the endpoint.

        "" where no URL leads to it. Two spellings of one URL are one place. A link in the path of a
        folder is not followed: its target may change.
        """
        return ""

    def sweep(self, older_than: float) -> int:
        """Remove what writers that died `older_than` seconds ago or more left unfinished.

        Returns how many.
        """
        return 0

    def keeping(self) -> Keeping | None:
        """Return what the place keeps of deleted objects; None where that is unknown."""
        return None

    def memory(self, size: int) -> memoryview:
        """Return `size` bytes of untouched memory from which large contents are best put and read
        into.

        It is never freed.
        """
        return allocate(size)

    def prepare(self) -> None:
        """Prepare the first request as far as possible; errors are reported by that request."""

    def close(self) -> None:
        """Close connections and descriptors; the store is not used afterwards."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"
