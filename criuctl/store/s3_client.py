"""Making boto3's client: how requests are signed, how long they may take, and answers that are acknowledged at once.

- Over http a body's SHA-256 is part of the signature, so what the server stores is what was sent, at a third of the
  cost of MD5.  Over https TLS sees to that.
- Some servers write an answer's head and its body in two pieces and wait, as Nagle has it, for the first one's
  acknowledgement before they send the second; the kernel delays that by 40 ms.  So before an answer is read the
  connection is told to acknowledge at once (TCP_QUICKACK, which lasts for one turn only).
- botocore's defaults for checksums fail with radosgw 16 over TLS and with rclone's ranges.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import boto3
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.config import Config as BotoConfig

from ..config import Config

_CONNECT_SECONDS = 5.0


class _Prompt:
    """A connection whose answers are acknowledged at once."""

    sock: socket.socket | None

    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        if self.sock is not None:
            with suppress(OSError, AttributeError):  # a broken connection tells so when it is read
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return super().getresponse(*args, **kwargs)  # type: ignore[misc]


class PromptConnection(_Prompt, AWSHTTPConnection):  # type: ignore[misc]
    """http."""


class PromptTLSConnection(_Prompt, AWSHTTPSConnection):  # type: ignore[misc]
    """https."""


def make_client(config: Config) -> Any:
    """A client for S3 as `config` and boto3's own sources of settings say; usable from all threads."""
    AWSHTTPConnectionPool.ConnectionCls = PromptConnection
    AWSHTTPSConnectionPool.ConnectionCls = PromptTLSConnection
    session = boto3.session.Session()

    client = session.client(
        "s3",
        endpoint_url=config.s3_endpoint or None,
        # A server of one's own has no regions, but a signature names one.
        region_name=config.s3_region or session.region_name or "us-east-1",
        config=BotoConfig(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=min(_CONNECT_SECONDS, config.s3_timeout),
            read_timeout=config.s3_timeout,
            retries={"total_max_attempts": 1},
            max_pool_connections=2 * config.uploads + 8,
            tcp_keepalive=True,
        ),
    )
    client.meta.config.s3["payload_signing_enabled"] = not client.meta.endpoint_url.startswith("https:")
    return client
