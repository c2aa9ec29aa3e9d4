"""Requests to a cloud's metadata service, in plain HTTP from within the machine.

The service answers on a link-local address, where on another network anything may answer. So an
answer is at most `LARGEST` bytes, arrives within its time however slowly it drips, is never a
redirect that is followed, and no proxy of the environment is used. What an answer means, the
module of the cloud decides.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from ...errors import HostUnreachable, UsageError

ADDRESS = "http://169.254.169.254"
LARGEST = 256 << 10  # bytes of an answer, with its head
_PIECE = 1 << 14
_NONE: Mapping[str, str] = MappingProxyType({})


class MetadataUnavailable(HostUnreachable):
    """The metadata service does not answer, or not as this cloud's does."""

    code = "metadata-unavailable"


class Answer(Struct, frozen=True):
    """An answer; the names of its `headers` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Return the body as text, without white space around it."""
        return self.body.decode("utf-8", "replace").strip()


class Metadata(Struct, frozen=True):
    """A metadata service."""

    host: str
    port: int

    @classmethod
    def at(cls, url: str) -> Metadata:
        """Return the service at ``http://HOST[:PORT]``; `UsageError`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port = None, 0
        if not host or parts.scheme != "http" or parts.path.strip("/") or parts.query:
            raise UsageError(
                f"{url!r} is no address of a metadata service", hint=f"Like {ADDRESS}."
            )
        return cls(host, port)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] = _NONE,
        body: bytes = b"",
        seconds: float = 2.0,
    ) -> Answer:
        """Return the answer to a request, whatever its status is; `MetadataUnavailable` if there is
        none within `seconds`, or one that is no HTTP or too large.
        """
        until = time.monotonic() + seconds
        try:
            with socket.create_connection((self.host, self.port), timeout=seconds) as sock:
                sock.settimeout(max(0.01, until - time.monotonic()))
                sock.sendall(self._request(method, path, headers, body))
                return _parsed(self._received(sock, until), method)
        except TimeoutError as error:
            raise self._unavailable(f"no answer within {seconds:g} s") from error
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error
        except (http.client.HTTPException, ValueError) as error:
            raise self._unavailable("what it answers is no HTTP") from error

    def _unavailable(self, reason: str) -> MetadataUnavailable:
        return MetadataUnavailable(f"the metadata service at {self.host}:{self.port}: {reason}")

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        fixed = {"Host": f"{host}:{self.port}" if self.port != 80 else host, "Connection": "close"}
        if body or method != "GET":
            fixed["Content-Length"] = str(len(body))
        lines = [f"{key}: {value}" for key, value in {**fixed, **headers}.items()]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("ascii") + body

    def _received(self, sock: socket.socket, until: float) -> bytes:
        received = bytearray()
        while not _complete(received):
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
            piece = sock.recv(_PIECE)
            if not piece:
                break
            received += piece
            if len(received) > LARGEST:
                raise self._unavailable(f"its answer has more than {LARGEST} bytes")
        return bytes(received)


def _complete(received: bytearray) -> bool:
    """Return whether the whole answer has arrived, if its head says how long it is."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return len(body) >= int(value)
    return False


class _Received:
    """What `http.client` reads from: it arrived already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_args: Any) -> io.BytesIO:
        """Return the bytes as a file."""
        return io.BytesIO(self._data)


def _parsed(data: bytes, method: str) -> Answer:
    response = http.client.HTTPResponse(_Received(data), method=method)  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, body)
