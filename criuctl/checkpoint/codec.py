"""From plain bytes to stored bytes and back: compression, sealing, and the keys that both need.

All keys come from one 32-byte master key by BLAKE3's key derivation, one context per use: chunk
ids, names, packs, and all other objects.  In an encrypted store content is sealed with AES-256-GCM;
in a plain one the master key stands in the store's config object and the same places hold a keyed
BLAKE3 tag instead, so damage is found in both, but only the first keeps secrets.

No nonce is ever used twice: each pack has a key of its own, derived from its random name, and its
records are numbered; each block of another object has a key derived from a random salt.

`Sealer.seal` and `Sealer.open` work on whole blocks; `PackSealer` on the records of one pack.
Everything here is safe to use from several threads, and the heavy calls give up the interpreter's
lock.

A store may have several *domains*, each with a master key: its own, and one of each host that may
only write (`domains`).  A `Sealer` is that of one; `of`, `of_pack` and `of_list` give the one by
which an object was sealed.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
from typing import TYPE_CHECKING, Any

from ..errors import Damaged

if TYPE_CHECKING:
    from ..store import Buffer

KEY_SIZE = 32
TAG_SIZE = 16
SALT_SIZE = 16
OVERHEAD = SALT_SIZE + TAG_SIZE  # of a sealed block
PACK_NAME_SIZE = 16
_MARK_SIZE = 6  # bytes of the name of a domain's pack that tell whose it is
_CHUNK_MARK_SIZE = 8  # of the id of a domain's chunk

RAW, ZSTD = 0, 1  # how a record's or block's content is compressed
_WORTH = 0.97  # compressed content is kept when it is below this part of the plain size

_CHUNKS = "criuctl 2026-11 chunk ids"
NAMES = "criuctl 2026-11 object names"
_PACKS = "criuctl 2026-11 packs"
_OBJECTS = "criuctl 2026-11 objects"
_CONFIG = "criuctl 2026-11 store config"
_FINGERPRINT = "criuctl 2026-11 key fingerprint"
CONTEXTS = (_CHUNKS, NAMES, _PACKS, _OBJECTS, _CONFIG)


class SealBroken(Exception):
    """A seal or tag does not fit its content; whoever knows the object's name turns it into
    `Damaged`.
    """


def derive(key: bytes, context: str) -> bytes:
    """A 32-byte key for one use, from which `key` cannot be told."""
    from blake3 import blake3

    return blake3(key, derive_key_context=context).digest()


def fingerprint(key: bytes) -> str:
    """Return 16 hex digits that identify a key and reveal nothing of it."""
    return derive(key, _FINGERPRINT)[:8].hex()


def keyed_hash(key: bytes, *parts: Buffer) -> bytes:
    """BLAKE3-256 of the parts one after the other, keyed."""
    from blake3 import blake3

    hasher = blake3(key=key)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _tag(key: bytes, content: Buffer, associated: bytes) -> bytes:
    return keyed_hash(key, struct.pack("<Q", len(associated)), associated, content)[:TAG_SIZE]


class Sealer:
    """The keys of one domain; `encrypted` says whether they keep secrets or only tell damage."""

    def __init__(self, master: bytes, *, encrypted: bool, domain: bytes = b"") -> None:
        """`domain` is the id of a write-only host's; the store's own has none."""
        from blake3 import blake3

        self.encrypted = encrypted
        self.domain = domain
        self.chunk_key = derive(master, _CHUNKS)
        self._hash = blake3
        self._names = derive(master, NAMES)
        self._packs = derive(master, _PACKS)
        self._objects = derive(master, _OBJECTS)
        self.config_key = derive(master, _CONFIG)

    def chunk_id(self, content: Buffer) -> bytes:
        """The id of a chunk; in a domain it tells those who have the keys that it is of this
        domain.
        """
        digest: bytes = self._hash(content, key=self.chunk_key).digest()
        if not self.domain:
            return digest
        body = digest[:-_CHUNK_MARK_SIZE]
        return body + self._mark(body, _CHUNK_MARK_SIZE)

    def token(self, name: str) -> str:
        """What stands for `name` in the names of objects: 32 hex digits that tell nothing without
        the key.
        """
        return keyed_hash(self._names, name.encode("utf-8", "surrogateescape"))[:16].hex()

    def pack(self, pack: bytes) -> PackSealer:
        """The sealer of the pack whose 16-byte name is `pack`."""
        return PackSealer(keyed_hash(self._packs, pack), self.encrypted)

    selective = False  # whether most objects may be of domains that these keys do not open

    def new_pack(self) -> bytes:
        """A name for a new pack: random, but for what tells those who have the domain's keys that
        it is of this domain.
        """
        rest = secrets.token_bytes(PACK_NAME_SIZE - _MARK_SIZE)
        return (
            self._mark(rest, _MARK_SIZE) if self.domain else secrets.token_bytes(_MARK_SIZE)
        ) + rest

    def owns(self, pack: bytes) -> bool:
        """Whether the pack of this name is of a write-only host's domain, and this is it."""
        return bool(self.domain) and self._mark(pack[_MARK_SIZE:], _MARK_SIZE) == pack[:_MARK_SIZE]

    def owns_chunk(self, chunk: bytes) -> bool:
        """The same for the chunk with this id."""
        body = chunk[:-_CHUNK_MARK_SIZE]
        return bool(self.domain) and self._mark(body, _CHUNK_MARK_SIZE) == chunk[-_CHUNK_MARK_SIZE:]

    def _mark(self, rest: bytes, size: int) -> bytes:
        return keyed_hash(self._packs, rest)[:size]

    # -- other domains, in a store that has some
    # -------------------------------------------------------

    @property
    def divided(self) -> bool:
        """Whether there may be objects of other domains."""
        return False

    def prepare(self) -> None:
        """Before anything is sealed: see that it can be opened later."""

    def of(self, domain: bytes, name: str) -> Sealer:
        """The keys of the domain of which the object `name` says that it is; `Damaged`, `Foreign`,
        store errors.
        """
        if domain:
            raise Damaged(
                f"{name} says that a write-only host has written it, and this store has none",
                object=name,
            )
        return self

    def of_pack(self, pack: bytes) -> Sealer:
        """The keys of the domain that the pack of this name is of; errors as `of`."""
        return self

    def author(self, domain: bytes) -> str:
        """The fingerprint of the write-only host that has made the domain, which was opened
        before.
        """
        raise KeyError(domain)

    def of_list(self, name: str, *, shared: bool) -> Sealer:
        """What opens the list of packs `name`, which is sealed for all who may write, if `shared`;
        errors as `of`.
        """
        return self.of(b"", name)

    def for_lists(self) -> tuple[Sealer, bool]:
        """What a new list of packs is sealed with, and whether that is for all who may write."""
        return self, False

    def seal(self, content: Buffer, associated: bytes) -> bytes:
        """`content` sealed together with `associated`, `OVERHEAD` bytes longer."""
        salt = secrets.token_bytes(SALT_SIZE)
        key = keyed_hash(self._objects, salt)
        if not self.encrypted:
            return b"".join((salt, content, _tag(key, content, associated)))
        return salt + _aes(key).encrypt(bytes(12), content, associated)  # type: ignore[no-any-return]

    def open(self, block: Buffer, associated: bytes) -> bytes:
        """What `seal` was given; `SealBroken` when block or `associated` is not the same."""
        if len(block) < OVERHEAD:
            raise SealBroken
        view = memoryview(block)
        key = keyed_hash(self._objects, view[:SALT_SIZE])
        return _unseal(key, self.encrypted, bytes(12), view[SALT_SIZE:], associated)


class PackSealer:
    """Seals and opens the numbered parts of one pack; each number is used once."""

    def __init__(self, key: bytes, encrypted: bool) -> None:
        self._key = key
        self._aes = _aes(key) if encrypted else None
        # newer versions of cryptography spare a copy
        self._into = getattr(self._aes, "encrypt_into", None)
        self.encrypted = encrypted
        self.overhead = TAG_SIZE if encrypted else 0

    def seal_into(self, number: int, payload: Buffer, header: bytes, target: memoryview) -> None:
        """Write a record's payload as stored to `target`; in a plain store as it is, as its id
        tells damage.
        """
        if self._aes is None:
            _copy(payload, target)
        elif self._into is not None:
            self._into(_nonce(number), payload, header, target)
        else:
            target[:] = self._aes.encrypt(_nonce(number), payload, header)

    def open_record(self, number: int, stored: memoryview, header: bytes) -> Buffer:
        """What `seal_into` was given; `SealBroken`."""
        if self._aes is None:
            return stored
        return _unseal(self._aes, True, _nonce(number), stored, header)

    def seal_index(self, content: bytes, associated: bytes) -> bytes:
        """The pack's own index, `TAG_SIZE` bytes longer; its number is the highest there is."""
        if self._aes is None:
            return content + _tag(self._key, content, associated)
        return self._aes.encrypt(_nonce(-1), content, associated)  # type: ignore[no-any-return]

    def open_index(self, block: Buffer, associated: bytes) -> bytes:
        """What `seal_index` was given; `SealBroken`."""
        return _unseal(
            self._aes or self._key, self.encrypted, _nonce(-1), memoryview(block), associated
        )


def _copy(source: Buffer, target: memoryview) -> None:
    """Copy without the interpreter's lock, which a plain slice assignment holds: other threads have
    work to do.
    """
    if isinstance(source, bytes):
        origin: Any = source
    elif isinstance(source, memoryview) and source.readonly:
        target[:] = source
        return
    else:
        origin = ctypes.byref(ctypes.c_char.from_buffer(source))
    if len(source) != len(target):
        raise ValueError("source and target differ in size")
    if len(target):
        ctypes.memmove(ctypes.byref(ctypes.c_char.from_buffer(target)), origin, len(target))


def _nonce(number: int) -> bytes:
    return (number % (1 << 32)).to_bytes(12, "little")


def _aes(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _unseal(
    key: Any, encrypted: bool, nonce: bytes, stored: memoryview, associated: bytes
) -> bytes:
    if len(stored) < TAG_SIZE:
        raise SealBroken
    if not encrypted:
        content = stored[:-TAG_SIZE]
        if not secrets.compare_digest(_tag(key, content, associated), stored[-TAG_SIZE:].tobytes()):
            raise SealBroken
        return content.tobytes()
    from cryptography.exceptions import InvalidTag

    cipher = _aes(key) if isinstance(key, bytes) else key
    try:
        opened: bytes = cipher.decrypt(nonce, stored, associated)
    except InvalidTag:
        raise SealBroken from None
    return opened


class Compressor:
    """zstd at one level; one per thread."""

    def __init__(self, level: int) -> None:
        import zstandard

        self._compress = zstandard.ZstdCompressor(level=level).compress

    def __call__(self, content: Buffer) -> tuple[int, Buffer]:
        """(codec, payload): compressed where that is worth it, else `content` itself."""
        packed = self._compress(content)
        if len(packed) < len(content) * _WORTH:
            return ZSTD, packed
        return RAW, content


class Decompressor:
    """The inverse of `Compressor`, for content that may be hostile; one per thread."""

    def __init__(self) -> None:
        import zstandard

        self._decompress = zstandard.ZstdDecompressor().decompress
        self._parameters = zstandard.get_frame_parameters
        self._error = zstandard.ZstdError

    def __call__(self, codec: int, payload: Buffer, size: int) -> Buffer:
        """The plain content, exactly `size` bytes long; `SealBroken` for anything else, before any
        memory is taken.
        """
        if codec == RAW:
            if len(payload) != size:
                raise SealBroken
            return payload
        if codec != ZSTD:
            raise SealBroken
        try:
            if self._parameters(payload).content_size != size:
                raise SealBroken
            content: bytes = self._decompress(payload)
        except self._error:
            raise SealBroken from None
        if len(content) != size:
            raise SealBroken
        return content


def broken(name: str, what: str) -> Damaged:
    """The error for a stored object whose content is not what was written."""
    return Damaged(
        f"{name} is damaged: {what}",
        hint="`criuctl verify --all` tells which checkpoints need it.",
        object=name,
    )
