"""Stores: bytes under names, in a folder, in S3 or in memory.

`open_store` turns the URL that a user gives into a `Store`; it looks at the text alone and touches neither
disk nor network.  boto3 is imported when, and only when, an S3 store is opened.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from ..config import Config
from ..errors import UsageError
from .base import Buffer, Capabilities, ObjectInfo, Store

__all__ = ["Buffer", "Capabilities", "ObjectInfo", "Store", "from_anywhere", "open_store", "parse_s3_url"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX_PART = re.compile(r"[A-Za-z0-9!_.'()=+@-]+")
_HINT = "Write a path, file:///path or s3://bucket/prefix."


def open_store(url: str, config: Config) -> Store:
    """The store at `url`: a path, ``file:///path``, ``s3://bucket/prefix`` or ``memory:NAME``.

    Raises `UsageError` for anything else.  That the place exists and answers is found out by use:
    `Store.create`, `Store.check_writable`.
    """
    scheme = match[1].lower() if (match := _SCHEME.match(url)) else ""
    if scheme == "s3":
        bucket, prefix = parse_s3_url(url)
        from .s3 import S3Store

        return S3Store(bucket, prefix, config)
    if scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore.named(url)
    if scheme not in ("", "file"):
        raise _unknown_scheme(url, scheme)
    from .local import LocalStore

    return LocalStore(_local_path(url, scheme))


def from_anywhere(url: str) -> str:
    """The URL by which the store is the same one in whatever folder it is opened."""
    return url if _SCHEME.match(url) else _local_path(url, "")


def parse_s3_url(url: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of ``s3://bucket/prefix``; else `UsageError`."""
    if not url.lower().startswith("s3://"):
        raise UsageError("an S3 store is written s3://bucket/prefix, with two slashes", hint=_HINT)
    bucket, _, prefix = url[len("s3://") :].partition("/")
    if "@" in bucket or ":" in bucket:
        # The text may hold a secret: it is not repeated.
        raise UsageError(
            "the S3 store's URL names a user, a password or a port in place of the bucket",
            hint="Credentials come from the environment or ~/.aws, the endpoint from s3_endpoint or AWS_ENDPOINT_URL.",
        )
    if not bucket:
        raise UsageError(f"{url!r} names no bucket", hint=_HINT)
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{bucket!r} is not a bucket name", hint=_HINT)
    if prefix:
        prefix = prefix.removesuffix("/")
        for part in prefix.split("/"):
            if part in (".", "..") or not _PREFIX_PART.fullmatch(part):
                raise UsageError(f"{part!r} in {url!r} cannot be part of a store's prefix", hint=_HINT)
    if len(prefix) > 400:
        raise UsageError("the prefix of an S3 store may be 400 characters long at most", hint=_HINT)
    return bucket, prefix


def _local_path(url: str, scheme: str) -> str:
    path = url
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not url.lower().startswith("file://"):
            raise UsageError(f"{url!r} is not a local folder", hint="Write file:///path, with three slashes.")
        if parts.query or parts.fragment:
            raise UsageError(f"{url!r} holds a ? or #; write them as %3F and %23", hint=_HINT)
        path = unquote(parts.path, errors="surrogateescape")
        if not path.startswith("/"):
            raise UsageError(f"{url!r} names no folder", hint=_HINT)
    if not path or "\0" in path:
        raise UsageError("the store's path is empty" if not path else "the store's path holds a NUL byte", hint=_HINT)
    return os.path.abspath(os.path.expanduser(path) if scheme == "" else path)


def _unknown_scheme(url: str, scheme: str) -> UsageError:
    if scheme in ("http", "https"):
        return UsageError(
            "a store is not named by its http address",
            hint="Write s3://bucket/prefix and give the address as s3_endpoint in the config or as AWS_ENDPOINT_URL.",
        )
    hint = _HINT if "://" in url else f"{_HINT} A path that holds a colon is written ./{scheme}:..."
    return UsageError(f"no store is of the kind {scheme!r}", hint=hint)
