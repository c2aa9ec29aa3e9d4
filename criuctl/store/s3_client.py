"""Make boto3's S3 client: how requests are signed, how long they may take, how answers are read.

- Over http a body's SHA-256 is part of the signature, so what the server stores is what was sent,
  at a third of the cost of MD5.  Over https TLS ensures that.
- Some servers write an answer's head and its body in two pieces and wait, by Nagle's algorithm, for
  the first one's acknowledgement before they send the second; the kernel delays that by 40 ms.  So
  before an answer is read the connection is set to acknowledge at once (TCP_QUICKACK, which lasts
  for one turn only).
- Its sockets wait no longer than the request may take in total, see `s3_deadline`.
- botocore's defaults for checksums fail with radosgw 16 over TLS and with rclone's ranges.
- Every command that opens a store in S3 makes a client, so its cost counts: the client comes from
  boto3's core alone (botocore, with the same sources of settings; boto3 itself adds resources and a
  transfer manager, which are not used here), and the search through hundreds of services for this
  one is avoided.  That halves the time.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.config import Config as BotoConfig
from botocore.loaders import JSONFileLoader, Loader
from botocore.session import get_session

from ..config import Config
from .s3_deadline import LimitedSocket, LimitedTLSSocket

_CONNECT_SECONDS = 5.0
_AWS = re.compile(r"s3[.-](?:dualstack\.)?[a-z0-9-]+\.(amazonaws\.com(?:\.cn)?)")


class _Prompt:
    """A connection that acknowledges answers at once, and waits no longer than its request may
    take.
    """

    sock: socket.socket | None

    def _new_conn(self) -> socket.socket:
        return LimitedSocket.of(super()._new_conn())  # type: ignore[misc]

    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        if self.sock is not None:
            # a broken connection reports it when it is read
            with suppress(OSError, AttributeError):
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return super().getresponse(*args, **kwargs)  # type: ignore[misc]


class PromptConnection(_Prompt, AWSHTTPConnection):  # type: ignore[misc]
    """A connection for http."""


class PromptTLSConnection(_Prompt, AWSHTTPSConnection):  # type: ignore[misc]
    """A connection for https."""

    def connect(self) -> None:
        if self.ssl_context is not None:
            self.ssl_context.sslsocket_class = LimitedTLSSocket
        super().connect()


class _Files(JSONFileLoader):  # type: ignore[misc]
    """Reads botocore's descriptions of services into plain dictionaries.

    Ordered ones take three times as long.
    """

    def load_file(self, file_path: str) -> Any:
        for suffix, opened in ((".json", open), (".json.gz", gzip.open)):
            with suppress(FileNotFoundError), opened(file_path + suffix, "rb") as file:
                return json.loads(file.read())
        return None


class _Descriptions(Loader):  # type: ignore[misc]
    """Finds descriptions of S3, and looks for no other service."""

    def list_available_services(self, type_name: str) -> list[str]:
        return ["s3"]


def make_client(config: Config) -> Any:
    """Return a client for S3 by `config` and boto3's own sources of settings.

    Usable from all threads.
    """
    AWSHTTPConnectionPool.ConnectionCls = PromptConnection
    AWSHTTPSConnectionPool.ConnectionCls = PromptTLSConnection
    session = get_session()
    folders = (session.get_config_variable("data_path") or "").split(os.pathsep)
    extra = [os.path.expanduser(os.path.expandvars(folder)) for folder in folders if folder]
    session.register_component("data_loader", _Descriptions(extra, _Files()))
    client = session.create_client(
        "s3",
        endpoint_url=config.s3_endpoint or None,
        # A private server has no regions, but a signature names one.
        region_name=config.s3_region or session.get_config_variable("region") or "us-east-1",
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
    if not client.meta.endpoint_url.isprintable() or " " in client.meta.endpoint_url:
        # botocore would send it, and `redact` does not find its end
        raise ValueError("an endpoint has no blanks")
    client.meta.config.s3["payload_signing_enabled"] = not client.meta.endpoint_url.startswith(
        "https:"
    )
    return client


def server_of(endpoint: str) -> str:
    """Return the endpoint as a host pins it: one spelling, without credentials.

    AWS is one server in all its regions.
    """
    parts = urlsplit(endpoint)
    host, port = (parts.hostname or "").rstrip("."), parts.port
    host = f"s3.{found[1]}" if (found := _AWS.fullmatch(host)) else host
    host = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    suffix = "" if port in (None, usual) else f":{port}"
    return f"{parts.scheme}://{host}{suffix}{parts.path.rstrip('/')}"
