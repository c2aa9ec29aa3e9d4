"""The guest's end: a `Session` by way of an invitation.

One ssh connection, in a thread with an event loop, carries all channels of this guest. It is made
again for the next channel when it was lost, with the key that this object has made. The host key is
the invitation's; a relay that puts itself in between has another one, and nothing is sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from typing import Any, Self

import asyncssh

from ..errors import CriuctlError, Forbidden, SessionGone
from ..proc import command
from ..proc.child import Child
from ..session.client import caller
from ..session.client.session import Session
from ..transport import ssh
from .invitation import Invitation, encode, private_key, public_key, raw_key
from .server import ALGORITHMS, FINAL, SUBSYSTEM, Reader, Writer

_CONNECT = 10.0  # seconds
_READ = 1 << 16
_NOT_LET_IN = "the share does not let this invitation in: it was used already, or is another one's"


class _Client(asyncssh.SSHClient):
    """Notes an end that is for good."""

    def __init__(self) -> None:
        self.over = ""
        self._in = False

    def auth_completed(self) -> None:
        self._in = True  # the host key was right: what comes is the keeper's

    def connection_lost(self, exc: Exception | None) -> None:
        if self._in and isinstance(exc, asyncssh.DisconnectError) and exc.code == FINAL:
            self.over = "".join(c if c.isprintable() else "?" for c in exc.reason[:200])


class Guest:
    """A guest of one share."""

    def __init__(
        self,
        invitation: Invitation,
        via: ssh.Host | None = None,
        program: tuple[str, ...] = ("ssh",),
        session: type[Session] = Session,
    ) -> None:
        """`via`: log in to the relay with this ssh `program`, and reach the share from there.
        `session`: what speaks with the holder.
        """
        self._invitation, self._via, self._program = invitation, via, program
        self._kind = session
        self._own = private_key(secrets.token_bytes(32))
        self._connection: asyncssh.SSHClientConnection | None = None
        self._client = _Client()
        self._login: Child | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def connect(self, resume: tuple[str, str] | None = None, *, role: str = "write") -> Session:
        """Return a new connection to the session, with the role of the share, or `role` if that is
        less. `SessionGone`: it can be tried again; `Forbidden`: it cannot.
        """
        ours, theirs = socket.socketpair()
        try:
            asyncio.run_coroutine_threadsafe(self._open(theirs), self._loop).result()
        except BaseException:
            ours.close()
            raise
        try:
            return self._kind(ours, kind=caller.kind(), role=role, resume=resume)
        except SessionGone as error:
            if self._client.over:
                raise Forbidden(self._client.over) from error
            raise

    def close(self) -> None:
        """Leave."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the thread ----------------------------------------------------------------------------

    async def _open(self, sock: socket.socket) -> None:
        """Open a channel and have `sock` carried by it."""
        try:
            async with self._lock, asyncio.timeout(_CONNECT):
                reader, writer = await self._channel()
        except asyncssh.PermissionDenied as error:
            raise Forbidden(_NOT_LET_IN, hint="Ask for another one.") from error
        except asyncssh.HostKeyNotVerifiable as error:
            raise Forbidden(
                "what answers at this address is not the share's host; nothing was sent to it",
                hint="The relay may have been taken over.",
            ) from error
        except (asyncssh.Error, OSError, TimeoutError) as error:
            if self._client.over:
                raise Forbidden(self._client.over) from error
            where = f"{self._invitation.host}:{self._invitation.port}"
            raise SessionGone(
                f"the share cannot be reached at {where} ({self._why(error)})",
                hint="It may have expired or been revoked; or see --via.",
            ) from error
        except CriuctlError:
            raise
        local_reader, local_writer = await asyncio.open_unix_connection(sock=sock)
        task = self._loop.create_task(_carry(local_reader, local_writer, reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _channel(self) -> tuple[Reader, Writer]:
        if self._connection is not None:
            try:
                return await self._subsystem(self._connection)
            except (asyncssh.Error, OSError):
                if not self._connection.is_closed():
                    raise  # refused: too many at a time, or the share is about to end
        if self._client.over:
            raise asyncssh.ConnectionLost(self._client.over)
        await self._hang_up()
        self._client = client = _Client()
        where: dict[str, Any] = {"sock": self._relayed()} if self._via is not None else {}
        self._connection = await asyncssh.connect(
            self._invitation.host,
            self._invitation.port,
            client_factory=lambda: client,
            username=encode(raw_key(self._own)),
            client_keys=[self._own, private_key(self._invitation.secret)],
            known_hosts=([public_key(self._invitation.host_key)], [], []),
            server_host_key_algs=["ssh-ed25519"],
            preferred_auth="publickey",
            client_version="criuctl",
            agent_path=None,
            agent_forwarding=False,
            x11_forwarding=False,
            **where,
            **ALGORITHMS,
        )
        return await self._subsystem(self._connection)

    async def _subsystem(self, connection: asyncssh.SSHClientConnection) -> tuple[Reader, Writer]:
        writer, reader, _ = await connection.open_session(subsystem=SUBSYSTEM, encoding=None)
        return reader, writer

    def _relayed(self) -> socket.socket:
        """Return a socket that leads to the share through a login at the relay."""
        assert self._via is not None
        host = ssh.unattended(self._via)
        ours, theirs = socket.socketpair()
        with theirs:
            self._login = command.spawn(
                [
                    *self._program,
                    *(word for option in host.options for word in ("-o", option)),
                    *("-W", f"localhost:{self._invitation.port}"),
                    *host.address.words(),
                ],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=ssh.environment(),
            )
        return ours

    def _why(self, error: BaseException) -> str:
        if self._login is not None:
            said = ssh.last_output(self._login, trusted=False)[1]
            if said:
                return said
        return str(error) or "no answer in time"

    async def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        if self._login is not None:
            self._login.end()
            self._login.close()
            self._login = None

    async def _close(self) -> None:
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(asyncssh.Error, OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._connection.wait_closed()
        await self._hang_up()


async def _carry(
    local_reader: asyncio.StreamReader,
    local_writer: asyncio.StreamWriter,
    reader: Reader,
    writer: Writer,
) -> None:
    """Carry bytes both ways until one side closes."""

    async def out() -> None:
        while data := await local_reader.read(_READ):
            writer.write(data)
            await writer.drain()

    async def back() -> None:
        while data := await reader.read(_READ):
            local_writer.write(data)
            await local_writer.drain()

    ways = [asyncio.ensure_future(out()), asyncio.ensure_future(back())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        local_writer.close()
        writer.close()
        await asyncio.gather(*ways, return_exceptions=True)
