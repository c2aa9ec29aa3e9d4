"""The envelope of every object except packs: version before body, then a sealed head and a sealed
body.

    8 s   magic, one per kind
    u16   version            a reader refuses a newer one than it knows, before it reads anything
                             else
    u16   bytes of the feature names that follow the header, space separated; a reader refuses
          unknown ones
    u32   stored size of the head     u32  its plain size
    u32   stored size of the body     u32  its plain size
    ...   feature names, head, body

Head and body are zstd frames sealed by `codec.Sealer` together with everything before the head and
the object's name, so a header cannot be changed and an object cannot pass as another. Neither is
much larger than its stored size (`bounds`); a frame that is too small for that is followed by a
frame that zstd skips. The head is for what is read often (a list of checkpoints needs only that)
and lies within the first few KiB.

The feature ``writer:<32 hex>`` names the write-only host's domain whose keys seal the object
(`domains`).
"""

from __future__ import annotations

import struct
import threading

from msgspec import Struct

from ..errors import Damaged, UnsupportedFormat
from ..proc import jsontext
from . import bounds
from .chunks import LAYERS
from .codec import OVERHEAD, PACK_NAME_SIZE, Compressor, Decompressor, SealBroken, Sealer, broken

HEADER = struct.Struct("<8sHHIIII")
MAX_HEAD = 1 << 20  # plain bytes of a head
MAX_FEATURES = 1024  # bytes of all feature names
FIRST_READ = 4096  # bytes within which a head nearly always ends
_WRITER = "writer:"
_EMPTY_FRAME = 9  # bytes of an empty zstd frame
# bytes that every object has, and within which it names its domain after a few features
DECLARED = HEADER.size + 2 * (OVERHEAD + _EMPTY_FRAME)
_BOUND = OVERHEAD + 1024  # a zstd frame is at most this much longer than its content
# the header of a frame that zstd skips: its magic, number of bytes that follow
_SKIPPED, _SKIPPABLE = struct.Struct("<II"), 0x184D2A50
_per_thread = threading.local()


class Kind(Struct, frozen=True):
    """A kind of object: its magic, the newest version this criuctl knows, and how large a body may
    be.
    """

    word: str  # for messages
    magic: bytes
    version: int
    max_body: int
    features: frozenset[str] = frozenset()  # feature names that are understood
    domains: bool = True  # whether it may be of a write-only host's domain
    free: int = bounds.FREE_BODY  # plain bytes of a body that are allowed whatever its stored size

    @property
    def limit(self) -> int:
        """The largest size in bytes of an object of this kind."""
        return HEADER.size + MAX_FEATURES + MAX_HEAD + self.max_body + 2 * _BOUND


MASKED = "masked-packs"  # the feature of segments that may list packs of version 2
# ids of chunks cannot be compressed
INDEX = Kind("index segment", b"CRIUCTLI", 1, 64 << 20, frozenset({MASKED}), free=1 << 20)
MANIFEST = Kind(
    "manifest",
    b"CRIUCTLM",
    1,
    256 << 20,
    frozenset({"carried-binaries", "predicates", "nvidia-gpu", "workspace", LAYERS}),
)
GROUP = Kind("group checkpoint", b"CRIUCTLC", 1, 1 << 20)
LEASE = Kind("lease", b"CRIUCTLL", 1, 1 << 20)
STEPS = Kind("record of steps", b"CRIUCTLJ", 1, 256 << 20, free=1 << 20)


class Layout(Struct, frozen=True):
    """The content of a header: where head and body are."""

    prefix: bytes  # header and feature names, which are sealed with head and body
    head: slice
    head_size: int
    body: slice
    body_size: int
    features: frozenset[str] = frozenset()
    domain: bytes = b""  # id of the domain that it claims; empty for the store's own


def encode(
    kind: Kind, name: str, head: bytes, body: bytes, sealer: Sealer, features: tuple[str, ...] = ()
) -> bytes:
    """Return the object called `name` with this head and body."""
    # always frames: their sizes are checked before they are opened
    compress = Compressor(3)._compress
    if sealer.domain:
        features = (*features, _WRITER + sealer.domain.hex())
    words = " ".join(sorted(features)).encode("ascii")
    if len(words) > MAX_FEATURES or len(head) > MAX_HEAD or len(body) > kind.max_body:
        raise ValueError(f"{kind.word} is too large: head {len(head)}, body {len(body)} bytes")
    head_least = bounds.least_stored(len(head), bounds.FREE_HEAD)
    body_least = bounds.least_stored(
        len(body), kind.free, 0 if kind is INDEX else jsontext.values(body)
    )
    parts = [_padded(compress(head), head_least), _padded(compress(body), body_least)]
    sizes = [len(part) + OVERHEAD for part in parts]
    prefix = (
        HEADER.pack(kind.magic, kind.version, len(words), sizes[0], len(head), sizes[1], len(body))
        + words
    )
    sealed = [
        sealer.seal(part, _associated(prefix, name, which))
        for part, which in zip(parts, (b"h", b"b"), strict=True)
    ]
    return b"".join((prefix, *sealed))


def _padded(frame: bytes, least: int) -> bytes:
    """Return the frame, followed by one that readers skip if it is shorter than `least`."""
    missing = least - len(frame)
    return frame if missing <= 0 else frame + _SKIPPED.pack(_SKIPPABLE, missing) + bytes(missing)


def layout(kind: Kind, name: str, start: bytes, size: int) -> Layout:
    """Parse the object's first bytes; raise `UnsupportedFormat`, or `Damaged` for impossible
    values.

    `size` is that of the whole object.
    """
    prefix, features, domain = declared(kind, name, start)
    head, head_size, body, body_size = HEADER.unpack_from(start)[3:]
    if (
        head_size > MAX_HEAD
        or body_size > kind.max_body
        or head > head_size + _BOUND
        or body > body_size + _BOUND
    ):
        raise broken(name, "the sizes in its header are not possible")
    if head_size > bounds.most(head, bounds.FREE_HEAD) or body_size > bounds.most(body, kind.free):
        raise broken(
            name, "it would become much larger than anything that criuctl stores in so few bytes"
        )
    if len(prefix) + head + body != size:
        raise broken(name, f"it has {size} bytes where its header says {len(prefix) + head + body}")
    head_start, body_start = len(prefix), len(prefix) + head
    body_at = slice(body_start, body_start + body)
    return Layout(
        prefix, slice(head_start, body_start), head_size, body_at, body_size, features, domain
    )


def declared(kind: Kind, name: str, start: bytes) -> tuple[bytes, frozenset[str], bytes]:
    """Return everything before the head, the required features other than a domain's, and the
    domain; errors as `layout`.
    """
    if len(start) < HEADER.size:
        raise broken(name, f"it is too short for a {kind.word}")
    magic, version, words = HEADER.unpack_from(start)[:3]
    if magic != kind.magic:
        raise broken(name, f"it is no {kind.word}")
    if version > kind.version or version == 0:
        raise UnsupportedFormat(
            f"{name} has {kind.word} format {version}; this criuctl reads up to {kind.version}",
            hint="Use the criuctl that wrote it, or a newer one.",
            object=name,
        )
    if words > MAX_FEATURES or len(start) < HEADER.size + words:
        raise broken(name, "its list of features is cut off")
    prefix = bytes(start[: HEADER.size + words])
    try:
        features = frozenset(prefix[HEADER.size :].decode("ascii").split())
    except UnicodeDecodeError:
        raise broken(name, "its list of features is not readable") from None
    of_writers = {word for word in features if kind.domains and word.startswith(_WRITER)}
    domain = _domain(name, of_writers)
    features -= of_writers
    if unknown := features - kind.features:
        raise UnsupportedFormat(
            f"{name} needs features that this criuctl does not have: {', '.join(sorted(unknown))}",
            hint="Use the criuctl that wrote it, or a newer one.",
            object=name,
        )
    return prefix, features, domain


def _domain(name: str, words: set[str]) -> bytes:
    """Return the id of the domain that these features name."""
    if not words:
        return b""
    text = min(words).removeprefix(_WRITER)
    try:
        domain = bytes.fromhex(text)
    except ValueError:
        domain = b""
    if len(words) > 1 or len(domain) != PACK_NAME_SIZE or domain.hex() != text:
        raise broken(name, "it does not name the host that wrote it")
    return domain


def open_head(name: str, found: Layout, data: bytes, sealer: Sealer) -> bytes:
    """Return the head, from at least the first ``found.head.stop`` bytes of the object; raise
    `Damaged` or `Foreign`.
    """
    own = sealer.of(found.domain, name)
    return _open(
        name, data[found.head], _associated(found.prefix, name, b"h"), found.head_size, own
    )


def open_body(name: str, found: Layout, data: bytes, sealer: Sealer) -> bytes:
    """Return the body, from the whole object, whose head is checked too; raise `Damaged` or
    `Foreign`.
    """
    open_head(name, found, data, sealer)
    own = sealer.of(found.domain, name)
    return _open(
        name,
        memoryview(data)[found.body],
        _associated(found.prefix, name, b"b"),
        found.body_size,
        own,
    )


def _open(
    name: str, block: bytes | memoryview, associated: bytes, size: int, sealer: Sealer
) -> bytes:
    try:
        frame = sealer.open(block, associated)
        return bytes(_decompressor()(1, frame, size))
    except SealBroken:
        raise broken(name, "its seal does not fit its content") from None


def _decompressor() -> Decompressor:
    """Return the decompressor of this thread: making one takes longer than opening a head."""
    decompressor: Decompressor | None = getattr(_per_thread, "decompressor", None)
    if decompressor is None:
        decompressor = _per_thread.decompressor = Decompressor()
    return decompressor


def _associated(prefix: bytes, name: str, which: bytes) -> bytes:
    return b"\0".join((which, name.encode("ascii"), prefix))


__all__ = [
    "DECLARED",
    "FIRST_READ",
    "INDEX",
    "LEASE",
    "MANIFEST",
    "Damaged",
    "Kind",
    "Layout",
    "declared",
    "encode",
    "layout",
    "open_body",
    "open_head",
]
