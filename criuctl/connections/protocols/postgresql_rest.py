"""Whether it is safe to speak on a session of the program's, found out without saying a word on it.

Two things would do harm.  A plain message into a session that is **encrypted** ends it.  A Sync
while **a query is in flight** puts one ReadyForQuery too many behind its answer.  Neither can be
asked of the session itself, so:

Encryption.  Unix sockets have none.  For TCP a connection of our own asks the server whether it
does TLS, before any login; a no settles it (but for a server whose TLS was turned off by a reload
in the life of the session).  If it does, only the server knows about the session: we log in beside
it (user of the rule's options, of the local server process's title or of the program's environment;
the password as for the restore) and look into `pg_stat_ssl` and `pg_stat_gssapi` for the session
with our address and port.  What is not proved to be plain counts as encrypted, unless the rule's
option
``tls: false`` vouches for it.  GSSAPI encryption needs a Kerberos configuration on the client's
side; where there is none, the question does not arise.

In flight.  Queues must be empty.  A local server process tells in its title, once it had time to; a
session that we found in `pg_stat_activity` tells there; else TCP knows whether something was sent
after the last that came.  Its clock is coarse (a tick), so in doubt we wait a moment for an answer
to arrive.  Left open is a query that runs longer than that and was sent within a tick of the
previous answer, at a server that is not local: then its answer is found in front of ours, nothing
of it is touched, and the surplus ReadyForQuery comes right behind it, where libpq passes over it.
"""

from __future__ import annotations

import os
import pwd
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from ...checkpoint.manifest import ConnectionRecord
from ...errors import CriuctlError
from ...proc.sockdiag import namespace_socket
from .base import CannotRebuild, PeerAway
from .postgresql_auth import Login, log_in
from .postgresql_wire import (
    GSSENC_REQUEST,
    SSL_REQUEST,
    TERMINATE,
    Conversation,
    ServerError,
    bind,
    execute,
    parse,
    rows,
)
from .wire import Wire

_SETTLE = 0.05  # seconds in which the answer to a quick query has come
_TITLE = re.compile(
    r"postgres: (?:[^ ]+: )?(?P<user>[^ ]+) (?P<database>[^ ]+) "
    r"(?P<from>\[local\]|[^ ]+\(\d+\)) (?P<doing>.+)"
)
_LOOK = """
SELECT s.ssl::text, coalesce(g.encrypted, false)::text, a.state
FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_stat_ssl s USING (pid)
LEFT JOIN pg_catalog.pg_stat_gssapi g USING (pid)
WHERE pg_catalog.host(a.client_addr) = $1 AND a.client_port = $2::integer
"""
_REMEDY = (
    "; connect with sslmode=disable, or say `tls: false` in the rule's options if it surely does "
    "not"
)


class Title(Struct, frozen=True):
    """What a local server process says of itself."""

    user: str
    database: str
    doing: str


def title_of(record: ConnectionRecord) -> Title | None:
    """The title of the server process behind the connection, where it is local and tells."""
    pid = re.match(r"\d+", record.peer_process)
    if pid is None:
        return None
    try:
        text = (
            Path(f"/proc/{pid.group()}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return None
    found = _TITLE.fullmatch(text)
    return Title(found["user"], found["database"], found["doing"].strip()) if found else None


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which the program was started."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.decode(errors="surrogateescape").partition("=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def require_quiet(wire: Wire, record: ConnectionRecord) -> Title | None:
    """`CannotRebuild` if anything says that a query is in flight; the title, where there is one."""
    _require_empty(wire)
    if wire.sock.family == socket.AF_UNIX:
        wire.arrives(_SETTLE)
    else:
        info = wire.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        (sent,) = struct.unpack_from("=I", info, 44)
        (received,) = struct.unpack_from("=I", info, 52)
        # The tree is frozen: nothing is sent any more, and a pool of connections waits once, not
        # each for itself.
        wire.arrives(_SETTLE - sent / 1000)
        if sent < received and not wire.unread():
            raise CannotRebuild("a query is in flight")
    title = title_of(record)
    if title is not None:
        require_idle(title.doing)
    _require_empty(wire)
    return title


def require_idle(state: str) -> None:
    """`CannotRebuild` unless the server says of the session that it waits for the next query."""
    if state.startswith("idle in transaction"):
        raise CannotRebuild("a transaction is open")
    if state != "idle":
        raise CannotRebuild("a query is in flight")


def _require_empty(wire: Wire) -> None:
    if wire.closed():
        raise CannotRebuild("the server has closed the connection")
    if wire.unread():
        raise CannotRebuild(
            "the program has not read all that the server sent (an answer, or a notification)"
        )
    if wire.unsent():
        raise CannotRebuild("a query is in flight")


def require_plain(
    wire: Wire,
    record: ConnectionRecord,
    vouched: bool,
    login: Callable[[Mapping[str, str]], Login | None],
) -> str:
    """How we know that the session is not encrypted; `CannotRebuild` if we do not.  `login` makes
    the second login.
    """
    if wire.sock.family == socket.AF_UNIX:
        return "unix socket"
    if vouched:
        return "the rule says so"
    environment = environment_of(record.pid)
    try:
        offers = [_offers(wire, record, SSL_REQUEST) and "TLS"]
        if _may_use_kerberos(environment):
            offers.append(_offers(wire, record, GSSENC_REQUEST) and "GSSAPI encryption")
        offered = " and ".join(offer for offer in offers if offer)
        if not offered:
            return "the server has no TLS"
        beside = login(environment)
        if beside is None:
            raise CannotRebuild(f"the server offers {offered}, and the session may use it{_REMEDY}")
        return _ask_beside(wire, record, beside, offered)
    except PeerAway as error:
        raise CannotRebuild(
            f"whether the session is encrypted cannot be found out: {error.message}{_REMEDY}"
        ) from error


def _offers(wire: Wire, record: ConnectionRecord, request: bytes) -> bool:
    with _connect(wire, record) as sock:
        second = Wire(sock, wire.deadline, wire.peer)
        second.send(request)
        answer = second.receive(1)
    if answer == b"E":
        raise PeerAway(f"{wire.peer} has no place for a second connection")
    if answer not in (b"S", b"N", b"G"):
        raise CannotRebuild(f"{wire.peer} does not speak PostgreSQL's protocol")
    return answer in b"SG"


def _ask_beside(wire: Wire, record: ConnectionRecord, login: Login, offered: str) -> str:
    """Log in on a connection of our own and look for the session there."""
    host, port = wire.sock.getsockname()[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    unknown = f"the server offers {offered}, and whether the session uses it cannot be found out"
    with _connect(wire, record) as sock:
        talk = Conversation(Wire(sock, wire.deadline, wire.peer))
        try:
            log_in(talk, login)
            batch = (
                parse(b"", _LOOK.encode())
                + bind(b"", b"", [host.encode(), str(port).encode()])
                + execute(b"")
            )
            found = rows(talk.carry_out(batch, "looking for the session"))
            talk.wire.send(TERMINATE)
        except (CriuctlError, ServerError) as error:
            raise CannotRebuild(
                f"{unknown}: {getattr(error, 'message', error)}{_REMEDY}"
            ) from error
    if len(found) != 1 or None in found[0]:
        raise CannotRebuild(
            f"{unknown}: user {login.user.decode(errors='replace')} does not see it there{_REMEDY}"
        )
    tls, gss, state = ((value or b"").decode() for value in found[0])
    if tls != "false" or gss != "false":
        raise CannotRebuild(f"the session is encrypted ({'TLS' if tls != 'false' else 'GSSAPI'})")
    require_idle(state)
    return "the server says so"


def _connect(wire: Wire, record: ConnectionRecord) -> socket.socket:
    """A connection of our own to the same server, from the program's net namespace."""
    own = namespace_socket(record.pid, wire.sock.family, socket.SOCK_STREAM)
    try:
        own.setblocking(False)
        try:
            own.connect(wire.sock.getpeername())
        except BlockingIOError:
            poller = select.poll()
            poller.register(own, select.POLLOUT)
            if not poller.poll(max(0.0, wire.deadline - time.monotonic()) * 1000):
                raise PeerAway(f"{wire.peer} does not accept a second connection in time") from None
            failed = own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed)) from None
    except OSError as error:
        own.close()
        raise PeerAway(
            f"{wire.peer} does not accept a second connection: {error.strerror}"
        ) from error
    except BaseException:
        own.close()
        raise
    return own


def _may_use_kerberos(environment: Mapping[str, str]) -> bool:
    named = any(
        environment.get(name) for name in ("KRB5CCNAME", "KRB5_CONFIG", "KRB5_CLIENT_KTNAME")
    )
    return named or os.path.exists("/etc/krb5.conf")


def user_name(uid: int) -> str | None:
    """The name of a user of this system, which is libpq's default for the name at the server."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
