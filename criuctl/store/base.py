"""What a store is: bytes under names, and nothing else.

A `Store` keeps whole objects under flat names.  It knows nothing of checkpoints, encryption or
CRIU.  Every backend gives the same promises, and `tests/contract` holds each of them to it:

- `put` is atomic: a reader sees the old object, the new object or none, never a part; what `put`
  returned from is durable.  After an error that says *unreachable* it may still have happened,
  whole; otherwise nothing did.
- `put(if_absent=True)` never overwrites.  Where `Capabilities.conditional_create` holds, exactly
  one of any number of racing callers succeeds and the others get `ObjectExists`; elsewhere it only
  looks first.  Callers put something of their own (a random id) into such objects: after a lost
  answer the store decides by content whether the object that it finds is the caller's.
- "Absent" (`ObjectMissing`) is only ever said when the store answered that the object is absent.
  Every other failure has an error class of its own: unreachable, denied, no such bucket, full,
  damaged.
- All methods may be called from any thread at once.

Names are lower-case paths such as ``packs/3f/3f9a`` (`check_name`).  No name may be the folder of
another one (``a`` beside ``a/b``).  A place may hold foreign things whose names criuctl would never
write; `list` passes them over.
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
PROBE_PREFIX = "probe-"  # objects that a store makes and removes by itself; never a caller's

_PART = r"[a-z0-9][a-z0-9._-]{0,199}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")


class ObjectInfo(Struct, frozen=True):
    """One object as `Store.stat` and `Store.list` see it."""

    name: str
    size: int  # bytes
    modified: float  # Unix seconds; whole ones where the server tells no more


class Capabilities(Struct, frozen=True):
    """What a store was found to promise; `Store.probe` finds out."""

    conditional_create: bool  # of racing `put(if_absent=True)` exactly one wins
    kind: str  # local, memory, or the S3 server: aws, radosgw, rclone, ...; unknown


class Keeping(Struct, frozen=True):
    """What a place keeps of what was deleted or replaced, until its own rules let it go."""

    versions: bool = False  # older versions stay
    # nobody can remove those before their time: mode and default span, such as ``governance 30
    # days``
    lock: str = ""
    objects: int | None = None  # older versions there are, where that is known
    bytes: int | None = None


def valid_name(name: str) -> bool:
    """Whether `name` is one that criuctl writes."""
    return len(name) <= MAX_NAME and ".." not in name and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """`name` itself, or `InvalidName`: every name is checked on its way in and on its way out."""
    if not valid_name(name):
        raise InvalidName(
            f"{name[:80]!r} is not an object name",
            hint="Lower-case letters, digits and . _ - in parts joined by single slashes; no '..'.",
        )
    return name


def check_prefix(prefix: str) -> str:
    """`prefix` itself if some name may begin with it, or `InvalidName`."""
    if prefix and not valid_name(prefix.removesuffix("/")):
        raise InvalidName(f"{prefix[:80]!r} is not the beginning of an object name")
    return prefix


def probe_name() -> str:
    """A fresh name for an object that tries the store out."""
    return PROBE_PREFIX + os.urandom(8).hex()


def as_views(data: Data) -> list[memoryview]:
    """`data` as flat byte views, empty ones left out; nothing is copied."""
    pieces: Sequence[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = (memoryview(piece) for piece in pieces)
    return [view.cast("B") for view in views if view.nbytes]


def allocate(size: int) -> memoryview:
    """`size` bytes of zeros, touched lazily; huge pages make the first touch, the slowest part of a
    copy, cheaper.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def short_object(name: str, url: str, offset: int, length: int, got: int) -> Damaged:
    """The error for an object that ends before the bytes that must be in it."""
    return Damaged(
        f"{name} in {url} is too short: {got} bytes at offset {offset} where {length} are needed",
        hint=(
            "The object was cut or replaced; `criuctl verify --all` tells which checkpoints need "
            "it."
        ),
        object=name,
    )


def check_limit(name: str, url: str, size: int, limit: int | None) -> None:
    """`Damaged` for an object that has more bytes than whatever has its name can have."""
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

    url: str  # what the user calls it; holds no credentials

    @abstractmethod
    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store `data` (one buffer, or several one after the other) under `name`, atomically and
        durably.

        The buffers must not change until the call returns.  Raises `StoreFull` with nothing left
        behind, and with `if_absent` `ObjectExists` when the name is taken.
        """

    @abstractmethod
    def get(self, name: str, limit: int | None = None) -> bytes:
        """The whole object; `ObjectMissing`, `Damaged` when the store cannot deliver its full
        length.

        One of more than `limit` bytes is `Damaged`, and is not read: whoever can put objects shall
        not use up our memory.
        """

    @abstractmethod
    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `ObjectMissing`, `Damaged` when the object is
        shorter.
        """

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill the writable `buffer` with the object's bytes from `offset`; errors as `get_range`.

        Reusing a buffer spares the first touch of fresh memory, the slowest part of a fast read.
        """
        buffer[:] = self.get_range(name, offset, buffer.nbytes)

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Size and time of one object; `ObjectMissing`."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects whose names begin with `prefix`, in the order of their names, as they are
        found.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object, durably; one that is absent is fine."""

    @abstractmethod
    def create(self) -> None:
        """Make the place if that is the store's to do, else verify that it is there."""

    @abstractmethod
    def probe(self) -> Capabilities:
        """Try out what the store can do; leaves nothing behind."""

    def check_writable(self) -> None:
        """Write and delete one small object, so that a refusal is met before anything depends on
        it.
        """
        name = probe_name()
        self.put(name, b"criuctl probe")
        self.delete(name)

    def place(self) -> str:
        """Where the store lies, as a host pins it: the URL, for S3 with the endpoint; "" where no
        URL leads to it.

        Two spellings of one URL are one place.  A link on the way to a folder is not followed:
        where it leads may change.
        """
        return ""

    def sweep(self, older_than: float) -> int:
        """Remove what writers that died `older_than` seconds ago or more left unfinished; how
        many.
        """
        return 0

    def keeping(self) -> Keeping | None:
        """What the place keeps of what was deleted; None where that cannot be told."""
        return None

    def memory(self, size: int) -> memoryview:
        """`size` bytes of memory, not touched yet, that large contents are best put from and read
        into; for good.
        """
        return allocate(size)

    def prepare(self) -> None:
        """Get ready for the first request as far as that is possible beforehand; what is wrong,
        that one tells.
        """

    def ready(self) -> bool:
        """Whether the next request will be done at once, so that the caller has no time for
        something else before it.
        """
        return True

    def close(self) -> None:
        """Give back connections and descriptors; the store is not used afterwards."""

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
