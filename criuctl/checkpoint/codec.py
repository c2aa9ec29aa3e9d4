"""From plain bytes to stored bytes and back: compression, sealing, and the keys that both need.

All keys come from one 32-byte master key by BLAKE3's key derivation, one context per use: chunk
ids, names, packs, and all other objects. In an encrypted store content is sealed with AES-256-GCM.
In a plain store the master key is in the store's config object and a keyed BLAKE3 tag takes the
place of the AES-GCM tag: damage is found in both, but only the first keeps secrets.

No nonce is ever used twice: each pack has its own key, derived from its random name, and its
records are numbered; each block of another object has a key derived from a random salt.

`Sealer.seal` and `Sealer.open` work on whole blocks; `PackSealer` on the records of one pack.
Everything here is safe to use from several threads, and the expensive calls release the
interpreter's lock.

A store may have several *domains*, each with a master key: the store's own, and one for each host
that may only write (`domains`). A `Sealer` belongs to one domain; `of`, `of_pack` and `of_list`
return the sealer of the domain in which an object was sealed.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import Damaged

if TYPE_CHECKING:
    from ..store import Buffer

KEY_SIZE = 32
TAG_SIZE = 16
SALT_SIZE = 16
OVERHEAD = SALT_SIZE + TAG_SIZE  # bytes that sealing adds to a block
PACK_NAME_SIZE = 16
_MARK_SIZE = 6  # bytes of the name of a domain's pack that identify the domain
_CHUNK_MARK_SIZE = 8  # bytes of the id of a domain's chunk that identify the domain

_USER_SIZE = 4  # bytes of the id of a user's chunk that name the user

RAW, ZSTD = 0, 1  # how a record's or block's content is compressed
_WORTH = 0.97  # compressed content is kept when it is smaller than this part of the plain size

_CHUNKS = "criuctl 2026-11 chunk ids"
NAMES = "criuctl 2026-11 object names"
_PACKS = "criuctl 2026-11 packs"
_OBJECTS = "criuctl 2026-11 objects"
_CONFIG = "criuctl 2026-11 store config"
_FINGERPRINT = "criuctl 2026-11 key fingerprint"
_MASKS = b"masks"
CONTEXTS = (_CHUNKS, NAMES, _PACKS, _OBJECTS, _CONFIG)


class SealBroken(Exception):
    """A seal or tag does not fit its content. A caller that knows the object's name turns this into
    `Damaged`.
    """


def derive(key: bytes, context: str) -> bytes:
    """Return a 32-byte key for one use, which reveals nothing of `key`."""
    from blake3 import blake3

    return blake3(key, derive_key_context=context).digest()


def fingerprint(key: bytes) -> str:
    """Return 16 hex digits that identify a key and reveal nothing of it."""
    return derive(key, _FINGERPRINT)[:8].hex()


def keyed_hash(key: bytes, *parts: Buffer) -> bytes:
    """Return the keyed BLAKE3-256 of the concatenated parts."""
    from blake3 import blake3

    hasher = blake3(key=key)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


@lru_cache(maxsize=64)
def _user_key(chunk_key: bytes, user: bytes) -> bytes:
    return keyed_hash(chunk_key, user)


def _tag(key: bytes, content: Buffer, associated: bytes) -> bytes:
    return keyed_hash(key, struct.pack("<Q", len(associated)), associated, content)[:TAG_SIZE]


class Sealer:
    """The keys of one domain; `encrypted` says whether they keep secrets or only detect damage."""

    def __init__(self, master: bytes, *, encrypted: bool, domain: bytes = b"") -> None:
        """Derive the keys; `domain` is the id of a write-only host's domain, empty for the store's
        own.
        """
        from blake3 import blake3

        self.encrypted = encrypted
        self.domain = domain
        self.chunk_key = derive(master, _CHUNKS)
        self._user = b""  # the user of the last chunk that was read
        self._hash = blake3
        self._names = derive(master, NAMES)
        self._packs = derive(master, _PACKS)
        self._objects = derive(master, _OBJECTS)
        self.config_key = derive(master, _CONFIG)

    def chunk_id(self, content: Buffer, user: bytes = b"") -> bytes:
        """Return the id of a chunk; in a domain the keys' owner can see from it that it is of this
        domain.

        `user` (`user_of`) makes the ids of one user's memory unrelated to those of another's: equal
        content is stored for each of them, so neither learns what the other has.
        """
        key = _user_key(self.chunk_key, user) if user else self.chunk_key
        digest: bytes = self._hash(content, key=key).digest()
        body = digest[:-_CHUNK_MARK_SIZE] if self.domain else digest
        if user:
            body = body[: -len(user)] + user
        return body + self._mark(body, _CHUNK_MARK_SIZE) if self.domain else body

    def user_of(self, uid: int) -> bytes:
        """Return what `chunk_id` adds for the memory of this user; nothing for root, and nothing
        where everyone with the store can read all of it.
        """
        return uid.to_bytes(_USER_SIZE, "little") if self.encrypted and uid > 0 else b""

    def matches(self, content: Buffer, chunk: bytes) -> bool:
        """Return whether this id is that of `content`, for the user that the id names or for
        none.
        """
        end = len(chunk) - (_CHUNK_MARK_SIZE if self.domain else 0)
        user = chunk[end - _USER_SIZE : end]
        if user == self._user:
            return chunk == self.chunk_id(content, user) or chunk == self.chunk_id(content)
        if chunk == self.chunk_id(content):
            return True
        if not self.encrypted or chunk != self.chunk_id(content, user):
            return False
        self._user = user  # the next chunk is probably of the same one: hash it once
        return True

    def token(self, name: str) -> str:
        """Return 32 hex digits that stand for `name` in the names of objects and reveal nothing
        without the key.
        """
        return keyed_hash(self._names, name.encode("utf-8", "surrogateescape"))[:16].hex()

    def pack(self, pack: bytes) -> PackSealer:
        """Return the sealer of the pack whose 16-byte name is `pack`."""
        return PackSealer(keyed_hash(self._packs, pack), self.encrypted)

    selective = False  # whether most objects may be of domains that these keys do not open

    def new_pack(self) -> bytes:
        """Return a name for a new pack: random, except for the mark by which the owner of a
        domain's keys recognises it.
        """
        rest = secrets.token_bytes(PACK_NAME_SIZE - _MARK_SIZE)
        return (
            self._mark(rest, _MARK_SIZE) if self.domain else secrets.token_bytes(_MARK_SIZE)
        ) + rest

    def owns(self, pack: bytes) -> bool:
        """Return whether this is a write-only host's domain and the pack of this name is in it."""
        return bool(self.domain) and self._mark(pack[_MARK_SIZE:], _MARK_SIZE) == pack[:_MARK_SIZE]

    def owns_chunk(self, chunk: bytes) -> bool:
        """Return the same for the chunk with this id."""
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
        """Ensure, before anything is sealed, that it can be opened later."""

    def of(self, domain: bytes, name: str) -> Sealer:
        """Return the keys of the domain that object `name` claims to belong to; raise `Damaged`,
        `Foreign` or errors of the store.
        """
        if domain:
            raise Damaged(
                f"{name} says that a write-only host has written it, and this store has none",
                object=name,
            )
        return self

    def of_pack(self, pack: bytes) -> Sealer:
        """Return the keys of the domain of the pack with this name; errors as `of`."""
        return self

    def author(self, domain: bytes) -> str:
        """Return the fingerprint of the write-only host that made the domain, which was opened
        before.
        """
        raise KeyError(domain)

    def of_list(self, name: str, *, shared: bool) -> Sealer:
        """Return the sealer of the list of packs `name`, which is sealed with the lists key if
        `shared`; errors as `of`.
        """
        return self.of(b"", name)

    def for_lists(self) -> tuple[Sealer, bool]:
        """Return the sealer for a new list of packs, and whether it uses the lists key."""
        return self, False

    def seal(self, content: Buffer, associated: bytes) -> bytes:
        """Seal `content` together with `associated`; the result is `OVERHEAD` bytes longer."""
        salt = secrets.token_bytes(SALT_SIZE)
        key = keyed_hash(self._objects, salt)
        if not self.encrypted:
            return b"".join((salt, content, _tag(key, content, associated)))
        return salt + _aes(key).encrypt(bytes(12), content, associated)  # type: ignore[no-any-return]

    def open(self, block: Buffer, associated: bytes) -> bytes:
        """Return the content that was given to `seal`; raise `SealBroken` when block or
        `associated` has changed.
        """
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
        self._masks = keyed_hash(key, _MASKS) if encrypted else b""
        # newer versions of cryptography can write into a buffer and save a copy
        self._into = getattr(self._aes, "encrypt_into", None)
        self.encrypted = encrypted
        self.overhead = TAG_SIZE if encrypted else 0

    def mask(self, offset: int, header: bytes) -> bytes:
        """Mask what is at this offset of the pack, or take the mask off: a one-time pad, since a
        pack's name and key are used once. It protects from reading only; the header is associated
        data of what follows. A plain store masks nothing.
        """
        if not self._masks:
            return header
        from blake3 import blake3

        pad = blake3(offset.to_bytes(8, "little"), key=self._masks).digest(length=len(header))
        masked = int.from_bytes(header, "little") ^ int.from_bytes(pad, "little")
        return masked.to_bytes(len(header), "little")

    def seal_into(self, number: int, payload: Buffer, header: bytes, target: memoryview) -> None:
        """Write a record's stored payload to `target`. A plain store keeps it as it is, since the
        chunk id detects damage.
        """
        if self._aes is None:
            _copy(payload, target)
        elif self._into is not None:
            self._into(_nonce(number), payload, header, target)
        else:
            target[:] = self._aes.encrypt(_nonce(number), payload, header)

    def open_record(self, number: int, stored: memoryview, header: bytes) -> Buffer:
        """Return the payload that was given to `seal_into`; raise `SealBroken`."""
        if self._aes is None:
            return stored
        return _unseal(self._aes, True, _nonce(number), stored, header)

    def seal_index(self, content: bytes, associated: bytes) -> bytes:
        """Seal the pack's own index, `TAG_SIZE` bytes longer; it has the highest record number."""
        if self._aes is None:
            return content + _tag(self._key, content, associated)
        return self._aes.encrypt(_nonce(-1), content, associated)  # type: ignore[no-any-return]

    def open_index(self, block: Buffer, associated: bytes) -> bytes:
        """Return the content that was given to `seal_index`; raise `SealBroken`."""
        return _unseal(
            self._aes or self._key, self.encrypted, _nonce(-1), memoryview(block), associated
        )


def _copy(source: Buffer, target: memoryview) -> None:
    """Copy without the interpreter's lock, which a plain slice assignment would hold while other
    threads could work.
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
        """Return (codec, payload): compressed where that saves enough, otherwise `content`
        itself.
        """
        packed = self._compress(content)
        if len(packed) < len(content) * _WORTH:
            return ZSTD, packed
        return RAW, content


class Decompressor:
    """The inverse of `Compressor`, safe for hostile content; one per thread."""

    def __init__(self) -> None:
        import zstandard

        self._decompress = zstandard.ZstdDecompressor().decompress
        self._parameters = zstandard.get_frame_parameters
        self._error = zstandard.ZstdError

    def __call__(self, codec: int, payload: Buffer, size: int) -> Buffer:
        """Return the plain content, exactly `size` bytes long; raise `SealBroken` for anything
        else, before memory is allocated.
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
    """Return the error for a stored object whose content is not what was written."""
    return Damaged(
        f"{name} is damaged: {what}",
        hint="`criuctl verify --all` shows which checkpoints need it.",
        object=name,
    )
