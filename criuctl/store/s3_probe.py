"""Find out whether an S3 server's conditional writes can be trusted.

Servers claim more than they do: some ignore If-None-Match, one looks right while requests come one
by one and lets several racing writers win. So two things are tested on objects of our own:

1. one after the other: the second conditional PutObject must be refused and the first's bytes stay;
2. overlapping, several times: two conditional PutObjects are both half sent before either may end.
   Exactly one must succeed, and the bytes must be its own.

A race that went well proves little, so knowledge about the server decides: AWS and radosgw are
known to be atomic, OpenStack Swift is known not to be. Any other server that passes is ``probed``;
one that fails is ``weak``.
"""

from __future__ import annotations

import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from .base import Capabilities, probe_name
from .s3_body import ViewReader
from .s3_errors import condition_failed, condition_unknown, status_of

_ROUNDS = 4
_HALF = 128 << 10  # bytes; more than a server is likely to receive together with the headers
_MEETING_SECONDS = 5.0  # a server that serves one request at a time never receives both halves

_AWS_HOST = re.compile(r"(?:^|\.)amazonaws\.com(?:\.cn)?$")
_RADOSGW_REQUEST = re.compile(r"tx[0-9a-f]{21}-[0-9a-f]{10}-[0-9a-f]+-.+")


def probe(client: Any, bucket: str, base: str) -> Capabilities:
    """Return what the server of `bucket` can do, tested below the key prefix `base`.

    botocore's errors pass through.
    """
    trials = [base + probe_name() for _ in range(_ROUNDS + 1)]
    try:
        sequential, headers = _one_by_one(client, bucket, trials[0])
        exclusive = sequential and all(_overlapping(client, bucket, key) for key in trials[1:])
    finally:
        for key in trials:
            client.delete_object(Bucket=bucket, Key=key)
    kind = _known_server(client.meta.endpoint_url, headers)
    if not exclusive or kind == "swift":
        return Capabilities(conditional_create=False, kind=kind if kind == "swift" else "weak")
    return Capabilities(conditional_create=True, kind=kind or "probed")


def _one_by_one(client: Any, bucket: str, key: str) -> tuple[bool, dict[str, str]]:
    """Return whether a second writer is refused, and the headers of the first answer."""
    first = secrets.token_bytes(32)
    # Unconditional: even a server without conditions answers this, and its headers are examined.
    answer = client.put_object(Bucket=bucket, Key=key, Body=first)
    refused = not _write_if_absent(client, bucket, key, secrets.token_bytes(32))
    held = client.get_object(Bucket=bucket, Key=key)["Body"].read() == first
    return refused and held, answer["ResponseMetadata"]["HTTPHeaders"]


def _overlapping(client: Any, bucket: str, key: str) -> bool:
    """Return whether exactly one of two overlapping writers wins, and its bytes are stored."""
    contents = [secrets.token_bytes(2 * _HALF) for _ in range(2)]
    meeting = threading.Barrier(2)
    with ThreadPoolExecutor(2, thread_name_prefix="s3-probe") as pool:
        writers = [
            pool.submit(_write_if_absent, client, bucket, key, _Pausing(content, meeting))
            for content in contents
        ]
        won = [writer.result() for writer in writers]
    if won.count(True) != 1:
        return False
    held: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return held == contents[won.index(True)]


def _write_if_absent(client: Any, bucket: str, key: str, body: bytes | ViewReader) -> bool:
    """Return whether the conditional write was accepted."""
    try:
        client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        if condition_failed(error):
            return False
        if condition_unknown(error) or status_of(error) == 400:
            return True  # the server does not support conditions: nothing held this writer back
        raise
    return True


class _Pausing(ViewReader):
    """A body that, half sent, waits until the other writer's is half sent too."""

    def __init__(self, content: bytes, meeting: threading.Barrier) -> None:
        super().__init__([memoryview(content)[:_HALF], memoryview(content)[_HALF:]])
        self._meeting = meeting

    def read(self, size: int = -1) -> bytes | memoryview:
        if self.tell() == _HALF:
            with suppress(threading.BrokenBarrierError):
                self._meeting.wait(_MEETING_SECONDS)
        return super().read(size)


def _known_server(endpoint: str, headers: dict[str, str]) -> str:
    """Return the server's name if its behaviour is known, else ''.

    The Server header proves little (rclone says AmazonS3): AWS is known by its host name, the
    others by headers that only they send.
    """
    if _AWS_HOST.search(urlsplit(endpoint).hostname or ""):
        return "aws"
    if "x-openstack-request-id" in headers:
        return "swift"
    if _RADOSGW_REQUEST.fullmatch(headers.get("x-amz-request-id", "")):
        return "radosgw"
    return ""
