"""Whether a message may be sent on the program's session, determined without sending one.

Two cases would do harm. A plain message into an **encrypted** session ends it. A Sync while **a
query is in flight** adds a ReadyForQuery behind its answer. The session itself cannot be asked, so:

Encryption. Unix sockets have none. For TCP a separate connection asks the server whether it offers
TLS, before any login; if it does not, the session is plain (except at a server whose TLS was turned
off by a reload during the session's life). If it does, only the server knows. criuctl then logs in
on a second connection and looks for the session's address and port in `pg_stat_ssl` and
`pg_stat_gssapi`. The user comes from the rule's options, the title of a local server process or the
program's environment; the password as for the restore. A session that is not proved to be plain
counts as encrypted, unless the rule's option ``tls: false`` asserts the opposite. GSSAPI encryption
needs a Kerberos configuration on the client's side; it is not checked where there is none.

In flight. Queues must be empty. A local server process shows its state in its title, after a short
delay. For a session that was found in `pg_stat_activity` that view shows the state. Otherwise TCP
shows whether something was sent after the last answer. TCP's clock is coarse (a tick), so in doubt
criuctl waits a moment for an answer to arrive. One case remains undetected: a query that runs
longer than that, was sent within a tick of the previous answer, and runs at a server that is not
local. Then its answer arrives before the one to the Sync. It is left unread, and the additional
ReadyForQuery follows directly behind it, where libpq ignores it.
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

from ...checkpoint.connection_record import ConnectionRecord
from ...errors import CriuctlError
from ...proc.namespace_sockets import namespace_socket
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

_SETTLE = 0.05  # seconds within which the answer to a quick query arrives
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
    "; connect with sslmode=disable, or set `tls: false` in the rule's options if it certainly "
    "does not"
)


class Title(Struct, frozen=True):
    """The state of a local server process, from its title."""

    user: str
    database: str
    doing: str


def title_of(record: ConnectionRecord) -> Title | None:
    """Return the title of the server process behind the connection; None if it is not local or has
    no readable title.
    """
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
    """Return the environment with which the program was started."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.decode(errors="surrogateescape").partition("=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def require_quiet(wire: Wire, record: ConnectionRecord) -> Title | None:
    """Raise `CannotRebuild` if there is any sign of a query in flight; return the title of the
    server process, if there is one.
    """
    _require_empty(wire)
    if wire.sock.family == socket.AF_UNIX:
        wire.arrives(_SETTLE)
    else:
        info = wire.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        (sent,) = struct.unpack_from("=I", info, 44)
        (received,) = struct.unpack_from("=I", info, 52)
        # The tree is frozen and sends nothing more, so the connections of a pool wait only once
        # and not one after another.
        wire.arrives(_SETTLE - sent / 1000)
        if sent < received and not wire.unread():
            raise CannotRebuild("a query is in flight")
    title = title_of(record)
    if title is not None:
        require_idle(title.doing)
    _require_empty(wire)
    return title


def require_idle(state: str) -> None:
    """Raise `CannotRebuild` unless the server reports that the session is idle."""
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
    """Return the evidence that the session is not encrypted; raise `CannotRebuild` without any.

    `login` returns the login for the second connection.
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
        second = login(environment)
        if second is None:
            raise CannotRebuild(f"the server offers {offered}, and the session may use it{_REMEDY}")
        return _ask_server(wire, record, second, offered)
    except PeerAway as error:
        raise CannotRebuild(
            f"cannot determine whether the session is encrypted: {error.message}{_REMEDY}"
        ) from error


def _offers(wire: Wire, record: ConnectionRecord, request: bytes) -> bool:
    with _connect(wire, record) as sock:
        second = Wire(sock, wire.deadline, wire.peer)
        second.send(request)
        answer = second.receive(1)
    if answer == b"E":
        raise PeerAway(f"{wire.peer} accepts no second connection")
    if answer not in (b"S", b"N", b"G"):
        raise CannotRebuild(f"{wire.peer} does not speak PostgreSQL's protocol")
    return answer in b"SG"


def _ask_server(wire: Wire, record: ConnectionRecord, login: Login, offered: str) -> str:
    """Log in on a second connection and look for the session there."""
    host, port = wire.sock.getsockname()[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    unknown = f"the server offers {offered}, and it is unknown whether the session uses it"
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
            f"{unknown}: user {login.user.decode(errors='replace')} cannot see the session{_REMEDY}"
        )
    tls, gss, state = ((value or b"").decode() for value in found[0])
    if tls != "false" or gss != "false":
        raise CannotRebuild(f"the session is encrypted ({'TLS' if tls != 'false' else 'GSSAPI'})")
    require_idle(state)
    return "the server says so"


def _connect(wire: Wire, record: ConnectionRecord) -> socket.socket:
    """Make a second connection to the same server, from the program's net namespace."""
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
    """Return the name of a user of this system, which is libpq's default for the name at the
    server.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
