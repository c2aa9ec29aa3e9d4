"""Access control: a request needs the token, an origin of this very server, and a known
host name.

The token is new for each server and printed once, in the fragment of its address: browsers do not
send fragments, so it is in no log and no history of a proxy. The page sends it as a bearer token
(of a WebSocket as a subprotocol), never as a cookie, which a browser would also send to servers on
other ports of this host, and with requests of other sites.
`rules` has the rules that do not depend on aiohttp.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from .links import EVERYTHING, Grant, Links
from .rules import Headers, Rules

PROTOCOL = "criuctl"  # the WebSocket's own subprotocol; the token is sent as another one
GRANT = web.RequestKey("grant", Grant)
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


class Access(Rules):
    """The rules of one server, for aiohttp."""

    def __init__(self, names: Iterable[str] = (), links: Links | None = None) -> None:
        """Set up; `links` are tokens that allow less than this server's own."""
        super().__init__(names)
        self.links = links or Links()

    def grant(self, headers: Headers) -> Grant | None:
        """Return what the token of a request allows; a WebSocket has it as a subprotocol."""
        for word in headers.get("Sec-WebSocket-Protocol", "").split(","):
            if word.strip().startswith(_TOKEN):
                token = word.strip()[len(_TOKEN) :]
                break
        else:
            given = headers.get("Authorization", "")
            token = given[len(_BEARER) :] if given.startswith(_BEARER) else ""
        return EVERYTHING if self.is_token(token) else self.links.find(token)

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
        if not self.own_origin(request.headers):
            return refusal(403, "origin", "this request comes from another site's page")
        if request.path.startswith("/api/"):
            grant = self.grant(request.headers)
            if grant is None:
                return refusal(
                    401,
                    "token",
                    "the token is missing, wrong, or has expired",
                    "Open the address that `criuctl ui` has printed.",
                )
            request[GRANT] = grant
        elif request.method not in _OPEN_METHODS:
            return refusal(405, "method", "only the page itself is here")
        return await handler(request)


async def harden(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers to every answer; for ``on_response_prepare``."""
    response.headers.update(_HEADERS)
    response.headers["Cache-Control"] = (
        "no-store" if request.path.startswith("/api/") else "no-cache"
    )
