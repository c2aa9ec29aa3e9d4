"""The TLS side of the relay: a verified connection to the server.

PostgreSQL is asked for TLS in plain text first (SSLRequest). Its answer is read as one byte from
the kernel, so that nothing that an attacker adds in plain text is taken for what the server sent
later: the rest is the handshake's. Other servers are spoken to in TLS from the first byte.

Certificates and keys are read for each connection: renewed ones are used without a new start.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import Literal

from msgspec import Struct

from ...errors import CriuctlError, HostUnreachable, UntrustedPath, UsageError
from .postgresql_login import SSL_REQUEST

Protocol = Literal["postgresql", "redis", "tls"]
_OTHERS = 0o037  # of a key's mode: what libpq refuses, too, of a file of root's
_PORTS: dict[int, Protocol] = {5432: "postgresql", 6379: "redis", 6380: "redis"}
_CLOSE_SECONDS = 5.0  # for the server's answer to the end


class Trust(Struct, frozen=True):
    """The certificates that are believed, and the relay's own."""

    ca: str | None = None  # file of authorities; None: those of the system
    cert: str | None = None  # file with the client's certificate, and its key unless `key` is given
    key: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """Return the settings of a connection; `UsageError` for a file that cannot be used."""
        what = self.ca or "the system's authorities"
        try:
            made = ssl.create_default_context(cafile=self.ca)
            if not self.verify:
                made.check_hostname = False
                made.verify_mode = ssl.CERT_NONE
            if self.cert is not None:
                what = self.key or self.cert
                _check_private(what)
                made.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(
                f"{what} cannot be used: {_reason(error)}", hint="It has to be in the PEM format."
            ) from error
        return made


class Server(Struct, frozen=True):
    """The server that the relay connects to."""

    host: str
    port: int
    protocol: Protocol
    name: str = ""  # that its certificate must have; "" is `host`

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def protocol_of(port: int) -> Protocol:
    """Return the protocol that servers on this port speak; `UsageError` for an unknown one."""
    try:
        return _PORTS[port]
    except KeyError:
        raise UsageError(
            f"what is spoken on port {port} is not known",
            hint="Give --protocol postgresql, redis, or tls for TLS from the first byte.",
        ) from None


async def connected(
    server: Server, trust: Trust
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to the server after its certificate was verified; `HostUnreachable`."""
    context = trust.context()
    sock = await _dialled(server)
    try:
        if server.protocol == "postgresql":
            await _ask_for_tls(sock, server)
        return await asyncio.open_connection(
            sock=sock,
            ssl=context,
            server_hostname=server.name or server.host,
            ssl_shutdown_timeout=_CLOSE_SECONDS,
        )
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise HostUnreachable(
            f"{server} is not trusted: {error.verify_message}",
            hint="--ca names the authority that signed its certificate, --server-name the name "
            "in it.",
        ) from error
    except OSError as error:
        sock.close()
        raise HostUnreachable(f"{server}: no TLS: {_reason(error)}") from error
    except BaseException:
        sock.close()
        raise


async def _dialled(server: Server) -> socket.socket:
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    try:
        found = await loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostUnreachable(f"{server.host}: no such host ({_reason(error)})") from error
    for family, kind, protocol, _name, address in found:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            await loop.sock_connect(sock, address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            problem = error
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    reason = _reason(problem) if problem is not None else "it has no address"
    raise HostUnreachable(f"{server} cannot be reached: {reason}")


async def _ask_for_tls(sock: socket.socket, server: Server) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, SSL_REQUEST)
    answer = await loop.sock_recv(sock, 1)
    if answer == b"N":
        raise HostUnreachable(f"{server} has no TLS", hint="Set `ssl = on` in postgresql.conf.")
    if answer != b"S":
        raise HostUnreachable(
            f"{server} does not answer as PostgreSQL does", hint="See --protocol."
        )


def _check_private(path: str) -> None:
    if os.stat(path).st_mode & _OTHERS:
        raise UntrustedPath(
            f"{path} is not used: other users can read or change the private key",
            hint="Give it mode 0600, or 0640 and a group of its own.",
            path=path,
        )


def _no_passphrase() -> str:
    raise UsageError(
        "the private key is encrypted, and a relay cannot ask for its passphrase",
        hint="Use a key without a passphrase, in a file with mode 0600.",
    )


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) if isinstance(error, ssl.SSLError) else None
    return str(reason or error.strerror or error)


def message_of(error: BaseException) -> str:
    """Return why a connection failed, in one line."""
    if isinstance(error, CriuctlError):
        return error.message
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return _reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
