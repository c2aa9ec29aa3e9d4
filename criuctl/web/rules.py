"""The rules of access to a server of this host, whatever its framework: the token, the server's own
names, and the origin of a request.

A foreign page can make a browser send requests here, and by DNS rebinding even under a name of its
own. So ``Host`` must be an address, ``localhost`` or a configured name, and an ``Origin`` must be
that same host.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from hmac import compare_digest
from urllib.parse import urlsplit

from msgspec import Struct

from ..errors import Conflict, UsageError

_BEARER = "Bearer "
Headers = Mapping[str, str]  # case does not matter in its keys


def hostname(netloc: str) -> str | None:
    """Return the host in ``HOST[:PORT]``, without brackets and in lower case; None if it is
    malformed.
    """
    try:
        parts = urlsplit(f"//{netloc}")
        _ = parts.port  # raises for an invalid port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`, an address or ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Rules:
    """The rules of one server."""

    def __init__(self, names: Iterable[str] = (), token: str = "") -> None:
        """Set up the rules; `names` are names under which the server is reached, besides addresses
        and ``localhost``. Without a `token` there is a new one.
        """
        self.token = token or secrets.token_urlsafe(32)
        self._names = {name.lower() for name in names} | {"localhost", os.uname().nodename.lower()}

    def knows(self, host: str | None) -> bool:
        """Return whether a ``Host`` header may have this value: no name that an attacker could have
        pointed here.
        """
        name = hostname(host) if host else None
        if name is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def own_origin(self, headers: Headers) -> bool:
        """Return whether the request comes from a page of this server; a WebSocket must have an
        ``Origin``, a plain request may lack it.
        """
        origin = headers.get("Origin")
        if origin is None:
            return "Upgrade" not in headers
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return (
            parts.scheme in ("http", "https")
            and parts.netloc.lower() == headers.get("Host", "").lower()
        )

    def bears_token(self, headers: Headers) -> bool:
        """Return whether the request has the token as a bearer token."""
        given = headers.get("Authorization", "")
        return self.is_token(given[len(_BEARER) :] if given.startswith(_BEARER) else "")

    def is_token(self, given: str) -> bool:
        """Return whether this is the token, compared in constant time."""
        return compare_digest(given.encode(errors="surrogateescape"), self.token.encode())


class Address(Struct, frozen=True):
    """Where the server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``HOST:PORT``, ``[IPV6]:PORT``, or a port alone; raise `UsageError`."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
        if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
            raise UsageError(
                f"{text!r} is no address to listen on", hint="Like 127.0.0.1:8765, or [::1]:8765."
            )
        return cls(host, int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)

    def url(self) -> str:
        """Return the page's address, as a browser on this machine opens it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"


def listen(address: Address) -> socket.socket:
    """Return a socket that listens there; `Conflict` if the address is taken."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise UsageError(f"{address.host}: no such address ({error.strerror or error})") from error
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(64)
    except OSError as error:
        sock.close()
        message = f"{address.host}:{address.port} cannot be listened on ({error.strerror or error})"
        raise Conflict(message, hint="Another port: 127.0.0.1:0 takes any that is free.") from error
    return sock
