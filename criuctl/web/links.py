"""Links for others: a token for the terminal of one session, with a role and an expiry.

The server's own token allows everything; a link allows very little. What it allows is a list of
requests (`ALLOWED`); everything else, also what is added to the server later, is refused. It is for
one session by its identity, not by its name: a later session of the same name is another one. The
holder enforces the role, as for every operator.

Links live in the memory of their server and end with it. It keeps a digest of each token, so a link
is shown once. When a link ends, by expiry or because it is revoked, its open connections are
closed. Time is counted while the machine is suspended as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from aiohttp import WSCloseCode, web
from msgspec import Struct, field

from ..errors import Conflict, Forbidden, NotFound, UsageError
from ..report import utc_text

ROLES = ("observe", "write")
LONGEST = 7 * 24 * 3600.0  # seconds
MOST = 100  # links at a time
_PERIOD = 1.0  # seconds between two looks for links that have expired

# What a link may request, each with GET.
ALLOWED = frozenset(
    {
        "/api/about",
        "/api/live",
        "/api/sessions/{name}/terminal",
        "/api/sessions/{name}/tree",
    }
)


class Grant(Struct, eq=False):
    """What the bearer of a token may do; without a session: everything."""

    id: str = ""
    session: str = ""
    session_id: str = ""
    role: str = "write"
    until: float = 0.0  # seconds of CLOCK_BOOTTIME
    expires: float = 0.0  # the same moment for people, seconds since 1970
    ended: bool = False
    sockets: set[web.WebSocketResponse] = field(default_factory=set)

    def open(self, socket: web.WebSocketResponse) -> None:
        """Note a connection, to be closed when the link ends; `Forbidden` if it has."""
        if self.ended:
            raise Forbidden("this link has ended")
        self.sockets.add(socket)

    @property
    def limited(self) -> bool:
        """Whether this is a link."""
        return bool(self.id)

    def to_dict(self) -> dict[str, Any]:
        """Return what people may see of it; the token is not known any more."""
        return {
            "id": self.id,
            "session": self.session,
            "role": self.role,
            "expires": utc_text(self.expires),
        }


EVERYTHING = Grant()


class Links:
    """The links of one server."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
        self._grants: dict[bytes, Grant] = {}  # by the digest of the token

    def create(self, session: str, session_id: str, role: str, seconds: float) -> tuple[str, Grant]:
        """Return a new link and its token. `UsageError`, `Conflict`."""
        if role not in ROLES:
            raise UsageError(f"a link has the role {' or '.join(ROLES)}")
        if not 1 <= seconds <= LONGEST:
            raise UsageError("a link lasts from a second to seven days")
        if len(self.all()) >= MOST:
            raise Conflict(f"there are {MOST} links already", hint="Revoke one.")
        token = secrets.token_urlsafe(32)
        grant = Grant(
            id=secrets.token_hex(4),
            session=session,
            session_id=session_id,
            role=role,
            until=self._clock() + seconds,
            expires=time.time() + seconds,
        )
        self._grants[_digest(token)] = grant
        return token, grant

    def find(self, token: str) -> Grant | None:
        """Return what this token allows; None if it is no link's, or that has ended."""
        grant = self._grants.get(_digest(token))
        return grant if grant is not None and self._clock() < grant.until else None

    def all(self) -> list[Grant]:
        """Return the links that have not ended, the first to expire first."""
        return sorted(
            (grant for grant in self._grants.values() if self._clock() < grant.until),
            key=lambda grant: grant.until,
        )

    async def revoke(self, identifier: str) -> None:
        """End a link and its connections now; `NotFound`."""
        for digest, grant in self._grants.items():
            if grant.id == identifier:
                del self._grants[digest]
                await _end([grant])
                return
        raise NotFound("there is no such link; it may have expired")

    async def watch(self, _app: web.Application) -> Any:
        """End links when they expire, while the server runs; for ``cleanup_ctx``."""

        async def work() -> None:
            while True:
                await asyncio.sleep(_PERIOD)
                await _end(self._expire())

        task = asyncio.create_task(work())
        yield
        task.cancel()

    def _expire(self) -> list[Grant]:
        over = [digest for digest, one in self._grants.items() if self._clock() >= one.until]
        return [self._grants.pop(digest) for digest in over]


async def _end(grants: list[Grant]) -> None:
    for grant in grants:
        grant.ended = True  # first: a connection that opens meanwhile is refused
    closing = [
        socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"the link has ended")
        for grant in grants
        for socket in grant.sockets
    ]
    await asyncio.gather(*closing, return_exceptions=True)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
