"""The inner ssh server: what a guest meets at the end of the tunnel.

Everyone who reaches the relay's port reaches it, and the relay can send it anything. It has one
host key, made for this share; takes one kind of key, one exchange, one cipher and no compression;
and gives who has logged in the channel `SUBSYSTEM` to the session, and nothing else: no command, no
shell, no terminal, no files, no forwarding, no agent, no display. A login has `_LOGIN` seconds, and
the newest `_MOST_WAITING` connections that have not logged in are kept.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import asyncssh
from asyncssh.stream import SSHServerStreamSession

from .admission import Admission
from .invitation import private_key, raw_key

SUBSYSTEM = "criuctl-session"
FINAL = asyncssh.DISC_SERVICE_NOT_AVAILABLE  # the code of an end that is for good
ALGORITHMS: dict[str, Any] = {
    "kex_algs": ["curve25519-sha256"],
    "encryption_algs": ["aes256-gcm@openssh.com"],
    "compression_algs": ["none"],
    "signature_algs": ["ssh-ed25519"],
    "keepalive_interval": 10,
    "keepalive_count_max": 3,
    "gss_host": None,
    "config": None,
}
_LOGIN = 15.0  # seconds
_MOST_WAITING = 32
_MOST_CHANNELS = 8  # of one guest at a time
_PAUSE = 0.1  # seconds until a connection is taken again after one could not be

Reader: TypeAlias = asyncssh.SSHReader[bytes]
Writer: TypeAlias = asyncssh.SSHWriter[bytes]
Channel = Callable[[Reader, Writer], Awaitable[None]]


class Server:
    """The server of one share."""

    def __init__(
        self,
        host_seed: bytes,
        admission: Admission,
        channel: Channel,
        changed: Callable[[], None],
    ) -> None:
        """`channel` serves the guest's channels; `changed` is called when the guest has come or
        left.
        """
        self.admission, self._channel, self._changed = admission, channel, changed
        self._waiting: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
        self._guest: asyncssh.SSHServerConnection | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._options = asyncssh.SSHServerConnectionOptions(
            server_factory=lambda: _Login(self),
            server_host_keys=[private_key(host_seed)],
            server_version="criuctl",
            login_timeout=_LOGIN,
            encoding=None,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            agent_forwarding=False,
            x11_forwarding=False,
            allow_pty=False,
            line_editor=False,
            allow_scp=False,
            **ALGORITHMS,
        )

    @property
    def here(self) -> bool:
        """Whether the guest is connected."""
        return self._guest is not None

    async def run(self, listener: socket.socket) -> None:
        """Take connections, until this is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        with listener:
            while not self._ended:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # too many open files, say
                    await asyncio.sleep(_PAUSE)
                    continue
                while len(self._waiting) >= _MOST_WAITING:
                    self._drop(next(iter(self._waiting)))
                self._waiting[sock] = asyncio.create_task(self._greet(sock))

    def cut(self, reason: str) -> None:
        """Close every connection now, and take no more; the guest gets the reason."""
        self._ended = True
        for task in list(self._tasks):
            task.cancel()
        for sock in list(self._waiting):
            self._drop(sock)
        if self._guest is not None:
            self._guest.disconnect(FINAL, reason)

    # -- logins -----------------------------------------------------------------------------------

    async def _greet(self, sock: socket.socket) -> None:
        try:
            if self._ended:
                sock.close()
            else:
                await asyncssh.run_server(sock, options=self._options)
        except (asyncssh.Error, OSError, TimeoutError):
            pass  # not a guest
        finally:
            self._waiting.pop(sock, None)

    def _drop(self, sock: socket.socket) -> None:
        self._waiting.pop(sock).cancel()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def entered(self, connection: asyncssh.SSHServerConnection, user: str, key: bytes) -> None:
        """Let a guest in that has proved to have `key`."""
        if self._ended or not self.admission.enter(user, key):
            connection.abort()
            return
        before, self._guest = self._guest, connection
        if before is not None:
            before.abort()  # the guest has come back on another connection
        self._changed()

    def left(self, connection: asyncssh.SSHServerConnection | None) -> None:
        """Note that a connection is gone."""
        if connection is not None and self._guest is connection:
            self._guest = None
            self._changed()

    # -- channels ---------------------------------------------------------------------------------

    def channel(self, connection: asyncssh.SSHServerConnection | None) -> _Channel | None:
        """Return a new channel for the guest; None: it has enough."""
        if self._ended or connection is None or connection is not self._guest:
            return None
        return _Channel(self._serve) if len(self._tasks) < _MOST_CHANNELS else None

    async def _serve(self, reader: Reader, writer: Writer, _errors: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._ended:
                await self._channel(reader, writer)
        except (asyncssh.Error, OSError):
            pass  # the guest has gone, or the holder
        finally:
            self._tasks.discard(task)
            writer.close()


class _Login(asyncssh.SSHServer):
    """One connection, from its first byte on."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: asyncssh.SSHServerConnection | None = None
        self._key = b""  # the one that was offered last, so the one that was proved

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self._connection)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        self._key = raw_key(key)
        return self._server.admission.admits(username, self._key)

    def auth_completed(self) -> None:
        assert self._connection is not None
        user = str(self._connection.get_extra_info("username"))
        self._server.entered(self._connection, user, self._key)

    def session_requested(self) -> Any:
        return self._server.channel(self._connection) or False


class _Channel(SSHServerStreamSession[bytes]):
    """A channel, which carries the holder's protocol or nothing."""

    def shell_requested(self) -> bool:
        return False

    def exec_requested(self, command: str) -> bool:
        return False

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == SUBSYSTEM
