"""Access control: a request needs the token, an origin of this very server, and a known
host name.

The token is new for each server and printed once, in the fragment of its address: browsers do not
send fragments, so it is in no log and no history of a proxy. The page sends it as a bearer token
(of a WebSocket as a subprotocol), never as a cookie, which a browser would also send to servers on
other ports of this host, and with requests of other sites.

A foreign page can make a browser send requests here, and by DNS rebinding even under a name of its
own. So ``Host`` must be an address, ``localhost`` or a configured name, and an ``Origin`` must be
that same host.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable
from hmac import compare_digest
from urllib.parse import urlsplit

from aiohttp import web

PROTOCOL = "criuctl"  # the WebSocket's own subprotocol; the token is sent as another one
_TOKEN = "token."
_BEARER = "Bearer "
_OPEN_METHODS = ("GET", "HEAD")

# Styles may be in attributes, where the terminal emulator puts them; scripts may not.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Server": "criuctl",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal(status: int, code: str, message: str, hint: str = "") -> web.Response:
    """Return an error as the page understands it; the same shape as of ``criuctl --json``."""
    return web.json_response(
        {"error": {"code": code, "message": message, "hint": hint}}, status=status
    )


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


class Access:
    """The rules of one server."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Set up the rules; `names` are names under which the server is reached, besides addresses
        and ``localhost``.
        """
        self.token = secrets.token_urlsafe(32)
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

    def own_origin(self, request: web.Request) -> bool:
        """Return whether the request comes from a page of this server; a WebSocket must have an
        ``Origin``, a plain request may lack it.
        """
        origin = request.headers.get("Origin")
        if origin is None:
            return "Upgrade" not in request.headers
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return (
            parts.scheme in ("http", "https")
            and parts.netloc.lower() == request.headers.get("Host", "").lower()
        )

    def bears_token(self, request: web.Request) -> bool:
        """Return whether the request has the token, compared in constant time."""
        given = request.headers.get("Authorization", "")
        token = given[len(_BEARER) :] if given.startswith(_BEARER) else ""
        for word in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
            if word.strip().startswith(_TOKEN):
                token = word.strip()[len(_TOKEN) :]
        return compare_digest(token.encode(errors="surrogateescape"), self.token.encode())

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without access. The page without any data, its scripts and styles, is not
        secret.
        """
        if not self.knows(request.headers.get("Host")):
            return refusal(
                403,
                "host",
                "this server is not known under that name",
                "Open it as localhost, or see --name.",
            )
        if not self.own_origin(request):
            return refusal(403, "origin", "this request comes from another site's page")
        if request.path.startswith("/api/"):
            if not self.bears_token(request):
                return refusal(
                    401,
                    "token",
                    "the token is missing or wrong",
                    "Open the address that `criuctl ui` has printed.",
                )
        elif request.method not in _OPEN_METHODS:
            return refusal(405, "method", "only the page itself is here")
        return await handler(request)


async def harden(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers to every answer; for ``on_response_prepare``."""
    response.headers.update(_HEADERS)
    response.headers["Cache-Control"] = (
        "no-store" if request.path.startswith("/api/") else "no-cache"
    )
