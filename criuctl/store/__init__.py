"""Stores: bytes under names, in a folder, in S3 or in memory.

`open_store` turns the URL that a user gives into a `Store`; it looks at the text alone and touches
neither disk nor network. boto3 is imported only when an S3 store is opened. A command that
announces early that it will need the store (`coming`) lets another process import it meanwhile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..config import Config
from ..errors import UsageError
from ..proc.early_process import EarlyProcess, obtain
from .base import Buffer, Capabilities, ObjectInfo, Store

__all__ = [
    "Buffer",
    "Capabilities",
    "ObjectInfo",
    "Store",
    "coming",
    "from_anywhere",
    "open_store",
    "parse_s3_url",
    "settled",
]

BOTO3_PROCESS = f"{__package__}.boto3_process"
"""The module that a process for an S3 store loads, see `criuctl.proc.early_process`."""

_opened_early: dict[str, Store] = {}
"""Stores that processes are opening, by URL, until `open_store` returns them to their caller."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX_PART = re.compile(r"[A-Za-z0-9!_.'()=+@-]+")
_HINT = "Write a path, file:///path or s3://bucket/prefix."


def open_store(url: str, config: Config) -> Store:
    """Return the store at `url`: a path, ``file:///path``, ``s3://bucket/prefix`` or
    ``memory:NAME``.

    Raises `UsageError` for anything else. Whether the place exists and answers shows only in use:
    `Store.create`, `Store.check_writable`.
    """
    if url in _opened_early:
        return _opened_early.pop(url)
    scheme = match[1].lower() if (match := _SCHEME.match(url)) else ""
    if scheme == "s3":
        return _open_s3(url, config)
    if scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore.named(url)
    if scheme not in ("", "file"):
        raise _unknown_scheme(url, scheme)
    from .local import LocalStore

    return LocalStore(_local_path(url, scheme), verify=config.verify_writes)


@contextmanager
def coming(url: str, config: Config) -> Iterator[None]:
    """Announce that `open_store` will be called once for this store inside the block.

    Slow modules are loaded meanwhile, in another process, or in `open_store` if no process can be
    started. The calling process must have a single thread.
    """
    process: EarlyProcess | None = None
    if url[:3].lower() == "s3:":
        with suppress(UsageError):  # `open_store` reports it
            bucket, prefix = parse_s3_url(url)
            process = obtain(BOTO3_PROCESS)
            if process is not None:
                from .boto3_process import ProcessStore

                _opened_early[url] = ProcessStore(
                    f"s3://{bucket}/{prefix}".rstrip("/"), config, process
                )
    try:
        yield
    finally:
        if url in _opened_early:
            _opened_early.pop(url).close()
        if process is not None:
            process.close()
            process.reap()


def _open_s3(url: str, config: Config) -> Store:
    bucket, prefix = parse_s3_url(url)
    from .s3 import S3Store

    return S3Store(bucket, prefix, config)


def from_anywhere(url: str) -> str:
    """Return the URL by which the store is the same one from any working folder."""
    return url if _SCHEME.match(url) else _local_path(url, "")


def settled(config: Config) -> Config:
    """Return the configuration with an absolute store URL, for later readers of its name: a hook,
    the recovery after a boot, another process.
    """
    with suppress(UsageError, FileNotFoundError):  # `open_store` reports the error
        return config.with_options(store=from_anywhere(config.store))
    return config


def parse_s3_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix (without slashes at its ends) of ``s3://bucket/prefix``.

    `UsageError` for any other text.
    """
    if not url.lower().startswith("s3://"):
        raise UsageError("an S3 store is written s3://bucket/prefix, with two slashes", hint=_HINT)
    bucket, _, prefix = url[len("s3://") :].partition("/")
    if "@" in bucket or ":" in bucket:
        # The text may contain a secret: it is not repeated.
        raise UsageError(
            "the S3 store's URL names a user, a password or a port in place of the bucket",
            hint=(
                "Credentials come from the environment or ~/.aws, the endpoint from s3_endpoint "
                "or AWS_ENDPOINT_URL."
            ),
        )
    if not bucket:
        raise UsageError(f"{url!r} names no bucket", hint=_HINT)
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{bucket!r} is not a bucket name", hint=_HINT)
    if prefix:
        prefix = prefix.removesuffix("/")
        for part in prefix.split("/"):
            if part in (".", "..") or not _PREFIX_PART.fullmatch(part):
                raise UsageError(
                    f"{part!r} in {url!r} cannot be part of a store's prefix", hint=_HINT
                )
    if len(prefix) > 400:
        raise UsageError("the prefix of an S3 store may be 400 characters long at most", hint=_HINT)
    return bucket, prefix


def _local_path(url: str, scheme: str) -> str:
    path = url
    if scheme == "file":
        from urllib.parse import unquote, urlsplit

        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not url.lower().startswith("file://"):
            raise UsageError(
                f"{url!r} is not a local folder", hint="Write file:///path, with three slashes."
            )
        if parts.query or parts.fragment:
            raise UsageError(f"{url!r} holds a ? or #; write them as %3F and %23", hint=_HINT)
        path = unquote(parts.path, errors="surrogateescape")
        if not path.startswith("/"):
            raise UsageError(f"{url!r} names no folder", hint=_HINT)
    if not path or "\0" in path:
        raise UsageError(
            "the store's path is empty" if not path else "the store's path holds a NUL byte",
            hint=_HINT,
        )
    return os.path.abspath(os.path.expanduser(path) if scheme == "" else path)


def _unknown_scheme(url: str, scheme: str) -> UsageError:
    if scheme in ("http", "https"):
        return UsageError(
            "a store is not named by its http address",
            hint=(
                "Write s3://bucket/prefix and give the address as s3_endpoint in the config or as "
                "AWS_ENDPOINT_URL."
            ),
        )
    hint = _HINT if "://" in url else f"{_HINT} A path that holds a colon is written ./{scheme}:..."
    return UsageError(f"there is no kind of store called {scheme!r}", hint=hint)
